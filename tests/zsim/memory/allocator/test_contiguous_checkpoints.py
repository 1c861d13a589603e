"""ZeRO-R's contiguous checkpoints in the allocator's replay: one buffer for the inputs of all
blocks, against expandable segments. zsim/strategies/README.md has the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.support.folders import ROOT
from zsim.ir.buffers import Buffer
from zsim.ir.ops import Alloc, Free, MemoryEvent, Op
from zsim.ir.program import RankProgram
from zsim.memory.allocator.reserved import replay
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, load

CHECKPOINTED = {"mode": "full"}
BUFFER = Buffer("checkpoints")
TENTHS = 2**30 / 10


def case(name: str) -> Scenario:
    return load(ROOT / f"scenarios/{name}.toml").with_(activation_checkpointing=CHECKPOINTED)


def inputs(scenario: Scenario, ops: Sequence[Op]) -> dict[str, int]:
    """Bytes of the inputs of all blocks: the first of their size that forward leaves."""
    live: dict[str, int] = {}
    begin = next(op.index for op in ops if op.kind in ("backward", "recompute"))
    for event in (event for op in ops[:begin] for event in op.memory):
        if isinstance(event, Free):
            live.pop(event.buffer, None)
        elif event.kind == "activations":
            live[event.buffer] = event.nbytes
    batch, model = scenario.batch, scenario.model
    width = model.parameters[0].shape[-1]
    nbytes = batch.micro_batch * batch.sequence_length * width * 2
    of_size = [buffer for buffer, size in live.items() if size == nbytes]
    return dict.fromkeys(of_size[: len(model.blocks)], nbytes)


def contiguous(scenario: Scenario, ops: Sequence[Op]) -> tuple[Op, ...]:
    """`ops` with one buffer for these inputs, from the first of them to the last."""
    parts, made = inputs(scenario, ops), list[Op]()
    left = set(parts)
    for op in ops:
        memory = list[MemoryEvent]()
        for event in op.memory:
            if event.buffer not in parts:
                memory.append(event)
            elif isinstance(event, Alloc) and event.buffer == next(iter(parts)):
                memory.append(Alloc(BUFFER, "activations", sum(parts.values())))
            elif isinstance(event, Free):
                left.remove(event.buffer)
                memory += [] if left else [Free(BUFFER)]
        made.append(replace(op, memory=tuple(memory)))
    return tuple(made)


def reserved(program: RankProgram, *, expandable_segments: bool = False) -> int:
    """Tenths of a GiB that the allocator reserves in a steady step."""
    records = replay(program, expandable_segments=expandable_segments, empty_cache="first")
    return round(records["steady"].peak_reserved_bytes / TENTHS)


@pytest.mark.parametrize(("name", "as_it_is", "in_one", "expandable"), [
    ("published/zero2-llama-2-7b-8x8-a100", 288, 275, 267),
    ("published/llama-2-7b-8-a100", 192, 181, 172),
    ("overlap/zero3-llama-3-8b-8-lookahead-1", 249, 259, 244),
    ("published/llama-3-8b-8-h100", 298, 352, 280),
])
def test_one_buffer_for_checkpoints_gains_less_than_expandable_segments(
    name: str, as_it_is: int, in_one: int, expandable: int
) -> None:
    scenario = case(name)
    program = plan(scenario, device="cuda").of_rank(0)
    changed = replace(
        program, first=contiguous(scenario, program.first),
        steady=contiguous(scenario, program.steady),
    )
    assert (reserved(program), reserved(changed)) == (as_it_is, in_one)
    assert reserved(program, expandable_segments=True) == expandable
