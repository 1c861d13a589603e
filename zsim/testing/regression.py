"""Runs of a session against saved ones: figures that may grow by so much, and no more.

It reads saved Runs and figures. Which test is held to them it does not know.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zsim import api
from zsim.analysis.growth import Growth, Limit, growths
from zsim.errors import ZsimError
from zsim.ir.run import RunRecord
from zsim.runs.figures import metrics
from zsim.runs.run import Run

INCOMPLETE = ".incomplete.json"
"""The ending of the file of a Run that did not reach its end."""
UNCHANGED = "unchanged"
EDITED = "the scenario has changed since"


class RegressionError(ZsimError):
    """A saved Run or a limit that a session cannot be held to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A Run that was held to the saved one in `path`; `unseen` are limits of figures that its
    backend does not measure."""

    path: Path
    growths: tuple[Growth, ...]
    unseen: tuple[str, ...] = ()
    edited: bool = False
    """The scenario has changed since its Run was saved."""

    @property
    def over(self) -> tuple[Growth, ...]:
        """The figures that grew by more than they may."""
        return tuple(growth for growth in self.growths if growth.is_over)

    def __str__(self) -> str:
        same = all(growth.now == growth.before for growth in self.growths)
        if same and not self.unseen and not self.edited:
            return UNCHANGED
        edited = [EDITED] if self.edited else []
        unseen = (f"{name} not measured" for name in self.unseen)
        return "; ".join([*edited, *map(str, self.growths), *unseen])


class Baselines:
    """Saved Runs, one file or all of a folder, and the limits of what may grow.

    RegressionError where there are none; SavedRunError for a file that is none.
    """

    def __init__(self, path: Path, *, limits: tuple[Limit, ...] = ()) -> None:
        self.path, self.limits = path.absolute(), limits
        self._records: dict[Path, RunRecord] = {}
        if path.is_dir():
            if next(path.rglob("*.json"), None) is None:
                raise RegressionError(
                    where="--zero-compare", expected="saved Runs in this folder",
                    found=f"none in {path}",
                    remedy="`zsim run SCENARIO… --save FOLDER` writes some",
                )
        else:
            self._load(self.path)

    def held(self, run: Run) -> Held | None:
        """The Run beside the saved one of its scenario, backend, cluster and ranks.

        None where there is no such. One of the scenario as it is now wins over an earlier one's.
        """
        near = [(path, record) for path, record in self._named(run) if _alike(record, run.record)]
        if not near:
            return None
        same = [each for each in near if _fingerprint(each[1]) == _fingerprint(run.record)]
        path, record = (same or near)[0]
        growths = tuple(self._growths(record, run))
        measured = {growth.name for growth in growths}
        unseen = tuple(limit.name for limit in self.limits if limit.name not in measured)
        return Held(path=path, growths=growths, unseen=unseen, edited=not same)

    def _growths(self, record: RunRecord, run: Run) -> Iterator[Growth]:
        yield from growths(metrics.figures(record, run.scenario), run.figures, self.limits)

    def _named(self, run: Run) -> Iterator[tuple[Path, RunRecord]]:
        """Complete saved Runs of the run's scenario, by its name."""
        name, paths = run.record.scenario, [self.path]
        if self.path.is_dir():
            stem = glob.escape(name)
            found_there = {*self.path.rglob(f"{stem}.json"), *self.path.rglob(f"{stem}.*.json")}
            paths = [path for path in sorted(found_there) if not path.name.endswith(INCOMPLETE)]
        for path in paths:
            record = self._load(path)
            if record.scenario == name and record.complete:
                yield path, record

    def _load(self, path: Path) -> RunRecord:
        if path not in self._records:
            self._records[path] = api.load_run(path)
        return self._records[path]


def _fingerprint(record: RunRecord) -> str:
    return record.provenance.get("fingerprint", "none")


def _alike(record: RunRecord, other: RunRecord) -> bool:
    """True where both ran on the same backend, cluster and number of ranks."""
    return _where(record) == _where(other)


def _where(record: RunRecord) -> tuple[str | int | None, ...]:
    provenance = record.provenance
    return (
        record.backend, record.interpreter, record.world_size, provenance.get("cluster"),
        provenance.get("device"),
    )
