"""Checkpoints: files with their bytes, time to save and to load, resharding, best interval."""
