"""Fits of constants to measurements, and the cluster file that results."""
