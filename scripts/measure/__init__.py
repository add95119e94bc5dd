"""Figures of the engine, each from one command: `python -m scripts.measure NAME`."""
