"""The least that fits: every stage and checkpointing on the scenario's cluster, what each needs and takes, and which to take.

Each candidate is planned and simulated; the recommendation is read off their figures and says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zsim.advice import assess, can_checkpoint, moved, refusals
from zsim.answer import Answer
from zsim.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.mesh import Mesh
from zsim.scenario import Scenario
from zsim.units import format_bytes, format_time

MUCH_FASTER = 1.02
"""Of two that fit, the one that shards or recomputes less is taken unless the other is faster by more than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to train the scenario: what a rank needs, and how long a step takes."""

    name: str
    scenario: Scenario
    answer: Answer
    step_time_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """All candidates, from the least sharded to the most, the one to take (None when nothing fits), and why."""

    candidates: tuple[Candidate, ...]
    recommended: Candidate | None
    reason: str


def fit(scenario: Scenario) -> Fit:
    """Every candidate assessed, and a recommendation."""
    found = []
    for name, other in ways(scenario):
        needs, time = assess(other)
        found.append(Candidate(name=name, scenario=other, answer=needs, step_time_ns=time))
    chosen, reason = recommend(tuple(found))
    return Fit(candidates=tuple(found), recommended=chosen, reason=reason)


def ways(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """The stages from least to most sharded, each without and then with activation checkpointing of every block."""
    for name, other in _stages(scenario):
        ways_of_it = [(name, replace(other, checkpointing=NO_CHECKPOINTING))]
        if can_checkpoint(scenario):
            ways_of_it.append((f"{name}, checkpointing", replace(other, checkpointing=Checkpointing(mode="full"))))
        yield from ((way, case) for way, case in ways_of_it if not refusals(case))


def _stages(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    model = scenario.model
    if any(not model.frozen.issuperset(model.parameters_of(block)) for block in model.idle):
        yield "ddp, find_unused_parameters = true", moved(scenario, "ddp", find_unused_parameters=True)
    else:
        yield "ddp", moved(scenario, "ddp")
    for stage in ("zero1", "zero2"):
        yield stage, moved(scenario, stage)
    cluster = scenario.cluster
    if cluster.num_nodes > 1 and cluster.num_ranks == cluster.num_nodes * cluster.devices_per_node:
        mesh = Mesh(dp_replicate=cluster.num_nodes, dp_shard=cluster.devices_per_node)
        yield "hsdp, a node a shard group", replace(moved(scenario, "hsdp"), mesh=mesh)
    yield "fsdp2, reshard_after_forward = false", moved(scenario, "fsdp2", reshard_after_forward=False)
    yield "fsdp2", moved(scenario, "fsdp2")
    yield "zero3", moved(scenario, "zero3")


def recommend(candidates: tuple[Candidate, ...]) -> tuple[Candidate | None, str]:
    """The fastest that fits, or one that shards less and is as good as fast; of those that are tight only when none fits."""
    for verdict in ("FITS", "TIGHT"):
        able = [one for one in candidates if one.answer.verdict == verdict]
        if not able:
            continue
        fastest = min(able, key=lambda one: one.step_time_ns)
        chosen = next(one for one in able if one.step_time_ns <= fastest.step_time_ns * MUCH_FASTER)
        refused = [one for one in candidates if one.answer.verdict == "OOM"]
        words = [f"{len(able)} of {len(candidates)} {'fit' if verdict == 'FITS' else 'may just fit'}"]
        words.append(f"the fastest takes {format_time(fastest.step_time_ns)}, this one {format_time(chosen.step_time_ns)}")
        if refused:
            least = min(refused, key=lambda one: one.answer.needed.nbytes)
            words.append(f"{least.name} would need {format_bytes(least.answer.needed.nbytes)}")
        return chosen, "; ".join(words)
    smallest = min(candidates, key=lambda one: one.answer.needed.nbytes)
    needed, there = smallest.answer.needed.nbytes, smallest.answer.capacity.nbytes
    short = f"even {smallest.name} needs {format_bytes(needed)} of {format_bytes(there)} (peak in {smallest.answer.peak_at})"
    return None, f"nothing fits: {short}; take more ranks, a smaller micro-batch or shorter sequences"
