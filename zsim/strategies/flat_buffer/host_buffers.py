"""Host memory of offloaded shards under zero1, zero2 and zero3.

Of each trained group a float32 copy is stepped, and a float32 gradient comes from the device. With
two-byte parameters a rounded copy, "staging", goes back, or stays as the shard itself where
parameters are offloaded. So an element takes 18 bytes with AdamW's states, and 16 where parameters
are float32. Copies start or end in pinned memory. The layout is ZeRO-Offload's (arXiv 2101.06840,
§3), of which DeepSpeed keeps a little more.

Where states are on drives, host memory has buffers that they pass through, and what goes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zsim.ir.buffers import buffer_of
from zsim.ir.mesh import Mesh
from zsim.ir.ops import HostAlloc, HostEvent, MemoryKind
from zsim.models.spec import ModelSpec
from zsim.models.training_options import DTYPE_NBYTES, Offload, Optimizer, Precision
from zsim.strategies.building.kernels import MASTER_DTYPE
from zsim.strategies.building.optimizers import state_names
from zsim.strategies.flat_buffer.groups import FlatGroup, flat_groups

SWAP = "swap"
"""Owner of the buffers that states on drives pass through."""
PARAMETER_BUFFERS = 2
"""Pinned buffers of shards of parameters that come from drives."""
BUFFERS_PER_GROUP = 4
"""Buffers of a group in flight: gradient, float32 copy and two states."""


def sent_back(offload: Offload, *, dtype: str) -> str:
    """The role of the buffer in host memory with stepped parameters in the dtype of compute; "" for
    none."""
    if offload.parameters:
        return "parameters" if offload.parameters == "cpu" and _rounds(offload, dtype) else ""
    return "staging" if _rounds(offload, dtype) else ""


def _rounds(offload: Offload, dtype: str) -> bool:
    """True where what goes to the device is not the float32 copy itself."""
    return dtype != MASTER_DTYPE or offload.optimizer == "nvme"


def constructed(group: FlatGroup, *, offload: Offload, dtype: str) -> tuple[HostEvent, ...]:
    """The buffers of a group, with parameters of `dtype`, in host memory that live from
    construction on; () where nothing of it is offloaded."""
    fqn, numel, pinned = group.fqn, group.layout.shard_numel, offload.pin_memory
    wide, narrow = numel * DTYPE_NBYTES[MASTER_DTYPE], numel * DTYPE_NBYTES[dtype]
    if not group.trained:
        shard = HostAlloc(buffer_of(fqn, "parameters"), "parameters", narrow, pinned)
        return (shard,) if offload.parameters == "cpu" and not group.whole else ()
    if not offload.optimizer:
        return ()
    made: list[HostEvent] = []
    if offload.optimizer == "cpu":
        rounds = dtype != MASTER_DTYPE
        kind: MemoryKind = "optimizer_states" if rounds else "parameters"
        made.append(HostAlloc(buffer_of(fqn, "master"), kind, wide, pinned and not rounds))
        made.append(HostAlloc(buffer_of(fqn, "gradient"), "gradients", wide, pinned))
    if role := sent_back(offload, dtype=dtype):
        made.append(HostAlloc(buffer_of(fqn, role), "parameters", narrow, pinned))
    return tuple(made)


def swapped(
    groups: Sequence[FlatGroup], *, offload: Offload, dtype: str
) -> tuple[HostAlloc, ...]:
    """The pinned buffers of a rank that states on drives pass through; () without any there."""
    if offload.optimizer != "nvme":
        return ()
    largest = max((group.layout.shard_numel for group in groups if group.trained), default=0)
    nbytes = offload.buffer_count * largest * DTYPE_NBYTES[MASTER_DTYPE]
    made = [HostAlloc(buffer_of(SWAP, "buffers"), "temporaries", nbytes, pinned=True)]
    if offload.parameters == "nvme":
        largest = max((group.layout.shard_numel for group in groups), default=0)
        nbytes = PARAMETER_BUFFERS * largest * DTYPE_NBYTES[dtype]
        made.append(HostAlloc(buffer_of(SWAP, "parameters"), "temporaries", nbytes, pinned=True))
    return tuple(made)


def pinned(
    offload: Offload, options: Any, model: ModelSpec, mesh: Mesh, precision: Precision
) -> int:
    """Bytes of a rank's pinned host memory."""
    groups, dtype = flat_groups(
        model, grouping=options.grouping, num_shards=mesh.dp_shard, dtype=precision.parameters
    ), precision.parameters
    made = [each for group in groups for each in constructed(group, offload=offload, dtype=dtype)]
    made += swapped(groups, offload=offload, dtype=dtype)
    return sum(each.nbytes for each in made if isinstance(each, HostAlloc) and each.pinned)


def drive_nbytes(
    offload: Offload, options: Any, model: ModelSpec, mesh: Mesh, precision: Precision,
    optimizer: Optimizer,
) -> int:
    """Bytes of a rank on drives: gradients, float32 copies and states, and parameters."""
    groups = flat_groups(
        model, grouping=options.grouping, num_shards=mesh.dp_shard, dtype=precision.parameters
    )
    trained = sum(group.layout.shard_numel for group in groups if group.trained)
    every = sum(group.layout.shard_numel for group in groups)
    wide = (2 + len(state_names(optimizer))) * trained * DTYPE_NBYTES[MASTER_DTYPE]
    return wide * (offload.optimizer == "nvme") + every * DTYPE_NBYTES[precision.parameters] * (
        offload.parameters == "nvme"
    )
