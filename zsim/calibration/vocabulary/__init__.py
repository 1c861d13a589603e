"""Words of published tables."""
