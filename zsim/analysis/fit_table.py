"""The table of a Fit: its lines as `zsim fit` prints them, and its JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from zsim.io.units import counted, format_bytes, format_time
from zsim.ir.run import SCHEMA_VERSION
from zsim.runs import metrics

if TYPE_CHECKING:
    from zsim.analysis.fit import Candidate, Fit

SURER = (
    "bands hold nine of ten measurements; all times rest on the same constants, so differences "
    "are more certain than the times"
)
"""A constant that is off moves the times of all candidates in one direction, and so their
difference by less than the times. How much less depends on what the two have in common: bands of
differences are not known."""


def lines(fit: Fit) -> Iterator[str]:
    """The heading, a row for each candidate, and the recommendation."""
    scenario = fit.scenario
    model, batch = scenario.model, scenario.batch
    capacity = format_bytes(fit.candidates[0].memory.capacity.nbytes) if fit.candidates else "-"
    yield f"{scenario.name}: what fits {capacity} a rank, from least to most sharded"
    yield f"   model    {model.name}, {model.num_parameters:,} parameters"
    yield (
        f"   batch    micro_batch = {batch.micro_batch}, sequence_length = "
        f"{batch.sequence_length}, accumulation = {batch.accumulation}"
    )
    yield f"   cluster  {scenario.cluster.name}, {counted(scenario.cluster.num_ranks, 'rank')}"
    width = max((len(candidate.name) for candidate in fit.candidates), default=0)
    if fit.candidates:
        yield f"   {'':{width}} {'':5} {'needs':>10} {'step':>10} {'band':>9} {'token/s':>7}"
    for candidate in fit.candidates:
        mark = "->" if candidate is fit.recommended else "  "
        answer, step_ns = candidate.memory, candidate.step_time_ns
        needed, step = format_bytes(answer.needed.nbytes), format_time(step_ns)
        low, high = (100 * ns / max(1, step_ns) - 100 for ns in candidate.step_time_band_ns)
        tokens = metrics.tokens(candidate.scenario) * 10**9 / max(1, step_ns)
        yield (
            f"{mark} {candidate.name:{width}} {answer.verdict:5} {needed:>10} {step:>10} "
            f"{f'{low:.0f}/{high:+.0f} %':>9} {tokens:>7,.0f}"
        )
        if notes := "; ".join(filter(None, (answer.running, without(candidate.dropped)[2:]))):
            yield f"      {notes}"
    if fit.candidates:
        yield f"   token/s are of one rank; {SURER}"
    for name, reason in fit.refused:
        yield f"   {name} cannot be: {reason}"
    yield f"{fit.recommended.name if fit.recommended else 'nothing'}: {fit.reason}"


def without(dropped: Sequence[str]) -> str:
    """Options of the scenario that a candidate leaves out, as the end of a sentence, or ""."""
    return f"; without {', '.join(dropped)}" if dropped else ""


def as_object(fit: Fit) -> dict[str, Any]:
    """The object that `zsim fit --json` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "scenario": fit.scenario.name,
        "candidates": [candidate_object(candidate) for candidate in fit.candidates],
        "refused": [{"name": name, "reason": reason} for name, reason in fit.refused],
        "recommended": fit.recommended.name if fit.recommended else None,
        "reason": fit.reason,
    }


def candidate_object(candidate: Candidate) -> dict[str, Any]:
    """One candidate, as in that object."""
    return {
        "name": candidate.name, "strategy": candidate.scenario.strategy,
        "options": asdict(candidate.scenario.options), "dropped": list(candidate.dropped),
        "activation_checkpointing": candidate.scenario.checkpointing.mode,
        "mesh": {
            "dp_replicate": candidate.scenario.mesh.dp_replicate,
            "dp_shard": candidate.scenario.mesh.dp_shard,
        },
        "verdict": candidate.memory.verdict, "needed_bytes": asdict(candidate.memory.needed),
        "releases_per_step": candidate.memory.releases_per_step,
        "peak_memory_bytes": candidate.memory.allocated_bytes, "peak_at": candidate.memory.peak_at,
        "step_time_ns": candidate.step_time_ns,
        "step_time_band_ns": list(candidate.step_time_band_ns),
        "expandable_segments": candidate.scenario.expandable_segments,
        "micro_batch": candidate.scenario.batch.micro_batch,
        "accumulation": candidate.scenario.batch.accumulation,
    }
