"""Analyses of a scenario: causes of exposed communication, changes that help, and what fits."""
