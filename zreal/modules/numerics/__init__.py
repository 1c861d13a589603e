"""Numerics of a real run: initial values, batches, and the single-process reference."""
