"""Checks of memory: at rest, by part of the step, at its peak, and in the allocator's cache."""
