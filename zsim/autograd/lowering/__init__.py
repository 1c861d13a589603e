"""Lowering: from a model to the kernels and memory events of each of its modules."""
