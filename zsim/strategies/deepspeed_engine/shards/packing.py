"""Packing of gradients for a reduce-scatter: all shards rank by rank, behind one another.

Source: deepspeed/runtime/comm/coalesced_collectives.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.ir.buffers import buffer_of
from zsim.ir.ops import Alloc, Free, MemoryEvent
from zsim.models.spec import Parameter
from zsim.strategies.deepspeed_engine.shards.parameters import ShardedParameters


def packed(
    sharded: ShardedParameters, parameters: Sequence[Parameter], *, name: str
) -> tuple[list[MemoryEvent], list[Alloc]]:
    """Memory of packing: zeros behind shards that need them, and the copy `name` of all, which is
    left. A gradient alone that divides evenly is no copy."""
    ranks, element = sharded.num_ranks, sharded.reduced_element
    if len(parameters) == 1 and not parameters[0].numel % ranks:
        return [], []
    uneven = [p for p in parameters if p.numel % ranks]
    whole = min((p.numel // sharded.shard_numel(p) for p in uneven), default=ranks)
    pads = [
        Alloc(buffer_of(p.fqn, "padding", rank), "communication", missing * element)
        for rank in range(whole, ranks) for p in uneven
        if (missing := sharded.shard_numel(p) - sharded.local_numel(p, rank=rank))
    ]
    numel = sum(map(sharded.shard_numel, parameters)) * ranks
    flat = Alloc(buffer_of(name, "flat"), "communication", numel * element)
    return [*pads, flat, *(Free(alloc.buffer) for alloc in pads)], [flat]
