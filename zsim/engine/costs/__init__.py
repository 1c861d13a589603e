"""Durations of ops: kernels, collectives, copies, work of the host."""
