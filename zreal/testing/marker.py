"""The marker `ranks`: numbers of ranks, timeout and backend of a test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from zsim.errors import ZsimError, listed
from zsim.io.arguments import described

BACKENDS = ("gloo", "nccl")
MOST_RANKS = 64
"""Most ranks of a test on this machine, each of which is a process."""
EXAMPLE = '@pytest.mark.ranks(4, timeout=30, backend="gloo")'


class RanksMarkerError(ZsimError):
    """A marker `ranks` that cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksMarker:
    """The arguments of a marker, read."""

    world_sizes: tuple[int, ...]
    is_list: bool
    """The numbers of ranks are given as a list, which makes a test of each."""
    timeout_s: float | None
    backend: str


def read(mark: pytest.Mark, world_sizes: list[int]) -> RanksMarker:
    """The arguments of a marker; RanksMarkerError for a mistake in them.

    `world_sizes` are those of --zero-world-size, of a marker that names none.
    """
    unknown = [*mark.args[1:], *(mark.kwargs.keys() - {"timeout", "backend"})]
    argument = mark.args[0] if mark.args else world_sizes or None
    if argument is None or unknown:
        raise _unfit("", "a number of ranks, timeout and backend", unknown[0] if unknown else None)
    timeout = mark.kwargs.get("timeout")
    sizes = tuple(argument) if isinstance(argument, list | tuple) else (argument,)
    if not sizes or not all(_is_number(size, int) and size <= MOST_RANKS for size in sizes):
        raise _unfit("", f"numbers of ranks from 1 to {MOST_RANKS}, as 4 or [2, 4]", argument)
    if timeout is not None and not _is_number(timeout, int | float):
        raise _unfit(": timeout", "seconds, more than 0", timeout)
    backend = mark.kwargs.get("backend", BACKENDS[0])
    if backend == "threads":
        expected = "processes, of gloo or nccl, since threads share torch's state and its crashes"
        raise _unfit(": backend", expected, backend)
    if backend not in BACKENDS:
        raise _unfit(": backend", listed(BACKENDS), backend)
    return RanksMarker(
        world_sizes=tuple(dict.fromkeys(sizes)), is_list=isinstance(argument, list | tuple),
        timeout_s=timeout, backend=backend,
    )


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and 0 < value < float("inf")


def _unfit(where: str, expected: str, value: object) -> RanksMarkerError:
    return RanksMarkerError(
        where=f"marker ranks{where}", expected=expected,
        found="nothing" if value is None else described(value), remedy=EXAMPLE,
    )
