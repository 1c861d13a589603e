"""qgZ of ZeRO++: gradients are reduced in int4, with a float32 scale for each of their groups.

One all-to-all is inside each node, and one between nodes. Gradients of one dimension, and those
that ranks do not divide, are reduce-scattered one by one. On one node all are, together as without
qgZ. DeepSpeed has its kernels for GPUs alone: its collectives and its memory are observed with
substitutes for them. Sources: deepspeed/runtime/comm/
coalesced_collectives.py, csrc/quantization; Wang et al., "ZeRO++", arXiv 2306.10209, §3.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zsim.ir.buffers import buffer_of
from zsim.ir.mesh import every, part_of
from zsim.ir.ops import Alloc, Free, Kernel, MemoryEvent
from zsim.models.spec import Parameter
from zsim.strategies.building.kernels import MASTER_DTYPE
from zsim.strategies.deepspeed_engine.layout import AXIS
from zsim.strategies.deepspeed_engine.options import HALF, quantized_groups
from zsim.strategies.deepspeed_engine.shards.packing import packed
from zsim.strategies.deepspeed_engine.shards.parameters import ShardedParameters
from zsim.strategies.deepspeed_engine.shards.quantized import BYTE, HALF_NBYTES, SCALE_NBYTES

IN_A_BYTE = 2
"""Elements of int4 in a byte."""


def groups(sharded: ShardedParameters, parameter: Parameter) -> int:
    """Groups of a gradient's elements; 0 for one that is reduce-scattered as it is."""
    return quantized_groups(parameter, sharded.num_ranks)


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange among `size` ranks of the group, of gradients of which each rank has one of so
    many `parts`."""

    group: str
    size: int
    parts: int


def exchanges(sharded: ShardedParameters) -> tuple[Exchange, Exchange]:
    """The exchange inside each node, and that of ranks at the same place of each node."""
    per_node = sharded.per_node
    between = every(AXIS, per_node) if per_node > 1 else AXIS
    return (
        Exchange(part_of(AXIS, per_node), per_node, 1),
        Exchange(between, sharded.num_ranks // per_node, per_node),
    )


def payloads(
    sharded: ShardedParameters, parameter: Parameter, exchange: Exchange
) -> tuple[tuple[int, str], ...]:
    """Bytes and dtype of values and scales that a rank hands to both all-to-alls of an exchange;
    none where it is alone."""
    if exchange.size == 1:
        return ()
    return (
        (parameter.numel // IN_A_BYTE // exchange.parts, BYTE),
        (groups(sharded, parameter) // exchange.parts * SCALE_NBYTES, MASTER_DTYPE),
    )


def memory(
    sharded: ShardedParameters, parameters: Sequence[Parameter]
) -> tuple[list[MemoryEvent], list[Alloc]]:
    """Memory of the reduction of quantized gradients, in order, and the shards in fp16 that are
    left. Python keeps what one has made until the next has made its own."""
    events, held, shards = list[MemoryEvent](), dict[str, Alloc](), list[Alloc]()
    for parameter in parameters:
        if not groups(sharded, parameter):
            packing, flat = packed(sharded, [parameter], name=parameter.fqn)
            events += packing
            shards += flat
            continue
        for made in _made(sharded, parameter):
            events += made.values()
            events += (Free(held[name].buffer) for name in made if name in held)
            held |= made
        summed = _summed(sharded, parameter)
        events += summed
        shards += [event for event in summed[-2:] if isinstance(event, Alloc)]
    return [*events, *(Free(alloc.buffer) for alloc in held.values())], shards


def _made(sharded: ShardedParameters, parameter: Parameter) -> Iterator[dict[str, Alloc]]:
    """Buffers by the name of what holds them, those together that one statement makes."""
    numel, count = parameter.numel, groups(sharded, parameter)

    def buffer(name: str, nbytes: int) -> dict[str, Alloc]:
        return {name: Alloc(buffer_of(parameter.fqn, name), "communication", nbytes)}

    for where, exchange in zip(("inside", "between"), exchanges(sharded), strict=True):
        scales = count // exchange.parts * SCALE_NBYTES
        values = numel // IN_A_BYTE // exchange.parts
        yield buffer(f"{where}_scales", scales) | buffer(f"{where}_sent", values)
        yield buffer(f"{where}_received", values)
        yield buffer(f"{where}_received_scales", scales)
    yield buffer("wide", numel // sharded.per_node * HALF_NBYTES)


def _summed(sharded: ShardedParameters, parameter: Parameter) -> list[MemoryEvent]:
    """The mean over nodes: each is added into a new sum, and the last one divided."""
    events, last = list[MemoryEvent](), None
    for number in range(sharded.num_ranks // sharded.per_node + 1):
        nbytes = parameter.numel // sharded.num_ranks * HALF_NBYTES
        sum_ = Alloc(buffer_of(parameter.fqn, "sum", number), "communication", nbytes)
        events += [sum_] if last is None else [sum_, Free(last.buffer)]
        last = sum_
    return events


def kernels(sharded: ShardedParameters, parameter: Parameter) -> tuple[tuple[Kernel, ...], ...]:
    """Kernels before, between and behind both exchanges: quantize, add what a node's ranks sent,
    and take the mean of what nodes sent."""
    numel, per_node = parameter.numel, sharded.per_node
    part, nodes = numel // per_node, sharded.num_ranks // per_node
    shard = part // nodes
    return (
        (Kernel("quantize", 4 * numel, numel * HALF_NBYTES + numel // IN_A_BYTE, HALF),),
        (Kernel("dequantize_add", 4 * numel, (numel + part) // IN_A_BYTE, HALF),),
        (
            Kernel("dequantize", part, part // IN_A_BYTE + part * HALF_NBYTES, HALF),
            *(Kernel("add", shard, 3 * shard * HALF_NBYTES, HALF),) * nodes,
            Kernel("divide", shard, 2 * shard * HALF_NBYTES, HALF),
        ),
    )
