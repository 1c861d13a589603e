"""Differences between a Program and torch on the fake process group."""

from __future__ import annotations

from tests.support.installed_torch import TORCH
from zreal import torch_private
from zreal.observer.observer import observe
from zsim.ir.ledger_replay import replay
from zsim.ir.ops import COLLECTIVES
from zsim.ir.program import PHASES
from zsim.runs.backend import RunOptions
from zsim.runs.compare.compare import compare
from zsim.runs.registry import find
from zsim.runs.simulator import SimBackend
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario


def steps_until_steady(case: Scenario) -> int:
    """Steps of torch up to the first steady one.

    fully_shard's second is steady; DDP rebuilds its buckets in that, and FSDP1 has learnt its order
    by then.
    """
    return 2 if case.strategy in ("fsdp2", "hsdp") else 3


def differences(case: Scenario, *, rank: int) -> list[str]:
    """Every difference between the Program of `rank` and torch's observed step."""
    with torch_private.fake_group(rank=rank, world_size=case.world_size):
        measured = observe(case, rank=rank, steps=steps_until_steady(case)).run
    program = plan(case, device="cpu", torch=TORCH).of_rank(rank)
    memory = replay(program)
    problems = []
    for phase in PHASES:
        issued = [
            (op.kind, op.nbytes, op.group.split(":")[0]) for op in program.phase(phase)
            if op.kind in COLLECTIVES
        ]
        seen = measured.phases[phase]
        recorded = [(record.op, record.nbytes, record.group) for record in seen.collectives]
        if issued != recorded:
            problems.append(f"{phase}: issued {issued}, recorded {recorded}")
        if memory[phase].end_bytes != seen.memory.end_bytes:
            problems.append(f"{phase}: ends at {memory[phase].end_bytes}, measured "
                         f"{seen.memory.end_bytes}")
        if memory[phase].peak_bytes != seen.memory.peak_bytes:
            problems.append(f"{phase}: peak {memory[phase].peak_bytes}, measured "
                         f"{seen.memory.peak_bytes}")
        if dict(memory[phase].held) != dict(seen.memory.held):
            problems.append(f"{phase}: held {memory[phase].held}, measured {seen.memory.held}")
    return problems


def inexact(
    case: Scenario, *, ranks: tuple[int, ...] = (), interpreter: str | None = None
) -> list[str]:
    """Details of the checks of a fake run that are not exact.

    Compared are `ranks`, else the first and the last, or the last alone where one Program is for
    both.
    """
    program, last = plan(case, device="cpu", torch=TORCH), case.world_size - 1
    outer = (last,) if program.of_rank(0) is program.of_rank(last) else (0, last)
    options = RunOptions(ranks=ranks or outer, interpreter=interpreter)
    measured = find("fake").run(case, options=options)
    predicted = SimBackend("cpu", torch=TORCH).run(case, options=options)
    return [
        check.detail for check in compare(predicted, measured)
        if check.status != "unsupported" and not check.detail.startswith("exact")
    ]
