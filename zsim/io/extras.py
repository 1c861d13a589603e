"""Libraries of optional extras, imported when they are asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from zsim.errors import ZsimError


def library(
    name: str, *, error: type[ZsimError], where: str, expected: str, remedy: str
) -> Any:
    """The module `name`; `error` with the way to install it where it is missing."""
    try:
        return import_module(name)
    except ImportError:
        raise error(where=where, expected=expected, found="none", remedy=remedy) from None
