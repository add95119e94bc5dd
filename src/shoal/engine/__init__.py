"""The engine: a step loop on a thread of its own, and the ways to talk to it."""
