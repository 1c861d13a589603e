"""The error of a module that cannot be traced."""

from __future__ import annotations

from zsim.errors import ZsimError


class UntraceableError(ZsimError):
    """A module that cannot be traced, by the name of what stands in the way."""
