"""Arguments of the public functions, refused before they reach code that would fail over them."""

from __future__ import annotations

from collections.abc import Collection
from os import PathLike
from pathlib import Path

from zsim.errors import ArgumentError, listed, shown


def described(value: object) -> str:
    """An argument as an error message has it: numbers and texts themselves, else the type."""
    if value is None or isinstance(value, bool | float):
        return str(value)
    if isinstance(value, int | str):
        return shown(value)
    if isinstance(value, PathLike):
        return f"the path {shown(str(value))}"
    name = type(value).__name__
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"


def path_of(path: object, *, where: str, expected: str = "a path", remedy: str = "") -> Path:
    """The `path` of a file; ArgumentError for what is none."""
    if isinstance(path, str | PathLike):
        return Path(path)
    raise ArgumentError(where=where, expected=expected, found=described(path), remedy=remedy)


def choice_of(value: object, choices: Collection[str], *, where: str) -> str:
    """The `value` of an argument that takes one of `choices`; ArgumentError for any other, also for
    what is no text and could not be looked up."""
    if isinstance(value, str) and value in choices:
        return value
    raise ArgumentError(where=where, expected=listed(choices), found=described(value))
