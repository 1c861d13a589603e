"""Corrections of fake tensors where they differ from real ones."""
