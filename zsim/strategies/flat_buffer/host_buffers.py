"""Host memory of offloaded shards under zero1, zero2 and zero3.

Of each trained group a float32 copy is stepped, and a float32 gradient comes from the device. With
two-byte parameters a rounded copy, "staging", goes back, or stays as the shard itself where
parameters are offloaded. So an element takes 18 bytes with AdamW's states, and 16 where parameters
are float32. Copies start or end in pinned memory. The layout is ZeRO-Offload's (arXiv 2101.06840,
§3), of which DeepSpeed keeps a little more.
"""

from __future__ import annotations

from zsim.ir.buffers import Buffer
from zsim.ir.ops import HostAlloc, HostEvent, MemoryKind
from zsim.models.training_options import DTYPE_NBYTES, Offload
from zsim.strategies.building.kernels import MASTER_DTYPE
from zsim.strategies.flat_buffer.groups import FlatGroup


def rounded(offload: Offload) -> str:
    """The role of the buffer with stepped parameters, rounded to two bytes."""
    return "parameters" if offload.parameters else "staging"


def constructed(group: FlatGroup, *, offload: Offload, dtype: str) -> tuple[HostEvent, ...]:
    """The buffers of a group, with parameters of `dtype`, in host memory that live from
    construction on; () where nothing of it is offloaded."""
    fqn, numel, pinned = group.fqn, group.layout.shard_numel, offload.pin_memory
    wide, rounds = numel * DTYPE_NBYTES[MASTER_DTYPE], dtype != MASTER_DTYPE
    narrow = numel * DTYPE_NBYTES[dtype]
    if not group.trained:
        shard = HostAlloc(Buffer.of(fqn, "parameters"), "parameters", narrow, pinned)
        return (shard,) if offload.parameters and not group.whole else ()
    if not offload.optimizer:
        return ()
    kind: MemoryKind = "optimizer_states" if rounds else "parameters"
    return (
        HostAlloc(Buffer.of(fqn, "master"), kind, wide, pinned and not rounds),
        HostAlloc(Buffer.of(fqn, "gradient"), "gradients", wide, pinned),
        *(
            [HostAlloc(Buffer.of(fqn, rounded(offload)), "parameters", narrow, pinned)]
            if rounds else []
        ),
    )
