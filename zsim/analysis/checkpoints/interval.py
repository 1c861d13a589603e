"""The best interval between checkpoints, and the work that a failure loses.

Sources: Young, "A first order approximation to the optimum checkpoint interval", Communications of
the ACM 17(9), 1974. Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps", Future Generation Computer Systems 22(3), 2006, equations 13, 15, 20 and 37.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import expm1, log, sqrt

NO_PROGRESS = 0.99
"""Share of lost time from which a job hardly makes progress: a hundred times the time of its steps.
"""
MOST_OF_YOUNG = 0.01
"""Largest C/M for Young's formula, which is 2/3·√(C/2M) too long: 5 % here. Daly's is within 6.2 %
for any, most just before C = 2M."""
_LARGE = 50.0
"""Number x from which log(exp(x) − 1) is x in floating point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestInterval:
    """Nanoseconds of training between two checkpoints by both formulas. `young_holds` where a save
    is so short that Young's is one."""

    young_ns: int
    daly_ns: int
    young_holds: bool = True


def best_interval(blocking_ns: int, mean_time_ns: int) -> BestInterval:
    """The interval with the least lost time, where a checkpoint holds training up for `blocking_ns`
    and the job fails every `mean_time_ns` on average.

    Young: √(2·C·M). Daly, for C < 2M: √(2·C·M)·(1 + √(C/2M)/3 + C/2M/9) − C, else M.

    >>> best_interval(50, 10_000)
    BestInterval(young_ns=1000, daly_ns=967, young_holds=True)
    """
    young = sqrt(2 * blocking_ns * mean_time_ns)
    part = blocking_ns / (2 * mean_time_ns)
    daly = (
        young * (1 + sqrt(part) / 3 + part / 9) - blocking_ns if part < 1 else float(mean_time_ns)
    )
    return BestInterval(
        young_ns=round(young), daly_ns=max(1, round(daly)), young_holds=2 * part <= MOST_OF_YOUNG
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Nanoseconds that a failure loses on average, and the share of all time that saving, lost work
    and loading take."""

    by_failure_ns: int
    share: float

    @property
    def makes_progress(self) -> bool:
        """True where steps get a hundredth of all time, or more."""
        return self.share < NO_PROGRESS


def losses(
    interval_ns: int, *, blocking_ns: int, whole_ns: int, load_ns: int, mean_time_ns: int,
    waiting_ns: int = 0,
) -> Losses:
    """Losses of a job that saves every `interval_ns` of training, and before each save waits
    `waiting_ns` for the one before it.

    A failure loses half an interval on average, what a save that is not over would have kept, and
    the time to load: T/2 + R, with R = (whole − blocking) + load. Failures come at any time, as a
    Poisson process: T of training take M·exp(R/M)·(exp((T + C)/M) − 1) on average (Daly), with
    C = blocking + waiting.
    """
    restart = whole_ns - blocking_ns + load_ns
    tried = (interval_ns + blocking_ns + waiting_ns) / mean_time_ns
    log_tried = tried if tried > _LARGE else log(expm1(tried))
    log_taken = log(mean_time_ns) + restart / mean_time_ns + log_tried
    return Losses(
        by_failure_ns=round(interval_ns / 2 + restart), share=-expm1(log(interval_ns) - log_taken)
    )
