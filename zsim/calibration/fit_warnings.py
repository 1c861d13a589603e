"""Whether constants that were fitted are of the machine that they are written down for: what a fit
misses, and how far it had to go.

A fit always gives constants. Rows in another unit, or of another machine than the cluster named,
leave it residuals that no measurement has, or take a curve to a bandwidth that its links do not
have; both are said, and the constants are written all the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from zsim.calibration.fit_collectives import FittedCurves
from zsim.calibration.fit_steps import Case, Fitted
from zsim.cluster.cluster import MeasuredCurve
from zsim.cluster.collectives.nccl.curves import CURVES
from zsim.cluster.collectives.nccl.measured_curves import as_it_is
from zsim.engine.costs import Costs
from zsim.engine.step import simulate_step

MISSED = 0.2
"""Median residual of a curve or of steps from which on it is said: curves fitted to published
tables have 7 % at most, steps 2 %, and repeated runs differ by less."""
MOVED = 1.5
"""Times as much, or as little, of its links' bandwidth as published ones from which on a curve is
doubted: published tables move a curve by a tenth at most, a table in which sizes or times are off
by two moves it by that."""
MISSED_STEP = 0.1
"""And the error of a single step that hangs on the host, whose pace no constant is fitted to:
identical runs differ by 3 % at most."""
CHECK_HOST = (
    "what the host takes to launch is not fitted, and has gone into compute: leave these rows "
    "out, or set the host's constants in the file"
)
CHECK_CURVE = "check the units of sizes and times, and that the cluster has their GPUs and links"
CHECK_STEPS = (
    "check the units of the table, its number of GPUs, and that what else the rows say is how "
    "they ran"
)


def of(fitted: Fitted | None, curves: FittedCurves | None) -> list[str]:
    """What is to be doubted of all that was fitted, one sentence each."""
    found = [of_steps(fitted), of_host(fitted)] if fitted else []
    found += [
        f"{one.scope} {one.collective}: {words}"
        for one in (curves.curves if curves else ())
        if (words := of_curve(one, curves))
    ]
    return [words for words in found if words]


def of_steps(fitted: Fitted) -> str:
    """What is to be doubted of constants fitted to steps, "" for nothing."""
    by_group: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for place, case in enumerate(fitted.cases):
        by_group[case.group].append(fitted.errors[place])
    misses = {" ".join(filter(None, group)): _miss(errors) for group, errors in by_group.items()}
    bad = [f"{name} by {100 * miss:.0f} %" for name, miss in misses.items() if miss >= MISSED]
    return f"the fit misses steps of {', '.join(bad)} in the median: {CHECK_STEPS}" if bad else ""


def of_host(fitted: Fitted) -> str:
    """What is to be doubted of constants fitted to steps that hang on the host, "" where none of
    them is far off."""
    errors = [(case, abs(fitted.errors[place])) for place, case in enumerate(fitted.cases)]
    bound = [error for case, error in errors if error >= MISSED_STEP and _hangs_on_its_host(case)]
    if not bound:
        return ""
    missed = (
        f"{len(bound)} of {len(fitted.cases)} steps that half the host's pace would lengthen by a "
        f"tenth and more"
    )
    return f"the fit misses {missed}, by up to {100 * max(bound):.0f} %: {CHECK_HOST}"


def _hangs_on_its_host(case: Case) -> bool:
    """Whether a host that takes twice as long to issue each op makes the step longer by a tenth."""
    cluster, execution = case.scenario.cluster, case.scenario.executed
    own = cluster.overheads
    twice = replace(
        own, issue_kernel=2 * own.issue_kernel, issue_collective=2 * own.issue_collective,
        issue_hook=2 * own.issue_hook,
    )
    usual, slow = (
        simulate_step(
            case.program, costs=Costs(cluster=replace(cluster, overheads=one), execution=execution)
        ).step_time_ns
        for one in (own, twice)
    )
    return slow >= (1 + MISSED_STEP) * usual


def of_curve(curve: MeasuredCurve, curves: FittedCurves | None) -> str:
    """What is to be doubted of one of `curves`, "" for nothing."""
    if curves is None:
        return ""
    key, found = (curve.scope, curve.collective), list[str]()
    errors = [error for own, error in zip(curves.keys, curves.errors, strict=True) if own == key]
    if errors and (miss := _miss(errors)) >= MISSED:
        found.append(f"misses its own {len(errors)} rows by {100 * miss:.0f} % in the median")
    before = as_it_is(CURVES, *key, curves.node)
    if before and not 1 / MOVED <= curve.share / before.share <= MOVED:
        found.append(f"comes to {100 * curve.share / before.share:.0f} % of the bandwidth of "
                     f"published ones")
    return f"the fit {' and '.join(found)}: {CHECK_CURVE}" if found else ""


def _miss(errors: Sequence[float]) -> float:
    return median(map(abs, errors))
