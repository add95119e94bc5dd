"""Checks that a user can run: is the engine exact, are requests kept apart, how far are two models apart."""
