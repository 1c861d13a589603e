"""Figures that may grow by so much from one Run to another, and no more: limits as
"peak:+2%,step:+5%", and the growth of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zsim.errors import ZsimError, listed, shown
from zsim.io.units import format_bytes, format_time
from zsim.runs.figures.metrics import Figures

_LIMIT = re.compile(r"\s*(\w+)\s*:\s*\+(\d{1,6}(?:\.\d{1,6})?)\s*%\s*", re.ASCII)


class LimitError(ZsimError):
    """A limit that cannot be read."""


@dataclass(frozen=True, slots=True)
class LimitedFigure:
    """A figure that is worse when it grows: its title, `read` from a Run's figures, and shown."""

    title: str
    read: Callable[[Figures], int | None]
    show: Callable[[int], str]


def _count(figures: Figures) -> int:
    return sum(traffic.count for traffic in figures.collectives.values())


def _grouped(number: int) -> str:
    return f"{number:,}"


FIGURES: dict[str, LimitedFigure] = {
    "peak": LimitedFigure(
        "peak of torch", lambda figures: figures.peak_memory_bytes, format_bytes
    ),
    "first_peak": LimitedFigure(
        "peak of first step", lambda figures: figures.peak_first_step_bytes, format_bytes
    ),
    "step": LimitedFigure(
        "step time", lambda figures: figures.step_time_ns, format_time
    ),
    "exposed": LimitedFigure(
        "exposed communication", lambda figures: figures.exposed_communication_ns, format_time
    ),
    "sent": LimitedFigure(
        "sent per rank", lambda figures: figures.bytes_sent_per_rank, format_bytes
    ),
    "collectives": LimitedFigure(
        "collectives", _count, _grouped
    ),
}
"""The figures that a limit may name."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The share by which a figure may grow."""

    name: str
    share: float


def parse_limits(text: str, *, where: str) -> tuple[Limit, ...]:
    """The limits of a text; LimitError, which names `where`, for another one.

    >>> parse_limits("peak:+2%, step:+5%", where="--fail-if")
    (Limit(name='peak', share=0.02), Limit(name='step', share=0.05))
    """
    limits = []
    for part in text.split(","):
        match = _LIMIT.fullmatch(part)
        if match is None or match[1] not in FIGURES:
            raise LimitError(
                where=where,
                expected=f'limits as "peak:+2%,step:+5%", of {listed(FIGURES, "and")}',
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


def growths(before: Figures, now: Figures, limits: tuple[Limit, ...]) -> Iterator[Growth]:
    """Growth of each limited figure that both have; without limits of peak and step."""
    of_name = {limit.name: limit for limit in limits}
    for name in of_name or ("peak", "step"):
        then, later = FIGURES[name].read(before), FIGURES[name].read(now)
        if then is not None and later is not None:  # else a backend does not see it
            yield Growth(name=name, before=then, now=later, limit=of_name.get(name))
