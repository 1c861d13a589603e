"""One point of a sweep: its scenario planned, simulated and assessed, as a row of a table.

A row is a dict of numbers and texts; it is the same wherever and with however many others it is
made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from zsim.analysis.assessed import figures
from zsim.analysis.sweep.axes import changes_of
from zsim.errors import ScenarioError, ZsimError
from zsim.runs.figures import metrics
from zsim.scenario.scenario import Scenario
from zsim.scenario.tables import merged
from zsim.version import __version__

Row = dict[str, Any]

FIGURES = (
    "verdict", "needed_bytes", "capacity_bytes", "allocated_bytes", "step_time_ns",
    "step_time_low_ns", "step_time_high_ns", "tokens_per_s", "ranks",
)
"""Columns of a row that is "ok"; of others they are None. Bytes are of the fullest rank, tokens of
all ranks."""


@dataclass(frozen=True, slots=True)
class Point:
    """The tables of the scenario before changes, their folder, and a value by dotted key.

    Plain data, which any worker takes.
    """

    tables: Mapping[str, Any]
    folder: str
    values: Mapping[str, Any]

    def scenario(self) -> Scenario:
        """The scenario with the changes; ScenarioError where it cannot be."""
        tables: Any = merged(self.tables, changes_of(self.values))
        return Scenario(**tables, folder=self.folder)

    def key(self) -> str:
        """Hash of everything that the row depends on: tables, the files they name, and version."""
        tables = merged(self.tables, changes_of(self.values))
        files = sorted(_files(tables, self.folder))
        digests = [(name, _digest(str(Path(self.folder, name)))) for name in files]
        text = json.dumps([__version__, tables, digests], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


def _files(value: Any, folder: str) -> set[str]:
    """The texts in `value` that name a file in `folder`."""
    if isinstance(value, Mapping):
        return set().union(*(_files(each, folder) for each in value.values()))
    if isinstance(value, list | tuple):
        return set().union(*(_files(each, folder) for each in value))
    is_name = isinstance(value, str) and 0 < len(value) < 255 and "\0" not in value
    return {value} if is_name and Path(folder, value).is_file() else set()


@cache
def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def row_of(point: Point) -> Row:
    """The row of `point`: its status "ok", "refused" or "failed", a reason, and the figures."""
    row: Row = {"status": "ok", "reason": "", **dict.fromkeys(FIGURES)}
    try:
        row.update(_figures(point.scenario()))
    except ScenarioError as error:
        row.update(status="refused", reason=error.problems[0])
    except ZsimError as error:
        row.update(status="refused", reason=str(error))
    except Exception as error:  # one bad point must not end the others
        row.update(status="failed", reason=f"{type(error).__name__}: {error}"[:300])
    return row


def _figures(scenario: Scenario) -> Row:
    memory, step = figures(scenario)
    assert step is not None
    low, high = step.band_ns
    trained = metrics.tokens(scenario) * scenario.world_size
    return {
        "verdict": memory.verdict, "needed_bytes": memory.needed.nbytes,
        "capacity_bytes": memory.capacity.nbytes, "allocated_bytes": memory.allocated_bytes,
        "step_time_ns": step.ns, "step_time_low_ns": low, "step_time_high_ns": high,
        "tokens_per_s": trained * 10**9 // max(1, step.ns), "ranks": scenario.world_size,
    }
