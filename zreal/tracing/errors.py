"""The error of a module that cannot be traced."""

from __future__ import annotations

from zsim.errors import ZsimError


class UntraceableError(ZsimError):
    """A module that cannot be traced, by the name of what stands in the way."""


def refuse(where: str, expected: str, instead: str, remedy: str) -> UntraceableError:
    """The error to raise; its four parts."""
    return UntraceableError(where=where, expected=expected, found=instead, remedy=remedy)
