"""Gradients of a traced step: their storages, sums and dtypes."""
