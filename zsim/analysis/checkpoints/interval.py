"""The best interval between checkpoints, and the work that a failure loses.

Sources: Young, "A first order approximation to the optimum checkpoint interval", Communications of
the ACM 17(9), 1974. Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps", Future Generation Computer Systems 22(3), 2006, equation 37.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True, slots=True, kw_only=True)
class BestInterval:
    """Nanoseconds of training between two checkpoints by both formulas."""

    young_ns: int
    daly_ns: int


def best_interval(blocking_ns: int, mean_time_ns: int) -> BestInterval:
    """The interval with the least lost time, where a checkpoint holds training up for `blocking_ns`
    and the job fails every `mean_time_ns` on average.

    Young: √(2·C·M). Daly, for C < 2M: √(2·C·M)·(1 + √(C/2M)/3 + C/2M/9) − C, else M.

    >>> best_interval(50, 10_000)
    BestInterval(young_ns=1000, daly_ns=967)
    """
    young = sqrt(2 * blocking_ns * mean_time_ns)
    part = blocking_ns / (2 * mean_time_ns)
    daly = (
        young * (1 + sqrt(part) / 3 + part / 9) - blocking_ns if part < 1 else float(mean_time_ns)
    )
    return BestInterval(young_ns=round(young), daly_ns=round(daly))


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Nanoseconds that a failure loses on average, and the share of all time that saving, lost work
    and loading take."""

    by_failure_ns: int
    share: float


def losses(
    interval_ns: int, *, blocking_ns: int, whole_ns: int, load_ns: int, mean_time_ns: int
) -> Losses:
    """Losses of a job that saves every `interval_ns` of training.

    A failure loses half an interval on average, what a save that is not over would have kept, and
    the time to load: T/2 + (whole − blocking) + R. Saving takes C of every T + C. First order: no
    failure falls into a load.
    """
    lost = interval_ns / 2 + (whole_ns - blocking_ns) + load_ns
    saving = blocking_ns / (interval_ns + blocking_ns)
    return Losses(by_failure_ns=round(lost), share=saving + lost / mean_time_ns)
