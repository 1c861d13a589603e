"""Traces of torch's profiler as Runs: a user's own training, compared and explained as ours is."""
