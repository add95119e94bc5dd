"""Figures of single parts, each from one command: `python -m scripts.measure NAME`. Whole runs are `shoal bench`'s."""
