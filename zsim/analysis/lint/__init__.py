"""Lint: what a scenario does that its user may not want, found before anything is launched."""
