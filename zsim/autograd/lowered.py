"""A module of the model, lowered: kernels and memory events of its forward and backward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, final

from zsim.ir.ops import Alloc, Free, HostEvent, Kernel, MemoryEvent

UnitHooks = Literal["fully_shard", "none", "fsdp1_views", "raw_inputs"]
"""Effects of a strategy's hooks on the autograd graph of a unit.

- "fully_shard": the unit's inputs are cast and pass through an autograd node of their own.
- "fsdp1_views": the parameters are views of FSDP1's flat one, new in each run.
- "none": no node and no views. Like the two above, it casts the model's own inputs.
- "raw_inputs": as "none", but the model's own inputs keep their dtype."""


@final
@dataclass(slots=True, unsafe_hash=True)
class ParameterGradient:
    """Autograd makes a gradient of the parameter `fqn`; the strategy decides where it lives.

    - `node_makes_more`: the same autograd node makes another gradient later.
    - `accumulation_is_marked`: an `Accumulated` event follows, as in a trace. Otherwise the
      gradient is accumulated when its node ends.
    - `is_copy`: torch keeps a copy of the gradient, which is shared or has other strides than the
      parameter. To a gradient of an earlier micro-batch torch adds the original.
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


TapeEvent = Alloc | Free | ParameterGradient | Accumulated | NodeOver | Recomputed | InnerCall


def storage_events(tape: Iterable[TapeEvent]) -> list[MemoryEvent]:
    """The allocations and frees of a tape, without its marks."""
    return [event for event in tape if type(event) is Alloc or type(event) is Free]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopies:
    """Copies of saved tensors over the link: to the host, which allocates them, or to the device.

    - `beside` compute, on streams of their own, in front of the forward or backward; then `memory`
      has the device's allocations. Else behind the forward, or in front of the backward, which has
      the allocations itself.
    - `awaits`: compute waits for a copy that was begun earlier.
    """

    kernels: tuple[Kernel, ...] = ()
    host: tuple[HostEvent, ...] = ()
    memory: tuple[MemoryEvent, ...] = ()
    beside: bool = False
    awaits: bool = False


NO_COPIES: Final = HostCopies()
"""The copies where saved tensors stay on the device."""


@dataclass(frozen=True, kw_only=True)
class Computation:
    """The forward or the backward of one module: its kernels, and its memory events in order.

    Buffer names carry the module's fqn and are unique within one micro-batch; a strategy that keeps
    several micro-batches alive at once prefixes them. Buffers allocated in forward and not freed
    there are freed in a backward. Its `copies` are of offloaded saved tensors: what a forward
    saves, or what a backward has to have first.
    """

    kernels: tuple[Kernel, ...]
    memory: tuple[TapeEvent, ...]
    copies: HostCopies = NO_COPIES

    @cached_property
    def events(self) -> tuple[MemoryEvent, ...]:
        """The allocations and frees of `memory`, without its marks."""
        return tuple(storage_events(self.memory))


NOTHING: Final = Computation(kernels=(), memory=())
"""The computation of a part of a block that does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredModule:
    """One module of the model, lowered: its forward and backward for one micro-batch.

    - `recompute`: the kernels that activation checkpointing runs again. Their memory events stand
      in backward before the mark `Recomputed`, with the part of the block that needs them first.
    - `sums_losses`: memory events of adding this forward's loss to those of earlier forwards.
    - `freed_with_autocast_cache`: copies of weights that autocast holds until forward ends.
    - `differentiates=False`: no output needs a gradient, so backward is empty.
    - `input_buffer`: the input of a part of a block; "" for the last buffer of another module.
    - `events_after_hook`, of a nested unit: its input's gradient is added to others there.
    - `caller_frees`, of a traced unit or the root: what its caller frees when it returns.
    - `returns_inner_output`: the last part of a block returns a nested unit's output, with no
      autograd node of its own in between. So may the root.
    - `after_root`: the caller computes it after the whole module has returned: the loss.
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
    after_root: bool = False
