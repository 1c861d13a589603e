"""Launchers of clusters: a job step for each scenario, what its ranks left, the failure told."""
