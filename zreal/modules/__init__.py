"""Builds a ModelSpec as torch modules and trains it on a single process. It must know neither
shards nor meters: both interpreters and the reference stand on it."""
