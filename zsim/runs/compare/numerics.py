"""The check of numerics: parameters, gradients and losses of real training against those of one
process. It reads Runs and nothing else.

Two comparisons are exact to the bit, where a Run has them: the parameters at the start (float32
master copies among them), and one step of the optimizer. The wide bounds of two-byte dtypes are
therefore for rounding from step to step alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from zsim.ir.run import Numerics, RunRecord, sees
from zsim.runs.compare.check import Check, unsupported

NUMERICS_BOUND = {"float32": 0.001, "bfloat16": 0.2, "float16": 0.2}
"""Largest distance of parameters from the reference, relative to the distance that training moved
them, by dtype of compute.

Reductions add in another order than one process does: the project's scenarios reach 0.00001 and, in
two bytes, 0.05. A parameter that is not trained at all is 1 away. AdamW divides the scale of
gradients out: half of every gradient is only 0.003 to 0.02 away under it. In two bytes that passes
for rounding; hence gradients have a bound of their own.
"""

GRADIENT_BOUND = {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.05}
"""Largest distance of one step's gradients from those of one process with the same parameters,
relative to their size, by dtype of compute.

Only the order of sums differs. The project's scenarios reach 1.2e-7 and, in two bytes, 0.005;
eight ranks with four micro-batches each reach 0.01. Half of a gradient is 0.5 away.
"""

LOSS_SHARE = 0.1
"""Losses may differ by this share of the bound on parameters, relative to themselves: 0.0001, or
0.02 in two bytes."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A requirement on numerics: True where it holds, and text for the report."""

    holds: bool
    text: str = ""


Ranked = list[tuple[int, Numerics]]
"""Ranks with their numerics."""


def numerics(predicted: RunRecord, measured: RunRecord) -> Check:
    """The check of every rank's parameters, gradients and losses against the reference's."""
    if drawing := measured.provenance.get("draws"):
        return unsupported(
            "numerics", f"{drawing} draws random numbers in forward, on each rank others"
        )
    mode, _, how = measured.provenance.get("numerics", "").partition(": ")
    if mode == "none":
        return unsupported("numerics", how)
    seeing = [run for run in (predicted, measured) if sees(run, "numerics")]
    ranked = [
        (rank.rank, rank.numerics)
        for run in seeing
        for rank in run.ranks
        if rank.numerics is not None
    ]
    silence = next(filter(None, map(_silence, seeing)), "")
    if problem := silence or _other_dtype(ranked, (predicted, measured)):
        return Check(name="numerics", status="failed", detail=problem)
    if not ranked:
        blind = f"{measured.backend} cannot see numerics"
        reason = blind if measured not in seeing else "no side compared itself with the reference"
        return unsupported("numerics", reason)
    observed = [numbers for _, numbers in ranked]
    parameters, gradients = _parameters(observed), _gradients(observed)
    findings = (
        parameters, gradients, _furthest(ranked, parameters, gradients), _finite(observed),
        _exact(observed), _every_step(seeing, observed), _losses(observed, measured.world_size),
        Finding(True, how),
        _remedy(parameters, gradients),
    )
    return Check(
        name="numerics", status="ok" if all(finding.holds for finding in findings) else "failed",
        measured=_worst(numbers.largest_relative_difference for numbers in observed),
        detail="; ".join(finding.text for finding in findings if finding.text),
    )


def _other_dtype(ranked: Ranked, runs: tuple[RunRecord, RunRecord]) -> str:
    """A rank that computes in another dtype than the scenario, or ""."""
    dtypes = {run.provenance["computes_in"] for run in runs if "computes_in" in run.provenance}
    return next(
        (
            f"a rank computes in {numbers.dtype}, the scenario in {dtype}"
            for _, numbers in ranked
            for dtype in sorted(dtypes)
            if numbers.dtype != dtype
        ),
        "",
    )


def _parameters(observed: list[Numerics]) -> Finding:
    """Parameters end up where the reference's do."""
    worst = _worst(numbers.largest_relative_difference for numbers in observed)
    bound = _bound(observed)
    text = (
        f"parameters after {observed[0].steps} steps: {worst:.2g} of the distance trained "
        f"apart from the reference, at most {bound:g} allowed"
    )
    return Finding(worst <= bound, text)


def _gradients(observed: list[Numerics]) -> Finding:
    """Gradients of one more step are those of one process."""
    worst = _worst(numbers.largest_gradient_difference for numbers in observed)
    bound = min(GRADIENT_BOUND.get(numbers.dtype, 0.0) for numbers in observed)
    return Finding(worst <= bound, f"gradients {worst:.2g} of their size, at most {bound:g}")


def _furthest(ranked: Ranked, parameters: Finding, gradients: Finding) -> Finding:
    """The parameter that is furthest off, or its gradient, and its rank, where a rank names it."""
    if not gradients.holds:
        rank, numbers = max(ranked, key=lambda pair: _ordered(pair[1].largest_gradient_difference))
        name = numbers.furthest_gradient and f"the gradient of {numbers.furthest_gradient}"
    elif not parameters.holds:
        rank, numbers = max(ranked, key=lambda pair: _ordered(pair[1].largest_relative_difference))
        name = numbers.furthest_parameter
    else:
        return Finding(True)
    return Finding(True, f"{name} on rank {rank}" if name else "")


def _finite(observed: list[Numerics]) -> Finding:
    """Losses are numbers."""
    losses = (loss for numbers in observed for loss in (*numbers.losses, *numbers.reference_losses))
    finite = all(map(math.isfinite, losses))
    return Finding(finite, "" if finite else "a loss is not finite")


def _losses(observed: list[Numerics], world_size: int) -> Finding:
    """Mean losses are the reference's."""
    difference, bound = _loss_difference(observed, world_size), LOSS_SHARE * _bound(observed)
    if difference <= bound:
        return Finding(True)
    return Finding(False, f"losses {difference:.1g} apart, at most {bound:g}")


def _remedy(parameters: Finding, gradients: Finding) -> Finding:
    """The next thing to look at where gradients agree and parameters do not."""
    text = (
        "gradients agree, so look at the optimizer, or at a learning rate that makes rounding grow "
        "from step to step"
    )
    return Finding(True, text if gradients.holds and not parameters.holds else "")


def _bound(observed: list[Numerics]) -> float:
    """The bound on parameters of the strictest dtype."""
    return min(NUMERICS_BOUND.get(numbers.dtype, 0.0) for numbers in observed)


def _ordered(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference


def _exact(observed: list[Numerics]) -> Finding:
    """Training begins at the model's own parameters, and the optimizer steps as torch's does: to
    the bit, whatever the dtype."""
    begins = _worst([0.0, *(numbers.initial_difference or 0.0 for numbers in observed)])
    apart = _worst([0.0, *(numbers.step_difference or 0.0 for numbers in observed)])
    if begins != 0:
        text = f"the optimizer's parameters begin {begins:.2g} away from the model's own"
        return Finding(False, text)
    text = (
        f"one step of the optimizer ends {apart:.2g} away from where torch's takes the same state "
        f"and gradients"
    )
    return Finding(apart == 0, text if apart != 0 else "")


def _every_step(runs: list[RunRecord], observed: list[Numerics]) -> Finding:
    """Every step of training was compared, on every rank."""
    least = max(
        [2, *(int(steps) for run in runs if (steps := run.provenance.get("steps", "")).isdecimal())]
    )
    short = min(numbers.steps for numbers in observed)
    if short < least:
        return Finding(False, f"losses of {short} steps, of at least {least}")
    alike = len({numbers.steps for numbers in observed}) == 1
    return Finding(alike, "" if alike else "ranks tell losses of different numbers of steps")


def _worst(differences: Iterable[float]) -> float:
    return max(differences, key=_ordered)


def _silence(run: RunRecord) -> str:
    """A phrase about a rank without numerics in a Run that should have them, or ""."""
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


def _loss_difference(observed: list[Numerics], world_size: int) -> float:
    """The largest relative difference of the mean loss over all ranks to the reference's, in any
    step; 0 where ranks are missing."""
    if any(
        not len(numbers.losses) == len(numbers.reference_losses) == numbers.steps
        for numbers in observed
    ):
        return math.inf
    if len(observed) != world_size:
        return 0.0  # some ranks were observed, and a mean over all needs all
    losses = zip(*(numbers.losses for numbers in observed), strict=True)
    means = [sum(step) / world_size for step in losses]
    references = [numbers.reference_losses for numbers in observed]
    pairs = [pair for losses in references for pair in zip(means, losses, strict=True)]
    return _worst([0.0, *(abs(mean - wanted) / abs(wanted or 1.0) for mean, wanted in pairs)])
