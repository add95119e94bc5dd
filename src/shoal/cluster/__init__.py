"""Many replicas of a model behind one door: a router that knows what each of them holds."""
