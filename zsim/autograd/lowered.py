"""A module of the model, lowered: kernels and memory events of its forward and backward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, final

from zsim.ir.ops import Alloc, Free, Kernel, MemoryEvent

Autograd = Literal["hooked", "plain", "views", "bare"]
"""What autograd has of a unit besides its operators: "hooked" what fully_shard's hooks make, which
cast what the unit takes and pass it through a node of their own with an output for each tensor
given; "plain" nothing; "views" of its parameters, others in each run (FSDP1). With all of these the
model's own inputs are cast when it is called; "bare" is nothing at all, and inputs as they are
given."""


@final
@dataclass(slots=True, unsafe_hash=True)
class ParameterGradient:
    """Autograd has made the gradient of `fqn`. The strategy says where it lives; the tape only says
    when it is born.

    `goes_on`: its node makes another one, also where it lets go of something in between. `waits`:
    an `Accumulated` says when it is accumulated, as in a trace, which sees that; elsewhere it
    follows from where nodes end. `copied`: what the node made is shared with others, or lies
    otherwise than the parameter: a copy of it is kept, but where an earlier micro-batch left one it
    is added as it is.
    """

    fqn: Final[str]
    goes_on: Final[bool] = False
    waits: Final[bool] = False
    copied: Final[bool] = False


@final
@dataclass(frozen=True, slots=True)
class Accumulated:
    """Autograd's engine has accumulated the gradient of `fqn`: kept it or, where an earlier
    micro-batch left one, added it to that."""

    fqn: str


@final
@dataclass(frozen=True, slots=True)
class Recomputed:
    """The last recomputation of a module's backward is over: what comes before belongs to it."""


@final
@dataclass(frozen=True, slots=True)
class InnerCall:
    """A recomputation calls the module of a `unit` in its block, or that `returns`; so many of its
    `kernels` have run before."""

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
    """One module of the model, lowered: what its forward and its backward do for one micro-batch.

    `recompute` are the kernels that activation checkpointing runs again; their memory events stand
    in backward, up to the mark `Recomputed`; of a block in parts they stand with the part that asks
    for them first. One that `differentiates` not makes nothing that needs a gradient: it has no
    backward. `sums_losses` is what the caller of the model does after its second forward and later
    ones: it adds the loss to those before. `uncached` goes when the whole forward is over: copies
    of weights that nobody but autocast's cache holds. `takes` is the buffer that a part of a block
    is called with: others are called with the last one that is not theirs. Of a unit in a block
    `passes_on` is what comes when its hook after backward has run: the gradient of its input is
    added to what others have made. Of a traced one `given_back` are the last buffers that forward
    frees, when its hooks have run: what its caller gave it, and what that does not keep. One that
    `hands_on` is the last part of a block that returns what a unit in it made: autograd has no node
    of its own between them.
    """

    fqn: str
    unit: str
    forward: Computation
    backward: Computation
    input_needs_gradient: bool
    recompute: tuple[Kernel, ...] = ()
    sums_losses: tuple[MemoryEvent, ...] = ()
    uncached: tuple[Free, ...] = ()
    differentiates: bool = True
    takes: str = ""
    passes_on: tuple[TapeEvent, ...] = ()
    given_back: tuple[str, ...] = ()
    hands_on: bool = False
