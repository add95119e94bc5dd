"""Scheduling, in integers only: sequences, blocks, the prefix tree, plans. No backend, no I/O."""
