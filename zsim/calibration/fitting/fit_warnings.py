"""Caveats of fitted constants: residuals that no measurement has, and bandwidths that no link has.

A fit always gives constants. Rows in another unit, or of another machine, leave large residuals, or
move a curve to a bandwidth that its links do not have. The constants are written all the same, with
the caveat.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from zsim.calibration.fitting.fit_collectives import FittedCurves
from zsim.calibration.fitting.fit_steps import Fitted
from zsim.calibration.fitting.planned_steps import Case
from zsim.cluster.collectives.nccl.curves import CURVES
from zsim.cluster.collectives.nccl.measured_curves import as_it_is
from zsim.cluster.links import MeasuredCurve
from zsim.engine.costs.op_costs import Costs
from zsim.engine.simulate_step import simulate_step
from zsim.errors import Caveat, listed

MISSED = 0.2
"""Median residual of a curve or of steps, as a share, from which on there is a caveat.

Curves fitted to published tables have 7 % at most, steps 2 %, and repeated runs differ by less.
"""
MOVED = 1.5
"""Factor between a curve's bandwidth and the published one's from which on there is a caveat.

Published tables move a curve by a tenth at most. Sizes or times that are off by two move it by two.
"""
MISSED_STEP = 0.1
"""Error of a single step bound by its host, as a share, from which on there is a caveat.

No constant is fitted to the host's pace. Identical runs differ by 3 % at most.
"""
CHECK_HOST = (
    "the host's time to launch is not fitted, and has gone into compute; leave these rows out, "
    "or set the host's constants in the file"
)
CHECK_CURVE = "check the units of sizes and times, and that the cluster has their GPUs and links"
CHECK_STEPS = (
    "check the units of the table, its number of GPUs, and that what else the rows say is how "
    "they ran"
)


def caveats(fitted: Fitted | None, curves: FittedCurves | None) -> tuple[Caveat, ...]:
    """Caveats of everything that was fitted."""
    on_steps = [*of_steps(fitted), *of_host(fitted)] if fitted else []
    on_curves = [
        replace(caveat, text=f"{curve.scope} {curve.collective}: {caveat.text}")
        for curve in curves.curves for caveat in of_curve(curve, curves)
    ] if curves else []
    return (*on_steps, *on_curves)


def of_steps(fitted: Fitted) -> Iterator[Caveat]:
    """The caveat of constants that miss the steps of some group in the median; none else."""
    by_group: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for case, error in zip(fitted.cases, fitted.errors, strict=False):
        by_group[case.group].append(error)
    misses = {" ".join(filter(None, group)): _miss(errors) for group, errors in by_group.items()}
    bad = [f"{name} by {100 * miss:.0f} %" for name, miss in misses.items() if miss >= MISSED]
    if bad:
        yield Caveat(f"the fit misses steps of {listed(bad, 'and')} in the median: {CHECK_STEPS}")


def of_host(fitted: Fitted) -> Iterator[Caveat]:
    """The caveat of constants that miss steps bound by their host; none else."""
    misses = zip(fitted.cases, map(abs, fitted.errors), strict=False)
    bound = [error for case, error in misses if error >= MISSED_STEP and _is_host_bound(case)]
    if bound:
        yield Caveat(
            f"the fit misses {len(bound)} of {len(fitted.cases)} steps that half the host's pace "
            f"would lengthen by a tenth and more, by up to {100 * max(bound):.0f} %: {CHECK_HOST}"
        )


def _is_host_bound(case: Case) -> bool:
    """True where a host that issues each op in twice the time lengthens the step by a tenth."""
    cluster, execution = case.scenario.cluster, case.scenario.executed
    own = cluster.overheads
    twice = replace(
        own, issue_kernel=2 * own.issue_kernel, issue_operator=2 * own.issue_operator,
        issue_collective=2 * own.issue_collective, issue_hook=2 * own.issue_hook,
    )
    usual, slow = (
        simulate_step(
            case.program,
            costs=Costs(cluster=replace(cluster, overheads=overheads), execution=execution),
        ).step_time_ns
        for overheads in (own, twice)
    )
    return slow >= (1 + MISSED_STEP) * usual


def of_curve(curve: MeasuredCurve, curves: FittedCurves) -> Iterator[Caveat]:
    """The caveat of one of `curves` that misses its rows, or the bandwidth of published ones."""
    key, faults = (curve.scope, curve.collective), list[str]()
    errors = [error for own, error in zip(curves.keys, curves.errors, strict=True) if own == key]
    if errors and (miss := _miss(errors)) >= MISSED:
        faults.append(f"misses its own {len(errors)} rows by {100 * miss:.0f} % in the median")
    before = as_it_is(CURVES, *key, curves.node)
    if before and not 1 / MOVED <= curve.share / before.share <= MOVED:
        faults.append(f"comes to {100 * curve.share / before.share:.0f} % of the bandwidth of "
                      f"published ones")
    if faults:
        yield Caveat(f"the fit {' and '.join(faults)}: {CHECK_CURVE}")


def _miss(errors: Sequence[float]) -> float:
    return median(map(abs, errors))
