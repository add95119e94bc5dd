"""shoal: many agents, one pass through the weights."""
