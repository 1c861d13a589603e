"""Flat parameters, as torch's FullyShardedDataParallel makes them."""
