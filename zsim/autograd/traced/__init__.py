"""Traced models: a module that was seen running, as data, checked, and as a file."""
