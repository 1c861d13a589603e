"""Fit: candidates and the recommendation, as data, as the table of `zsim fit` and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from zsim.io.quantities import Duration
from zsim.io.units import counted, format_bytes, format_time
from zsim.ir.run import SCHEMA_VERSION
from zsim.memory.fits import MemoryVerdict
from zsim.runs.figures import metrics
from zsim.scenario.scenario import Scenario

SURER = (
    "bands hold nine of ten measurements; all times rest on the same constants, so differences "
    "are more certain than the times"
)
"""A constant that is off moves the times of all candidates in one direction, and so their
difference by less than the times. How much less depends on what the two have in common: bands of
differences are not known."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Candidate:
    """One way to train the scenario: what a rank needs, how long a step takes and between which
    times that is expected.

    `dropped` are options that it does without, `instead` those by which it keeps in host memory
    what the scenario keeps there by others.
    """

    name: str
    scenario: Scenario
    memory: MemoryVerdict = field(hash=False)
    """FITS, TIGHT or OOM as its `verdict`, with the bytes that decide: `needed` of `capacity`."""
    step_time_ns: int
    step_time_band_ns: tuple[int, int]
    dropped: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()

    @property
    def step_time(self) -> Duration:
        """The step's time; its `band` says between which times the true one is expected."""
        return Duration(self.step_time_ns, self.step_time_band_ns)

    def to_dict(self) -> dict[str, Any]:
        """The candidate as `zsim fit --json` prints it."""
        return candidate_object(self)

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def __repr__(self) -> str:
        needed = format_bytes(self.memory.needed.nbytes)
        return f"<{self.name}: {self.memory.verdict}, needs {needed}, step {self.step_time}>"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Fit:
    """All candidates, from the least sharded to the most, the one to take (None when nothing fits),
    and why.

    `refused` are those that cannot be, each with the reason.
    """

    scenario: Scenario
    candidates: tuple[Candidate, ...]
    recommended: Candidate | None
    reason: str
    refused: tuple[tuple[str, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The object that `zsim fit --json` prints; its keys are stable."""
        return as_object(self)

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def __str__(self) -> str:
        """The table of `zsim fit`: a row for each candidate, and the recommendation."""
        return "\n".join(lines(self))

    def _repr_html_(self) -> str:
        """The candidates as a table, for notebooks; an arrow marks the one to take."""
        from zsim.io.notebook.html_table import html_table  # start-up: notebooks alone have tables

        return html_table(
            repr(self)[1:-1], ("", "candidate", "", "needs", "step"),
            [("→" if each is self.recommended else "", each.name, each.memory.verdict,
              format_bytes(each.memory.needed.nbytes), each.step_time)
             for each in self.candidates],
            note=self.reason,
        )

    def __repr__(self) -> str:
        chosen = "nothing fits" if self.recommended is None else f"take {self.recommended.name}"
        return f"<Fit of {len(self.candidates)} candidates: {chosen}>"


def lines(fit: Fit) -> Iterator[str]:
    """The heading, a row for each candidate, and the recommendation."""
    scenario = fit.scenario
    model, batch = scenario.model, scenario.batch
    capacity = format_bytes(fit.candidates[0].memory.capacity.nbytes) if fit.candidates else "-"
    shared = " a rank, from least to most sharded" if scenario.world_size > 1 else ""
    yield f"{scenario.name}: what fits {capacity}{shared}"
    yield f"   model    {model.name}, {model.num_parameters:,} parameters"
    yield (
        f"   batch    micro_batch = {batch.micro_batch}, sequence_length = "
        f"{batch.sequence_length}, accumulation = {batch.accumulation}"
    )
    yield f"   cluster  {scenario.cluster.name}, {counted(scenario.cluster.num_ranks, 'rank')}"
    if fit.candidates:
        yield f"   {'':5} {'needs':>10} {'step':>10} {'band':>9} {'tokens/s':>8}"
    for candidate in fit.candidates:
        mark = "->" if candidate is fit.recommended else "  "
        answer, step_ns = candidate.memory, candidate.step_time_ns
        needed, step = format_bytes(answer.needed.nbytes), format_time(step_ns)
        low, high = (100 * ns / max(1, step_ns) - 100 for ns in candidate.step_time_band_ns)
        tokens = metrics.tokens(candidate.scenario) * 10**9 / max(1, step_ns)
        figures = (
            f"{mark} {answer.verdict:5} {needed:>10} {step:>10} {f'{low:.0f}/{high:+.0f} %':>9} "
            f"{tokens:>8,.0f}  "
        )
        yield f"{figures}{candidate.name}"
        host = str(answer.host) if answer.host_is_short else ""
        remarks = (host, answer.running, otherwise(candidate.instead, candidate.dropped))
        if notes := "; ".join(filter(None, remarks)):
            yield f"{'':{len(figures)}}{notes}"
    if fit.candidates:
        yield f"   tokens/s are of one rank; {SURER}"
    for name, reason in fit.refused:
        yield f"   {name} cannot be: {reason}"
    yield f"Recommended: {fit.recommended.name}, {fit.reason}" if fit.recommended else fit.reason


def without(dropped: Sequence[str]) -> str:
    """Options of the scenario that a candidate leaves out, as the end of a sentence, or ""."""
    return f"; without {', '.join(dropped)}" if dropped else ""


def otherwise(instead: Sequence[str], dropped: Sequence[str]) -> str:
    """Options that a candidate has in place of the scenario's, and those that it leaves out."""
    return f"; with {', '.join(instead)}{without(dropped)}"[2:] if instead else without(dropped)[2:]


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
        "instead": list(candidate.instead),
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
