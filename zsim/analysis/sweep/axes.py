"""Axes of a sweep: the values that keys of a scenario take, and every combination of them.

A file names its scenario and its axes:

    scenario = "llama.toml"
    [axes]
    strategy = [{ name = "zero1" }, { name = "fsdp2", reshard_after_forward = false }]
    batch.micro_batch = [1, 2, 4]
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

from zsim.errors import ZsimError, shown
from zsim.io import limits
from zsim.io.arguments import path_of
from zsim.io.files import obstacle
from zsim.scenario.scenario import Scenario, load
from zsim.scenario.tables import merged

MAX_POINTS = 1_000_000
"""Most points of a sweep: at 30 ms each they take two hours on four cores."""


class SweepError(ZsimError):
    """Axes, or a file of them, that make no sweep."""


@dataclass(frozen=True, slots=True)
class Axes:
    """Values by dotted key, as {"batch.micro_batch": (1, 2)}. The last axis varies fastest."""

    values: Mapping[str, tuple[Any, ...]]

    @property
    def num_points(self) -> int:
        """The number of combinations."""
        return prod(map(len, self.values.values()))

    def points(self) -> Iterator[dict[str, Any]]:
        """Each combination: a value by dotted key."""
        for values in product(*self.values.values()):
            yield dict(zip(self.values, values, strict=True))


def axes_of(table: object, *, where: str) -> Axes:
    """The axes of nested tables whose leaves are lists, or of dotted keys; SweepError for others.

    >>> axes_of({"batch": {"micro_batch": [1, 2]}, "strategy.name": ["ddp"]}, where="axes").values
    {'batch.micro_batch': (1, 2), 'strategy.name': ('ddp',)}
    """
    if not isinstance(table, Mapping) or not table:
        raise SweepError(
            where=where, expected="keys of a scenario with lists of values", found=shown(table),
            remedy="for example batch.micro_batch = [1, 2, 4]",
        )
    axes = Axes(dict(_leaves(table, prefix="", where=where)))
    if axes.num_points > MAX_POINTS:
        sizes = " x ".join(f"{len(values):,}" for values in axes.values.values())
        raise SweepError(
            where=where, expected=f"at most {MAX_POINTS:,} points",
            found=f"{axes.num_points:,} ({sizes})", remedy="leave out values or split the sweep",
        )
    return axes


def _leaves(
    table: Mapping[Any, Any], *, prefix: str, where: str
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _leaves(value, prefix=f"{key}.", where=where)
        elif isinstance(value, list | tuple) and value:
            yield key, tuple(value)
        else:
            raise SweepError(
                where=f"{where}.{key}", expected="a list of values, not empty", found=shown(value)
            )


def changes_of(point: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a point, as `Scenario.with_` takes them.

    >>> changes_of({"batch.micro_batch": 2, "batch.accumulation": 4, "steps": 3})
    {'batch': {'micro_batch': 2, 'accumulation': 4}, 'steps': 3}
    """
    changes: dict[str, Any] = {}
    for key, value in point.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        changes = merged(changes, value)
    return changes


def read(path: str | PathLike[str]) -> tuple[Scenario, Axes]:
    """The scenario and the axes of a sweep's file; ZsimError for any other file."""
    file = path_of(path, where="path", expected="the path of a sweep's file")
    try:
        with file.open("rb") as stream:
            data = stream.read(limits.MAX_BYTES + 1)
        table = tomllib.loads(limits.check_text(data, where=str(file)))
    except OSError as error:
        raise SweepError(
            where=str(file), expected="a sweep's file", found=obstacle(file, error)
        ) from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SweepError(where=str(file), expected="TOML", found=str(error)) from None
    unknown = sorted(set(table) - {"scenario", "axes"})
    if unknown or not isinstance(table.get("scenario"), str):
        there = shown(table["scenario"]) if "scenario" in table else "none"
        raise SweepError(
            where=f"{file}: {'keys' if unknown else 'scenario'}",
            expected='scenario = "FILE.toml" and [axes]',
            found=f"the key {shown(unknown[0])}" if unknown else there,
        )
    base = load(file.parent / Path(table["scenario"]))
    return base, axes_of(table.get("axes"), where=f"{file}: axes")
