"""Contention: what ops that run at once take from one another, and shares of links."""
