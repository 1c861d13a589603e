"""Backward of a lowered module as events: recomputation, gradients made, gradients accumulated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

from zsim.autograd.lowered import (
    Accumulated,
    InnerCall,
    LoweredModule,
    NodeOver,
    ParameterGradient,
    Recomputed,
    TapeEvent,
    storage_events,
)
from zsim.autograd.lowering.lower_model import loss_buffers
from zsim.ir.buffers import is_sum_of_gradients
from zsim.ir.ops import Alloc, Free, Kernel, MemoryEvent
from zsim.models.operators import ONE_NODE, Operator
from zsim.strategies.building.training import Training

PRODUCTS = ("linear", "conv1d")
"""Operators that multiply by a weight and may add a bias."""


@dataclass(slots=True)
class RecomputedStretch:
    """A region of a recomputation: up to a `call` into a nested unit, to its return, or to the
    end.

    `inside`: the nested unit whose module runs meanwhile, "" for the block itself.
    """

    inside: str
    kernels: tuple[Kernel, ...]
    memory: tuple[MemoryEvent, ...]
    call: InnerCall | None = None


BackwardEvent = MemoryEvent | Recomputed | InnerCall
Birth = tuple[Sequence[Alloc], Sequence[MemoryEvent]]
"""The allocations of a gradient, and what happens once it is accumulated."""
Cut = TypeVar("Cut")
Split = Callable[[Sequence[BackwardEvent], tuple[Kernel, ...]], Cut]
"""A way to split a backward whose recomputation has these kernels."""


InTwo = tuple[tuple[MemoryEvent, ...], tuple[MemoryEvent, ...]]
InTurn = tuple[list[RecomputedStretch], tuple[MemoryEvent, ...]]


def until_recomputed(events: Sequence[BackwardEvent], _: tuple[Kernel, ...]) -> InTwo:
    """A backward's memory events in two: up to the end of its recomputation, nothing when there is
    none, and after it."""
    kinds = list(map(type, events))
    if Recomputed not in kinds:  # nor any other mark
        return (), tuple(cast(Sequence[MemoryEvent], events))
    end = kinds.index(Recomputed)
    return tuple(storage_events(events[:end])), tuple(storage_events(events[end:]))


def recomputed_in_turn(
    events: Sequence[BackwardEvent], kernels: tuple[Kernel, ...]
) -> InTurn:
    """Split as `until_recomputed` does, with what a recomputation of these `kernels` does between
    calls of units in the block."""
    if InnerCall not in map(type, events):
        before, after = until_recomputed(events, kernels)
        return [RecomputedStretch("", kernels, before)] if before or kernels else [], after
    again, rest = list[RecomputedStretch](), list[MemoryEvent]()
    inside, start = "", 0
    for event in events:
        if type(event) is Recomputed:
            again.append(RecomputedStretch(inside, kernels[start:], tuple(rest)))
            rest = []
        elif type(event) is InnerCall:
            region = kernels[start : event.kernels]
            again.append(RecomputedStretch(inside, region, tuple(rest), event))
            rest = []
            inside, start = "" if event.returns else event.unit, event.kernels
        else:
            rest.append(event)
    return again, tuple(rest)


def until_loss_goes(
    training: Training, tape: Sequence[TapeEvent]
) -> tuple[Sequence[TapeEvent], list[MemoryEvent]]:
    """The tape of the last module in backward in two: what it does, and the frees at the end of
    `loss.backward()`.

    Those are of the loss's gradient, of what the graph holds, and of the loss. Hooks in backward,
    which reduce the last gradients, come before them.
    """
    seed, _ = loss_buffers(training.model)
    end = tape.index(Free(seed))
    return tape[:end], storage_events(tape[end:])


def late_weights(training: Training) -> frozenset[str]:
    """Weights of linears with a bias: a further node transposes their gradient, so the bias's is
    added first, as Conv1D's is anyway.

    Not under autocast, where the nodes that cast both gradients come in the order of the casts: the
    bias, cast first, is last.
    """
    if training.precision.autocast != "none":
        return frozenset()
    return frozenset(
        op.weight
        for m in training.model.modules
        for op in m.operators
        if _is_addmm(op)
    )


def _is_addmm(op: Operator) -> bool:
    """True for a product that has a node for its weight's transpose, and adds a bias."""
    return op.kind in PRODUCTS and bool(op.bias) and op.implementation != ONE_NODE


def accumulated_after_sums(training: Training) -> frozenset[str]:
    """Parameters whose gradient is accumulated after the gradient of the same node's input has been
    added to what other nodes made.

    The engine adds when a node is over, and accumulates when it comes to the next one. Of a linear
    with a bias the input goes through a node more, so that its parameters are accumulated first.
    """
    operators = [
        op
        for module in training.model.modules
        for op in module.operators
        if not _is_addmm(op)
    ]
    return frozenset(fqn for op in operators for fqn in (op.weight, op.bias) if fqn)


def adds_up(event: TapeEvent) -> bool:
    """True for the sum of two gradients of one value."""
    return isinstance(event, Alloc) and is_sum_of_gradients(event.buffer)


@dataclass(slots=True)
class Backwards(Generic[Cut]):
    """Backwards of modules as a strategy splits their events.

    One that is as in the micro-batch before is the same object: whoever replays memory compares it
    by identity first.
    """

    split: Split[Cut]
    after_sums: frozenset[str]
    late: frozenset[str] = frozenset()
    held_by_caller: Sequence[str] = ()
    waiting: dict[str, list[MemoryEvent]] = field(default_factory=dict)
    """Events that come with the accumulation of a gradient whose mark may stand in a later module,
    by parameter."""
    _last: dict[str, tuple[object, Cut]] = field(default_factory=dict)

    def of(
        self, module: LoweredModule, tape: Sequence[TapeEvent],
        born: Callable[[ParameterGradient], Birth], *, first: Sequence[MemoryEvent] = (),
    ) -> Cut:
        """The backward of `module`, whose `tape` has the events of `first` before it."""
        births = [born(event) for event in tape if type(event) is ParameterGradient]
        sources, known, waited = (first, tape, births), self._last.get(module.fqn), self.waiting
        if known is not None and not waited and known[0] == sources:
            return known[1]
        alone = not waited
        events = accumulated(
            tape, births, after_sums=self.after_sums, late=self.late,
            held_by_caller=self.held_by_caller, waiting=waited,
        )
        cut = self.split([*first, *events], module.recompute)
        if alone and not waited:
            self._last[module.fqn] = sources, cut
        return cut


def accumulated(
    tape: Iterable[TapeEvent],
    births: Iterable[Birth],
    *,
    after_sums: frozenset[str],
    waiting: dict[str, list[MemoryEvent]],
    late: frozenset[str] = frozenset(),
    held_by_caller: Sequence[str] = (),
) -> list[BackwardEvent]:
    """A module's backward, with a birth for each gradient.

    A node makes its gradients, then frees what it held; then gradients are accumulated. A `late`
    weight is accumulated after its bias although it is made before. Parameters in `after_sums` wait
    until the gradient of the input is added to those of other nodes. A tape may mark the
    accumulation instead. `waiting` holds events of gradients whose mark may stand in a later
    module. Buffers `held_by_caller` are freed by no node.
    """
    ordered = list[BackwardEvent]()
    early, then, last = list[MemoryEvent](), list[MemoryEvent](), list[MemoryEvent]()
    is_over = node_makes_more = False
    born = iter(births)
    for event in tape:
        if type(event) is Free and not node_makes_more and event.buffer not in held_by_caller:
            is_over = True
            ordered.append(event)
            continue
        if is_over and (early or then or last):
            ordered += (*early, *then)
            early.clear()
            then.clear()
            if not adds_up(event):
                ordered += last
                last.clear()
        is_over = False
        if type(event) is Alloc:
            ordered.append(event)
        elif type(event) is ParameterGradient:
            node_makes_more = event.node_makes_more
            made, rest = next(born)
            ordered += made
            if rest and event.accumulation_is_marked:
                waiting.setdefault(event.fqn, []).extend(rest)
            elif rest:
                fqn = event.fqn
                (then if fqn in late else last if fqn in after_sums else early).extend(rest)
        elif type(event) is Accumulated:
            ordered += waiting.pop(event.fqn, [])
        elif type(event) is NodeOver:
            ordered += (*early, *then)
            early.clear()
            then.clear()
            is_over = True
        else:
            ordered.append(event)
    return [*ordered, *early, *then, *last]


def forward_memory(training: Training, module: LoweredModule) -> tuple[MemoryEvent, ...]:
    """A module's forward; after the last module's autocast empties its cache."""
    last = training.freed_with_autocast_cache if module is training.modules[-1] else ()
    return module.forward.events + module.sums_losses + last
