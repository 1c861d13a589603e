"""Tracing: an nn.Module becomes a ModelSpec."""
