"""The schedule of a scenario's checkpoints: how often they are written, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass

from zsim.analysis.checkpoints.checkpoint import CheckpointReport
from zsim.analysis.checkpoints.interval import BestInterval, Losses, best_interval, losses
from zsim.io.units import format_time
from zsim.runs.figures.step_time import step_time
from zsim.scenario.plan import planned


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSchedule:
    """Nanoseconds of training between two checkpoints, with the share of all time for which saving
    holds training up, and what failures cost. None for what the scenario does not say."""

    every_ns: int | None
    waiting_ns: int | None
    """Time for which training waits before a save, until the one before it is written."""
    saving_share: float | None
    best: BestInterval | None
    losses: Losses | None
    """Losses at the interval of the scenario, or where it says none at Daly's."""
    warning: str = ""


def schedule_of(report: CheckpointReport) -> CheckpointSchedule:
    """The schedule of the checkpoints of `report`."""
    chosen, time = report.scenario.checkpoint, report.save.time
    mean, every = chosen.mean_time_between_failures_ns, chosen.every_ns
    if chosen.every_steps is not None:
        every = chosen.every_steps * step_time(planned(report.scenario)).ns
    best = best_interval(time.blocking_ns, mean) if mean else None
    interval = every or (best.daly_ns if best else None)
    waiting = max(0, time.ns - time.blocking_ns - interval) if interval else 0
    stopped = time.blocking_ns + waiting
    return CheckpointSchedule(
        every_ns=every,
        waiting_ns=waiting if interval else None,
        saving_share=stopped / (every + stopped) if every else None,
        best=best,
        losses=losses(
            interval, blocking_ns=time.blocking_ns, whole_ns=time.ns, load_ns=report.load.time.ns,
            mean_time_ns=mean, waiting_ns=waiting,
        ) if mean and interval else None,
        warning=(
            f"a save takes {format_time(time.ns)}, longer than the {format_time(interval)} to the "
            "next, which waits for it" if interval and waiting else ""
        ),
    )
