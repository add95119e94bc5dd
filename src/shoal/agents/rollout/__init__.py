"""A second configuration on trial for a share of the tasks."""
