"""Replicated parameters, as DDP holds them."""
