"""Meters: bytes, collectives and time of a real run."""
