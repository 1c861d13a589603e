"""Scenario files: read, checked, assembled, planned."""
