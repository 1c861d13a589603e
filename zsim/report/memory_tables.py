"""Memory over the step, and who holds what on each rank at each stage, for the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from zsim.analysis.alternatives import moved
from zsim.errors import ZsimError
from zsim.io.units import counted
from zsim.ir.ops import MEMORY_KINDS
from zsim.ir.program import Program
from zsim.ir.run import RankRun
from zsim.memory import waterfall
from zsim.report.memory_walk import MemoryWalk, Owner, thinned, walk
from zsim.report.sides import ReportSide, SimulatedStep
from zsim.report.timeline_tables import Table, Words
from zsim.scenario.checks import refusals
from zsim.scenario.derived import derived
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario
from zsim.strategies import ALONE, STAGES, STRATEGIES

MOST_POINTS = 6000
MOST_MOMENTS = 1500
MOST_PROGRAMS, MOST_RANKS = 4, 8
"""Rank programs and ranks that the table of holders has; the first of more."""
STATES = ("parameters", "gradients", "optimizer_states")
HELD = (*STATES, "unsharded_parameters", "unsharded_gradients")
TOTAL = "allocated"
"""Kind of a measured total, whose parts no meter saw."""


def memory_table(side: ReportSide) -> Table | None:
    """Live bytes of the rank that peaks highest; None where the record has no timeline."""
    rank = max(
        side.record.ranks, key=lambda each: (each.phases["steady"].memory.peak_bytes, -each.rank)
    )
    if side.step is None:
        return _measured(rank)
    program = side.step.program.of_rank(rank.rank)
    times = side.step.timeline
    issued = times.ranks[times.representatives[rank.rank]].issued
    table = _as_table(thinned(walk(program), MOST_POINTS), issued)
    return table | {
        "rank": rank.rank, "capacity_bytes": side.step.memory.capacity.nbytes,
        "kinds": [kind for kind in MEMORY_KINDS if kind in {k for k, _ in table["owners"]}],
    }


def _measured(rank: RankRun) -> Table | None:
    """The total after each op, or where the meter saw no ops at the start and peak of each part."""
    memory = rank.phases["steady"].memory
    moments = [
        (f"after {name}", nbytes, rank.spans[number].issued_ns if same else 0)
        for same in [len(rank.spans) == len(memory.timeline)]
        for number, (name, nbytes) in enumerate(memory.timeline)
    ]
    if not moments:
        moments = [
            (f"{at} of {part.name}, micro-batch {part.micro_batch}", nbytes, 0)
            for part in memory.parts
            for at, nbytes in (("start", part.start_bytes), ("peak", part.peak_bytes))
        ]
        moments += [("end of the step", memory.end_bytes, 0)] if moments else []
    if not moments:
        return None
    labels, points, before = Words(), [], memory.start_bytes
    for name, nbytes, issued in moments:
        points.append([labels.number(name), issued, 0, nbytes - before])
        before = nbytes
    return {
        "rank": rank.rank, "capacity_bytes": 0, "kinds": [TOTAL], "owners": [[TOTAL, ""]],
        "start": [memory.start_bytes], "labels": labels.table(), "points": points,
        "by_part": not memory.timeline,
    }


def _as_table(walked: MemoryWalk, issued: Sequence[int] = ()) -> Table:
    """Owners and labels by number; a point is its label, its ns, and pairs of owner and change."""
    owners, labels, points = Words(), Words(), []
    for owner in walked.start:
        owners.number(owner)
    for point in walked.points:
        pairs = [
            each for owner, nbytes in point.changes.items()
            for each in (owners.number(owner), nbytes)
        ]
        when = issued[point.op.index] if issued else 0
        points.append([labels.number(point.label), when, *pairs])
    start = [walked.start.get(owner, 0) for owner in owners.table()]
    return {
        "owners": [list(owner) for owner in owners.table()], "start": start,
        "labels": labels.table(), "points": points,
    }


def holders(step: SimulatedStep) -> list[Table]:
    """The scenario's own strategy and the stages: units × kinds × ranks at each change."""
    tables = [_stage(f"{step.scenario.strategy} (this scenario)", step.program, step.scenario)]
    for name, other in _stages(step.scenario):
        try:
            program = plan(other, device=other.cluster.kind)
        except ZsimError:  # a strategy that finds out only while it plans
            continue
        tables.append(_stage(name, program, other))
    return tables


def _stages(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    for name in STAGES if scenario.world_size > 1 else (ALONE,):
        if name == scenario.strategy and scenario.mesh.dp_replicate == 1:
            continue
        try:
            other = moved(derived(scenario, faults=()), name)
        except ZsimError:
            continue
        if not refusals.problems(other):
            yield name, other


def _stage(name: str, program: Program, scenario: Scenario) -> Table:
    axis = STRATEGIES[scenario.strategy].shard_axis
    numbers: dict[int, int] = {}
    shown: list[list[int]] = []
    for rank, kind in enumerate(program.assignment):
        known = kind in numbers or len(numbers) < MOST_PROGRAMS
        if known and len(shown) < MOST_RANKS:
            position, size = program.mesh.position(axis, rank), program.mesh.size(axis)
            shown.append([rank, numbers.setdefault(kind, len(numbers)), position, size])
    left = len(program.assignment) - len(shown)
    return {
        "name": name, "formula": waterfall.formula_text(scenario), "ranks": shown,
        "left_out": f"and {counted(left, 'rank')} more" if left else "",
        "programs": [_holding(program, kind) for kind in numbers],
    }


def _holding(program: Program, kind: int) -> dict[str, Any]:
    walked = walk(program.ranks[kind], counts=HELD.__contains__, inside=False)
    table = _as_table(thinned(walked, MOST_MOMENTS))
    table["points"] = [[point[0], *point[2:]] for point in table["points"]]
    return table | {"highest": _highest(walked)}


def _highest(walked: MemoryWalk) -> list[list[Any]]:
    """The most that each owner holds at once: unit, kind and bytes."""
    most: dict[Owner, int] = {}
    for state in walked.states():
        for owner, nbytes in state.items():
            most[owner] = max(nbytes, most.get(owner, 0))
    return [[unit, kind, nbytes] for (kind, unit), nbytes in most.items()]
