"""The marker `zero`: backends and world sizes of a test, read and refused when it is collected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

import pytest

from zsim.errors import ZsimError, listed
from zsim.io.arguments import described
from zsim.scenario.scenario import Scenario
from zsim.testing.case import SIM, BackendCase
from zsim.testing.plugin.settings import SessionOptions, backends_of

KEYWORDS = ("scenario", "world_size", "backend")
MOST_RANKS = 1_000_000


class MarkerError(ZsimError):
    """A marker `zero` that cannot be read."""


def cases(
    markers: list[pytest.Mark], settings: SessionOptions, *, compares: bool
) -> Iterator[BackendCase]:
    """The cases of a test with these markers, the nearest first; MarkerError for a mistake.

    What the marker does not name is that of --zero-backend and --zero-world-size. A test that
    `compares` leaves out the simulator, unless it has nothing else.
    """
    keywords = _keywords(markers)
    backends = _listed(keywords.get("backend", settings.backends), str)
    if not backends:
        raise _unfit("backend", 'a backend or a list, as ["sim", "gloo"]', keywords["backend"])
    backends = backends_of(backends, where="backend")
    if compares:
        backends = [name for name in backends if name != SIM] or backends
    sizes = _listed(keywords.get("world_size", settings.world_sizes or None), int)
    if not all(1 <= size <= MOST_RANKS for size in sizes) or (
        not sizes and keywords.get("world_size") is not None
    ):
        sizes_value = keywords.get("world_size", settings.world_sizes)
        raise _unfit("world_size", "numbers of ranks, as 4 or [2, 4]", sizes_value)
    source = keywords.get("scenario")
    if not isinstance(source, Scenario | str | PathLike | None):
        raise _unfit("scenario", "a Scenario or the path of its file", source)
    for backend in backends:
        for size in dict.fromkeys(sizes) or (None,):
            yield BackendCase(backend=backend, world_size=size, source=source)


def _keywords(markers: list[pytest.Mark]) -> Mapping[str, Any]:
    """The keywords of all markers of a test: those of a nearer one win."""
    keywords: dict[str, Any] = {}
    for mark in reversed(markers):
        unknown = [*mark.args, *(name for name in mark.kwargs if name not in KEYWORDS)]
        if unknown:
            raise MarkerError(
                where="marker zero", expected=f"the keywords {listed(KEYWORDS, 'and')}",
                found=described(unknown[0]), remedy="@pytest.mark.zero(backend=[…])",
            )
        keywords |= mark.kwargs
    return keywords


def _listed(value: object, kind: type) -> list[Any]:
    """`value` in a list, a list itself; [] where something in it is of another type."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    fits = all(isinstance(each, kind) and not isinstance(each, bool) for each in values)
    return values if fits else []


def _unfit(keyword: str, expected: str, value: object) -> MarkerError:
    return MarkerError(where=f"marker zero: {keyword}", expected=expected, found=described(value))
