"""Backends and the Runs they return."""
