"""Checks of scenarios beyond the type of each key: what parts cannot be together, and limits."""
