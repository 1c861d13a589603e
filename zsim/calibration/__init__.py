"""Predictions against measurements, and constants fitted to them."""
