"""Runs of a session against saved ones: figures that may grow by so much, and no more.

It reads saved Runs and figures. Which test is held to them it does not know.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from zsim import api
from zsim.errors import ZsimError, shown
from zsim.io.units import format_bytes, format_time
from zsim.ir.run import RunRecord
from zsim.runs import metrics
from zsim.runs.metrics import Figures
from zsim.runs.run import Run

INCOMPLETE = ".incomplete.json"
"""The ending of the file of a Run that did not reach its end."""
UNCHANGED = "unchanged"
_LIMIT = re.compile(r"\s*(\w+)\s*:\s*\+(\d{1,6}(?:\.\d{1,6})?)\s*%\s*", re.ASCII)


class RegressionError(ZsimError):
    """A saved Run or a limit that a session cannot be held to."""


@dataclass(frozen=True, slots=True)
class LimitedFigure:
    """A figure that is worse when it grows: `read` from a Run's figures, and shown."""

    read: Callable[[Figures], int | None]
    show: Callable[[int], str]


def _count(figures: Figures) -> int:
    return sum(traffic.count for traffic in figures.collectives.values())


def _grouped(number: int) -> str:
    return f"{number:,}"


FIGURES: dict[str, LimitedFigure] = {
    "peak": LimitedFigure(lambda figures: figures.peak_memory_bytes, format_bytes),
    "first_peak": LimitedFigure(lambda figures: figures.peak_first_step_bytes, format_bytes),
    "step": LimitedFigure(lambda figures: figures.step_time_ns, format_time),
    "exposed": LimitedFigure(lambda figures: figures.exposed_communication_ns, format_time),
    "sent": LimitedFigure(lambda figures: figures.bytes_sent_per_rank, format_bytes),
    "collectives": LimitedFigure(_count, _grouped),
}
"""The figures of `--zero-fail-if`, by name."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The share by which a figure may grow."""

    name: str
    share: float


def parse_limits(text: str) -> tuple[Limit, ...]:
    """The limits of a text.

    >>> parse_limits("peak:+2%, step:+5%")
    (Limit(name='peak', share=0.02), Limit(name='step', share=0.05))
    """
    limits = []
    for part in text.split(","):
        match = _LIMIT.fullmatch(part)
        if match is None or match[1] not in FIGURES:
            raise RegressionError(
                where="--zero-fail-if",
                expected=f'limits as "peak:+2%,step:+5%", of {", ".join(FIGURES)}',
                found=shown(part.strip()),
            )
        limits.append(Limit(match[1], float(match[2]) / 100))
    return tuple(limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A figure before and now; `limit` is None where any growth is allowed."""

    name: str
    before: int
    now: int
    limit: Limit | None

    @property
    def share(self) -> float:
        """The growth as a share of the figure before."""
        return self.now / self.before - 1 if self.before else float(bool(self.now))

    @property
    def is_over(self) -> bool:
        """True where it grew by more than its limit."""
        allowed = None if self.limit is None else self.before * self.limit.share
        return allowed is not None and self.now - self.before > allowed

    def __str__(self) -> str:
        show = FIGURES[self.name].show
        over = f", more than +{100 * self.limit.share:g} %" if self.limit and self.is_over else ""
        return f"{self.name} {show(self.now)}, was {show(self.before)}: {self.share:+.2%}{over}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A Run that was held to the saved one in `path`; `unseen` are limits of figures that its
    backend does not measure."""

    path: Path
    growths: tuple[Growth, ...]
    unseen: tuple[str, ...] = ()

    @property
    def over(self) -> tuple[Growth, ...]:
        """The figures that grew by more than they may."""
        return tuple(growth for growth in self.growths if growth.is_over)

    def __str__(self) -> str:
        if all(growth.now == growth.before for growth in self.growths) and not self.unseen:
            return UNCHANGED
        unseen = (f"{name} not measured" for name in self.unseen)
        return "; ".join([*map(str, self.growths), *unseen])


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

        None where there is no such. RegressionError where the scenario has changed since.
        """
        near = [(path, record) for path, record in self._named(run) if _alike(record, run.record)]
        if not near:
            return None
        same = [each for each in near if _fingerprint(each[1]) == _fingerprint(run.record)]
        if not same:
            path, record = near[0]
            raise RegressionError(
                where=f"--zero-compare {path}",
                expected=f"{run.record.scenario} of fingerprint {_fingerprint(run.record)}",
                found=f"{_fingerprint(record)}: the scenario has changed since",
                remedy="save its Run anew",
            )
        path, record = same[0]
        growths = tuple(self._growths(record, run))
        seen = {growth.name for growth in growths}
        unseen = tuple(limit.name for limit in self.limits if limit.name not in seen)
        return Held(path=path, growths=growths, unseen=unseen)

    def _growths(self, record: RunRecord, run: Run) -> Iterator[Growth]:
        before, limits = metrics.figures(record, run.scenario), self.limits
        of_name = {limit.name: limit for limit in limits}
        for name in of_name or ("peak", "step"):
            then, now = FIGURES[name].read(before), FIGURES[name].read(run.figures)
            if then is not None and now is not None:  # else a backend does not see it
                yield Growth(name=name, before=then, now=now, limit=of_name.get(name))

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
