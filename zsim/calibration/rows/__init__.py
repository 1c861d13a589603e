"""Measured rows."""
