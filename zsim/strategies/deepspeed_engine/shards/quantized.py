"""qwZ of ZeRO++: all-gathers of parameters in int8, with a float32 scale for each of its groups.

A rank casts its shards to fp16, quantizes them, and gathers both. Whoever waits makes fp16 of them,
and casts that. Gathers from larger shards are in int8 too. Sources: deepspeed/runtime/zero/
partition_parameters.py (CUDAQuantizer); Wang et al., "ZeRO++", arXiv 2306.10209, §3.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zsim.errors import ScenarioError, listed
from zsim.ir.buffers import Buffer, buffer_of, gather_of
from zsim.ir.ops import Alloc, Free, Kernel, MemoryEvent
from zsim.models.spec import Parameter
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building.kernels import MASTER_DTYPE, copy_kernel
from zsim.strategies.deepspeed_engine.options import ALIGNMENT, HALF
from zsim.strategies.deepspeed_engine.shards.parameters import ShardedParameters

BYTE = "int8"
HALF_NBYTES, SCALE_NBYTES = DTYPE_NBYTES[HALF], DTYPE_NBYTES[MASTER_DTYPE]
MOST_GROUPED = 8000
"""Elements that a group has at most."""


def require_eighths(parameters: Sequence[Parameter], *, numel: int) -> None:
    """ScenarioError where a rank's `numel` elements of a gather make no groups."""
    if not numel % ALIGNMENT:
        return
    raise ScenarioError((
        f"strategy.zero_quantized_weights: expected multiples of {ALIGNMENT} elements in gathers, "
        f"found {numel:,} on each rank of {listed([p.fqn for p in parameters], 'and')}, where "
        "DeepSpeed fails; pad them, or use fewer ranks",
    ))


def require_unpadded(parameter: Parameter, *, padded_numel: int) -> None:
    """ScenarioError where a gather of one parameter has padding.

    DeepSpeed cuts that off before its kernel divides the rest by the scales of all ranks, so that
    groups end elsewhere than they did (`_all_gather_sequential`; csrc/quantization/pt_binding.cpp).
    Gathers of several keep their padding until then.
    """
    if padded_numel > parameter.numel:
        raise ScenarioError((
            "strategy.zero_quantized_weights: expected no padding in gathers of one parameter, "
            f"found {padded_numel - parameter.numel:,} elements behind {parameter.fqn}, of which "
            "DeepSpeed makes wrong values; pad it",
        ))


def num_scales(numel: int) -> int:
    """Groups of `numel` elements, a multiple of 8: as few as divide them evenly."""
    eighths = numel // ALIGNMENT
    least = -(-numel // MOST_GROUPED)
    sizes = range(eighths // least, 0, -1)
    return eighths // next(size for size in sizes if not eighths % size)


def buffers(number: int) -> tuple[Buffer, Buffer, Buffer]:
    """Buffers of gather `number` until it is forgotten: int8, scales, and fp16 of several."""
    unit = gather_of(number)
    return buffer_of(unit, "flat"), buffer_of(unit, "scales"), buffer_of(unit, "wide")


def local(
    sharded: ShardedParameters, parameters: Sequence[Parameter], *, number: int, numel: int
) -> list[MemoryEvent]:
    """The quantization of a rank's `numel` elements of `parameters` before a gather; what it sends
    lives until that is over."""
    unit, made = gather_of(number), list[Alloc]()
    if len(parameters) > 1:
        made.append(Alloc(buffer_of(unit, "cat"), "temporaries", numel * sharded.element))
    if sharded.dtype != HALF:
        made.append(Alloc(buffer_of(unit, "half"), "temporaries", numel * HALF_NBYTES))
    scales = num_scales(numel) * SCALE_NBYTES
    return [
        *made, Alloc(buffer_of(unit, "sent"), "communication", numel),
        Alloc(buffer_of(unit, "sent_scales"), "communication", scales),
        *(Free(alloc.buffer) for alloc in made),
    ]


def sent(number: int) -> tuple[Buffer, Buffer]:
    """Buffers that a rank sends: int8 and scales. NCCL's work keeps them until it is awaited, and
    gloo's until the gather is dropped."""
    unit = gather_of(number)
    return buffer_of(unit, "sent"), buffer_of(unit, "sent_scales")


def kernels(numel: int, *, dtype: str) -> tuple[Kernel, ...]:
    """The cast of `numel` elements of `dtype` to fp16, and their quantization, which reads twice.
    """
    cast = () if dtype == HALF else (copy_kernel(numel, source=dtype, target=HALF),)
    return (*cast, Kernel("quantize", 4 * numel, (2 * HALF_NBYTES + 1) * numel, HALF))


def dequantized(
    sharded: ShardedParameters, made: Sequence[Alloc], *, number: int, padded_numel: int
) -> Iterator[MemoryEvent]:
    """Gathered parameters in fp16, and each of `made` from them, cast where its dtype differs. One
    that is fp16 itself is what the kernel makes."""
    casts = sharded.dtype != HALF
    if len(made) == 1 and not casts:
        yield made[0]
        return
    wide = Alloc(buffers(number)[2], "communication", padded_numel * HALF_NBYTES)
    yield wide
    for alloc in made:
        half = Alloc(buffer_of(alloc.buffer, "half"), "temporaries", 0)
        if len(made) > 1 and casts:
            nbytes = alloc.nbytes // sharded.element * HALF_NBYTES
            half = Alloc(half.buffer, half.kind, nbytes)
            yield half
        yield alloc
        if half.nbytes:
            yield Free(half.buffer)
    if len(made) == 1:
        yield Free(wide.buffer)
