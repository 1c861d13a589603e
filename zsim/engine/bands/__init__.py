"""Error bands of predicted times."""
