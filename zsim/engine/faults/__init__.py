"""Faults and stragglers as data: what a scenario's `faults` mean for a Program and its times."""
