"""Ops: the things that a rank's host issues, with their kernels, allocations and frees.

A Program has thousands of ops and tens of thousands of memory events, and making them is most of
what planning takes. A frozen dataclass takes three times as long to make as one with fields marked
Final. mypy keeps those from being assigned just as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from zsim.ir.buffers import Buffer

MemoryKind = Literal[
    "parameters",
    "gradients",
    "optimizer_states",
    "activations",
    "unsharded_parameters",
    "unsharded_gradients",
    "communication",
    "temporaries",
    "inputs",
]
MEMORY_KINDS: tuple[MemoryKind, ...] = MemoryKind.__args__  # type: ignore[attr-defined]

OpKind = Literal[
    "forward",
    "backward",
    "recompute",
    "optimizer",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "all_to_all",
    "send",
    "recv",
    "copy",
    "alloc",
    "free",
    "host_wait",
]
OP_KINDS: tuple[OpKind, ...] = OpKind.__args__  # type: ignore[attr-defined]
COLLECTIVES: frozenset[str] = frozenset({
    "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"
})

Stream = Literal[
    "compute", "all_gather_copy_in", "all_gather", "reduce_scatter", "all_reduce", "callback",
    "host", "to_host", "to_device", "drive_read", "drive_write", "files",
]
"""A `callback` of a reduction's future runs on a stream of torch's pool, which no other stream
waits for unless it is told to. Copies of offloaded states have a stream for each direction. So have
the drives of a node, and what a rank writes to files or reads there has one."""
STREAMS: tuple[Stream, ...] = Stream.__args__  # type: ignore[attr-defined]


@dataclass(slots=True, unsafe_hash=True)
class Alloc:
    """`buffer`, `nbytes` of memory of `kind`, begins to live. Names are unique among the live
    buffers of a rank."""

    buffer: Final[Buffer]
    kind: Final[MemoryKind]
    nbytes: Final[int]


@dataclass(slots=True, unsafe_hash=True)
class Free:
    """`buffer` stops living."""

    buffer: Final[Buffer]


MemoryEvent = Alloc | Free


@dataclass(slots=True, unsafe_hash=True)
class HostAlloc:
    """`buffer`, `nbytes` of host memory of `kind`, begins to live; `pinned` for the device's copies
    or pageable. CUDA does not know of one that is `locked` in memory for drives alone."""

    buffer: Final[Buffer]
    kind: Final[MemoryKind]
    nbytes: Final[int]
    pinned: Final[bool] = False
    locked: Final[bool] = False


HostEvent = HostAlloc | Free

Location = Literal["device", "link", "host", "drive", "files"]
Resource = Literal["drives", "copies", "host"]
"""Resource of an op off the device: drives, copies between device and host, or the host itself."""


@dataclass(slots=True, unsafe_hash=True)
class Kernel:
    """One kernel's work: floating-point operations in `dtype`, and bytes read and written.

    It has its `location` on the device, on the host, on the link between both, or on the way to a
    drive or to files. A
    matrix product has as its `shape` the (products, m, n, k) of that many m × k by k × n. Fused
    attention has (sequences × heads, queries, keys, width of a head). A product whose first factor
    is `transposed` in memory, as that of a weight's gradient is, has it contiguous along m and not
    along k. Of other kernels `singly` counts the elements that torch's code takes one by one, as
    operands are strided, broadcast or cast. A step over many tensors at once takes so many
    `launches`, 0 for a kernel that is launched by itself.
    """

    operator: Final[str]
    flops: Final[int]
    nbytes: Final[int]
    dtype: Final[str]
    location: Final[Location] = "device"
    shape: Final[tuple[int, ...]] = ()
    transposed: Final[bool] = False
    singly: Final[int] = 0
    launches: Final[int] = 0


CLONE = "clone"
"""Operator that copies a tensor into another order of its dimensions."""
NORM_STEP = "norm_step"
"""Operator of the calls that an RMSNorm in float32 is made of."""
LOSS_STEP = "loss_step"
"""Operator of the calls that a composite cross-entropy is made of."""
ACCUMULATE = "accumulate"
"""Operator that adds a gradient to the one that is there."""
SCALE_SCORES, MASK_SCORES, CAST_SCORES = "scale_scores", "mask_scores", "cast_scores"
"""Operators of explicit attention on its scores, before and after their softmax."""
CAST_LOGITS = "cast_logits"
"""Operator that casts logits, or their log_softmax, for the loss."""
SOFTMAX_PRODUCT = "softmax_product"
"""Operator that multiplies a gradient by the result of softmax, as its backward does first on a
GPU."""
MOVE_GRADIENT = "move_gradient"
"""Operator that copies gradients into the buffer that is reduced, and back, or casts them to
float32. It takes no time where gradients are kept in that buffer."""
PAGEABLE = "_pageable"
"""End of the operators `to_host` and `to_device` where the host's side of a copy is not pinned."""
ATTENTION_BACKWARD = "attention_backward"
HEAD = "head"
"""Operator of a model's last linear, the head, which no recipe multiplies in 8 bits."""
LINEARS: frozenset[str] = frozenset({"linear", "mm", "addmm"})
"""Operators that multiply by a weight; the last two are torch's own names, which traced models
have."""


def is_attention(operator: str) -> bool:
    """True for fused attention, by the name that model families use or by torch's own, which traced
    models have. The operator of a backward ends in "backward"."""
    return operator in ("attention", ATTENTION_BACKWARD) or operator.startswith(
        "_scaled_dot_product"
    )


@dataclass(slots=True, unsafe_hash=True)
class DriverCalls:
    """Calls of CUDA's driver that torch's allocator makes for one op on a full device.

    An allocation fails, so it frees cached segments, for which the host waits until the device
    rests, and allocates others.
    """

    failures: Final[int] = 0
    frees: Final[int] = 0
    freed_bytes: Final[int] = 0
    allocations: Final[int] = 0
    allocated_bytes: Final[int] = 0


@dataclass(slots=True, unsafe_hash=True)
class Op:
    """One thing that a rank's host issues.

    Its `index` is the position in issue order within its phase. Its `unit` is the fqn of the param
    group (or bucket) that it works on. Its `waits` are indices of earlier ops of the phase. A
    collective's `group` names the mesh axis, and `root` is the group-local source of a broadcast.
    Its `nbytes` is the payload handed to c10d, the full message: output of an all-gather, input of
    a reduce-scatter or all-to-all.

    Compute and copies carry `kernels`. Compute names in `reads` the param groups whose gathered
    parameters it needs (none where parameters are never sharded). The op's allocations and frees
    are in `memory`, in the order in which the host makes them. Those of host memory, for offloaded
    states, are in `host`. Counts of `micro_batch` begin at 0. Its `driver_calls` follow from the
    device (`zsim.memory.full_device`), so that a Program's text has none.
    """

    index: Final[int]
    kind: Final[OpKind]
    unit: Final[str]
    stream: Final[Stream]
    waits: Final[tuple[int, ...]] = ()
    group: Final[str] = ""
    nbytes: Final[int] = 0
    root: Final[int] = 0
    dtype: Final[str] = ""
    micro_batch: Final[int] = 0
    reads: Final[tuple[str, ...]] = ()
    kernels: Final[tuple[Kernel, ...]] = ()
    memory: Final[tuple[MemoryEvent, ...]] = ()
    host: Final[tuple[HostEvent, ...]] = ()
    driver_calls: Final[DriverCalls | None] = None

    @property
    def flops(self) -> int:
        """Floating-point operations of all kernels of this op."""
        return sum(kernel.flops for kernel in self.kernels)


def leaves_device(op: Op) -> bool:
    """True where the host or a link to it does some of the op's work."""
    return op.kind in ("copy", "optimizer") and any(
        kernel.location != "device" for kernel in op.kernels
    )


def resource_of(op: Op) -> Resource | None:
    """The resource of `op`, of several the one furthest off; None for an op on the device."""
    if not leaves_device(op):
        return None
    locations = {kernel.location for kernel in op.kernels}
    if "drive" in locations:
        return "drives"
    return "copies" if "link" in locations else "host" if "host" in locations else None
