"""Programs on a device that is nearly full, whose steady steps call the driver.

torch's allocator gives cached memory back and takes other memory, step by step. That takes time, so
whoever simulates a step asks here first. The allocator's replay is asked only where live bytes fill
much of the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zsim.cluster.cluster import ClusterSpec
from zsim.ir.ledger_replay import replay_each
from zsim.ir.ops import DriverCalls
from zsim.ir.program import Program, RankProgram, Room
from zsim.memory import fits
from zsim.memory.fits import MemoryVerdict, Standing
from zsim.memory.inputs_and_buffers import belongings
from zsim.memory.non_torch import capacity
from zsim.scenario.plan import Planned
from zsim.scenario.scenario import Scenario

MUCH = 0.4
"""Share of the device in live bytes below which all that is cached has room. Of this project's
scenarios none reserves 2.5 times its live bytes."""


def filled(case: Planned) -> Planned:
    """`case` with the driver's calls of its steady step, where its device is too full to keep all
    that is cached."""
    scenario = case.scenario
    return replace(case, program=on_device(case.program, scenario, scenario.cluster))


def on_device(program: Program, scenario: Scenario, cluster: ClusterSpec) -> Program:
    """`program`, which is of `scenario`, on `cluster`, as `filled` has it."""
    verdict = verdict_if_full(program, scenario, cluster)
    return program if verdict is None else _with_calls(program, verdict)


def verdict_if_full(
    program: Program, scenario: Scenario, cluster: ClusterSpec
) -> MemoryVerdict | None:
    """The verdict on `program`, which is of `scenario`, where live bytes alone fill much of the
    device of `cluster`; else None."""
    ranks = standings_if_full(program, cluster)
    return fits.assess_program(
        program, cluster, expandable_segments=scenario.expandable_segments,
        besides=belongings(scenario), ranks=ranks,
    ) if ranks else None


def standings_if_full(program: Program, cluster: ClusterSpec) -> Sequence[Standing]:
    """The `standings` where live bytes alone fill so much of the device that the cache may have no
    room; else none."""
    if cluster.kind != "cuda":
        return ()
    enough = MUCH * capacity(cluster.device).low
    replayed = replay_each(program.ranks, timeline=False)
    if all(record.peak_bytes < enough for each in replayed for record in each.values()):
        return ()
    return fits.standings(program, cluster, replayed=replayed)


def with_calls(case: Planned, verdict: MemoryVerdict) -> Planned:
    """`case` with the driver's calls of the `verdict` on it, and with no others."""
    return replace(case, program=_with_calls(case.program, verdict))


def without_calls(case: Planned) -> Planned:
    """`case` on a device that has room for all that is cached."""
    ranks = tuple(_called(rank, {}) for rank in case.program.ranks)
    return replace(case, program=replace(case.program, ranks=ranks, room="enough"))


def _with_calls(program: Program, verdict: MemoryVerdict) -> Program:
    calls = verdict.driver_calls
    ranks = (_called(rank, calls.get(kind, {})) for kind, rank in enumerate(program.ranks))
    return replace(program, ranks=tuple(ranks), room=_room(verdict))


def _room(verdict: MemoryVerdict) -> Room:
    if verdict.verdict == "FITS":
        return "enough"
    return "none" if verdict.releases_per_step is None else "tight"


def _called(rank: RankProgram, calls: Mapping[int, DriverCalls]) -> RankProgram:
    """`rank` itself where nothing in it changes: what is computed of it once holds for all."""
    if not calls and not any(op.driver_calls for op in rank.steady):
        return rank
    steady = tuple(
        op if op.driver_calls == calls.get(op.index)
        else replace(op, driver_calls=calls.get(op.index))
        for op in rank.steady
    )
    return replace(rank, steady=steady)
