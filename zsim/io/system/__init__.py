"""Processes, signals and locks of this machine."""
