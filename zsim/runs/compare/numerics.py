"""Numerics of Runs: whether parameters, gradients and losses of real training are those of one
process. It reads Runs and nothing else.

Where nothing rounds nothing is allowed: what training begins with, float32 master copies among it,
and what one step of the optimizer makes of given state and gradients, are held to the bit where a
Run tells them. That leaves to the wide bound of two bytes what rounding does from step to step, and
nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from zsim.ir.run import Numerics, Run, sees
from zsim.runs.compare.check import Check

NUMERICS_BOUND = {"float32": 0.001, "bfloat16": 0.2, "float16": 0.2}
"""By dtype of compute: how far parameters may end up from the reference, relative to how far
training moved them.

Reductions add in another order than one process does: the project's scenarios reach 0.00001 and, in
two bytes, 0.05. A parameter that is not trained at all is 1 away. AdamW divides the scale of
gradients out, so that half of every gradient is only 0.003 to 0.02 away under it, which in two
bytes passes for rounding; hence gradients have a bound of their own.
"""

GRADIENT_BOUND = {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.05}
"""By dtype of compute: how far one step's gradients may be from those of one process with the same
parameters, relative to their size.

Nothing but the order of sums is between them: the project's scenarios reach 1.2e-7 and, in two
bytes, 0.005; eight ranks with four micro-batches each 0.01. Half of a gradient is 0.5 away.
"""

LOSS_SHARE = 0.1
"""Losses may differ by this share of the bound on parameters, relative to themselves: 0.0001, or
0.02 in two bytes."""


def numerics(predicted: Run, measured: Run) -> Check:
    """Whether every rank that looked ended where the reference did, with its losses on the way."""
    seeing = [run for run in (predicted, measured) if sees(run, "numerics")]
    silent = next((words for words in map(_silence, seeing) if words), "")
    if silent:
        return Check(name="numerics", status="failed", detail=silent)
    found = [rank.numerics for run in seeing for rank in run.ranks if rank.numerics is not None]
    computes = {
        run.provenance["computes_in"]
        for run in (predicted, measured)
        if "computes_in" in run.provenance
    }
    other = next(
        ((one.dtype, dtype) for one in found for dtype in sorted(computes) if one.dtype != dtype),
        None,
    )
    if other:
        return Check(name="numerics", status="failed", detail=f"a rank computes in {other[0]}, "
                                                              f"the scenario in {other[1]}")
    if not found:
        blind = f"unsupported: {measured.backend} cannot see numerics"
        reason = (
            blind
            if measured not in seeing
            else "unsupported: no side compared itself with the reference"
        )
        return Check(name="numerics", status="unsupported", detail=reason)
    bound = min(NUMERICS_BOUND.get(numerics.dtype, 0.0) for numerics in found)
    finite = all(
        math.isfinite(loss) for one in found for loss in (*one.losses, *one.reference_losses)
    )
    losses = _loss_difference(found, measured.world_size)
    worst = _worst(numerics.largest_relative_difference for numerics in found)
    gradients = _worst(numerics.largest_gradient_difference for numerics in found)
    gradients_bound = min(GRADIENT_BOUND.get(numerics.dtype, 0.0) for numerics in found)
    unequal, cut = _unequal(found), _cut(seeing, found)
    ranked = [
        (rank.rank, rank.numerics)
        for run in seeing
        for rank in run.ranks
        if rank.numerics is not None
    ]
    close = worst <= bound and gradients <= gradients_bound and losses <= LOSS_SHARE * bound
    good = finite and close and not unequal and not cut
    steps = found[0].steps
    detail = (
        f"parameters after {steps} steps: {worst:.2g} of their way apart from the reference, at "
        f"most {bound:g} allowed"
        f"; gradients {gradients:.2g} of their size, at most {gradients_bound:g}"
    )
    if worst > bound or gradients > gradients_bound:
        detail += _furthest(ranked, of_gradients=gradients > gradients_bound)
    detail += "" if finite else "; a loss is not finite"
    detail += "".join(f"; {words}" for words in (unequal, cut) if words)
    detail += (
        f"; losses {losses:.1g} apart, at most {LOSS_SHARE * bound:g}"
        if losses > LOSS_SHARE * bound
        else ""
    )
    if worst > bound and gradients <= gradients_bound:
        detail += (
            "; gradients agree, so look at the optimizer, or at a learning rate that makes "
            "rounding grow from step to step"
        )
    return Check(name="numerics", status="ok" if good else "failed", measured=worst, detail=detail)


def _furthest(ranked: list[tuple[int, Numerics]], *, of_gradients: bool) -> str:
    """Which parameter it is, and on which rank, where a rank says so."""
    if of_gradients:
        rank, numbers = max(ranked, key=lambda one: _ordered(one[1].largest_gradient_difference))
        return (
            f"; the gradient of {numbers.furthest_gradient} on rank {rank}"
            if numbers.furthest_gradient
            else ""
        )
    rank, numbers = max(ranked, key=lambda one: _ordered(one[1].largest_relative_difference))
    return f"; {numbers.furthest_parameter} on rank {rank}" if numbers.furthest_parameter else ""


def _ordered(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference


def _unequal(found: list[Numerics]) -> str:
    """What is not to the bit what it must be, whatever the dtype: where training begins, and the
    optimizer's own step; or ""."""
    begins = _worst(
        [0.0, *(one.initial_difference for one in found if one.initial_difference is not None)]
    )
    if begins != 0:
        return f"what the optimizer steps begins {begins:.2g} away from the model's own parameters"
    apart = _worst(
        [0.0, *(one.step_difference for one in found if one.step_difference is not None)]
    )
    if apart != 0:
        return (
            f"one step of the optimizer ends {apart:.2g} away from where torch's takes the same "
            f"state and gradients"
        )
    return ""


def _cut(runs: list[Run], found: list[Numerics]) -> str:
    """What shows that not every step of training was compared, or ""."""
    least = max(
        [2, *(int(steps) for run in runs if (steps := run.provenance.get("steps", "")).isdecimal())]
    )
    short = min(one.steps for one in found)
    if short < least:
        return f"losses of {short} steps, of at least {least}"
    return (
        ""
        if len({one.steps for one in found}) == 1
        else "ranks tell losses of different numbers of steps"
    )


def _worst(differences: Iterable[float]) -> float:
    return max(differences, key=_ordered)


def _silence(run: Run) -> str:
    """What shows that a rank which should have told its numerics did not, or ""."""
    silent = [rank.rank for rank in run.ranks if rank.numerics is None]
    if not silent or not run.complete:
        return ""
    if len(silent) < len(run.ranks):
        return f"rank {silent[0]} of {run.backend} tells none, though others do"
    return (
        f"no rank of {run.backend} tells any, though its Run says it sees them"
        if "sees" in run.provenance
        else ""
    )


def _loss_difference(found: list[Numerics], world_size: int) -> float:
    """The largest relative difference of the mean loss over all ranks to the reference's, in any
    step; 0 where ranks are missing."""
    if any(not len(one.losses) == len(one.reference_losses) == one.steps for one in found):
        return math.inf
    if len(found) != world_size:
        return 0.0  # some ranks were observed, and a mean over all needs all
    means = [sum(step) / world_size for step in zip(*(one.losses for one in found), strict=True)]
    pairs = [pair for one in found for pair in zip(means, one.reference_losses, strict=True)]
    return _worst([0.0, *(abs(mean - wanted) / abs(wanted or 1.0) for mean, wanted in pairs)])
