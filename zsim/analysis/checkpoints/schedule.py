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
    return CheckpointSchedule(
        every_ns=every,
        saving_share=time.blocking_ns / (every + time.blocking_ns) if every else None,
        best=best,
        losses=losses(
            interval, blocking_ns=time.blocking_ns, whole_ns=time.ns, load_ns=report.load.time.ns,
            mean_time_ns=mean,
        ) if mean and interval else None,
        warning=(
            f"a save takes {format_time(time.ns)}, longer than the {format_time(every)} to the "
            "next, which waits for it" if every and time.ns > every + time.blocking_ns else ""
        ),
    )
