"""Runners execute plans, one kind per backend. A backend is imported when a runner of its kind is made."""
