"""The engine: stamps times on a Program."""
