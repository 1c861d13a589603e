"""A module of the model, lowered: kernels and memory events of its forward and backward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, final

from zsim.ir.ops import Alloc, Free, Kernel, MemoryEvent

UnitHooks = Literal["fully_shard", "none", "fsdp1_views", "raw_inputs"]
"""Effects of a strategy's hooks on the autograd graph of a unit.

"fully_shard": casts the unit's inputs and passes them through an autograd node of its own, with one
output per tensor. "fsdp1_views": FSDP1, the parameters are views of a flat one, new in each run.
"none": no node and no views. All three cast the model's own inputs to the parameters' dtype.
"raw_inputs": as "none", and the model's inputs keep the dtype in which the caller gives them."""


@final
@dataclass(slots=True, unsafe_hash=True)
class ParameterGradient:
    """Autograd makes a gradient of the parameter `fqn`; the strategy decides where it lives.

    `node_makes_more`: the same autograd node makes another gradient afterwards, even if it frees
    memory in between. `accumulation_is_marked`: an `Accumulated` event follows, as in a trace;
    otherwise the gradient is accumulated when its node ends. `is_copy`: torch keeps a copy of the
    gradient, which is shared or has other strides than the parameter. Where an earlier micro-batch
    left a gradient, the original is added to it.
    """

    fqn: Final[str]
    node_makes_more: Final[bool] = False
    accumulation_is_marked: Final[bool] = False
    is_copy: Final[bool] = False


@final
@dataclass(frozen=True, slots=True)
class Accumulated:
    """Autograd's engine accumulates the gradient of `fqn`: it stores it or, where an earlier
    micro-batch left one, adds to that."""

    fqn: str


@final
@dataclass(frozen=True, slots=True)
class Recomputed:
    """The last recomputation of a module's backward is over: what comes before belongs to it."""


@final
@dataclass(frozen=True, slots=True)
class InnerCall:
    """A recomputation enters a nested `unit`, or leaves it (`returns`), after `kernels` kernels."""

    unit: str
    returns: bool
    kernels: int


@final
@dataclass(frozen=True, slots=True)
class NodeOver:
    """A node of autograd that makes gradients of parameters is over, and nothing went with it."""


SUM_OF_GRADIENTS = ".summed"
"""In the name of a buffer: two gradients of one value, which several operators read, have been
added up in it."""
TapeEvent = Alloc | Free | ParameterGradient | Accumulated | NodeOver | Recomputed | InnerCall


def storage_events(tape: Iterable[TapeEvent]) -> list[MemoryEvent]:
    """The allocations and frees of a tape, without its marks."""
    return [event for event in tape if type(event) is Alloc or type(event) is Free]


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """The forward or the backward of one module: its kernels, and its memory events in order.

    Buffer names carry the module's fqn and are unique within one micro-batch; a strategy that keeps
    several micro-batches alive at once prefixes them. Buffers allocated in forward and not freed
    there are freed in a backward.
    """

    kernels: tuple[Kernel, ...]
    memory: tuple[TapeEvent, ...]


NOTHING: Final = Computation(kernels=(), memory=())
"""What a part of a block does that has nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredModule:
    """One module of the model, lowered: its forward and backward for one micro-batch.

    `recompute`: the kernels that activation checkpointing runs again. Their memory events stand in
    backward before the mark `Recomputed`; in a block of several parts, with the part whose backward
    needs them first. `differentiates=False`: no output needs a gradient, so backward is empty.
    `sums_losses`: memory events of adding this forward's loss to those of earlier forwards.
    `freed_with_autocast_cache`: copies of weights that only autocast's cache holds until the whole
    forward ends. `input_buffer`: the buffer that a part of a block takes as input; "" for the last
    buffer of another module. `events_after_hook`, of a nested unit: its input's gradient is added
    to others after its post-backward hook. `caller_frees`, of a traced unit: the last buffers that
    forward frees, after its hooks; the caller holds them. `returns_inner_output`: the last part of
    a block returns a nested unit's output, with no autograd node of its own in between.
    """

    fqn: str
    unit: str
    forward: Computation
    backward: Computation
    input_needs_gradient: bool
    recompute: tuple[Kernel, ...] = ()
    sums_losses: tuple[MemoryEvent, ...] = ()
    freed_with_autocast_cache: tuple[Free, ...] = ()
    differentiates: bool = True
    input_buffer: str = ""
    events_after_hook: tuple[TapeEvent, ...] = ()
    caller_frees: tuple[str, ...] = ()
    returns_inner_output: bool = False
