"""A Program against what torch does on the fake process group."""

from __future__ import annotations

from zreal import torch_private
from zreal.observer.observer import observe
from zsim.ir.ledger import replay
from zsim.ir.ops import COLLECTIVES
from zsim.ir.program import PHASES
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario


def differences(case: Scenario, *, rank: int) -> list[str]:
    """Every difference between the Program of `rank` and what torch does there."""
    with torch_private.fake_group(rank=rank, world_size=case.world_size):
        measured = observe(case, rank=rank).run
    program = plan(case, device="cpu").of_rank(rank)
    memory = replay(program)
    found = []
    for phase in PHASES:
        issued = [
            (op.kind, op.nbytes, op.group.split(":")[0])
            for op in program.phase(phase)
            if op.kind in COLLECTIVES
        ]
        seen = measured.phases[phase]
        recorded = [(one.op, one.nbytes, one.group) for one in seen.collectives]
        if issued != recorded:
            found.append(f"{phase}: issued {issued}, recorded {recorded}")
        if memory[phase].end_bytes != seen.memory.end_bytes:
            found.append(f"{phase}: ends at {memory[phase].end_bytes}, measured "
                         f"{seen.memory.end_bytes}")
        if memory[phase].peak_bytes != seen.memory.peak_bytes:
            found.append(f"{phase}: peak {memory[phase].peak_bytes}, measured "
                         f"{seen.memory.peak_bytes}")
        if dict(memory[phase].held) != dict(seen.memory.held):
            found.append(f"{phase}: held {memory[phase].held}, measured {seen.memory.held}")
    return found
