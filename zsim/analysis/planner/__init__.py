"""Planner: the settings to train a model with, and on how many GPUs."""
