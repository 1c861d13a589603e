"""Laws of a traced model: parameters with an owner, buffers that live and die once.

A law is a function that yields its breaches, each as (place, what is there instead); the table
`LAWS` names it by what it expects. A law may rely on those before it in the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from zsim.autograd.lowered import (
    Accumulated,
    LoweredModule,
    ParameterGradient,
    TapeEvent,
)
from zsim.autograd.tape import SEED
from zsim.ir.buffers import Buffer
from zsim.ir.ops import Alloc, Free
from zsim.models.spec import ROOT, ModelSpec

Breaches = Iterator[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """A model and its lowered modules, which end with the buffer `loss`."""

    model: ModelSpec
    lowered: tuple[LoweredModule, ...]
    loss: Buffer

    @cached_property
    def owner(self) -> dict[str, str]:
        """The unit that owns each parameter."""
        return {p.fqn: unit.fqn for unit in self.model.units for p in unit.parameters}

    @cached_property
    def backward(self) -> list[tuple[LoweredModule, TapeEvent]]:
        """The events of backward in order, each with its module."""
        return [(m, event) for m in reversed(self.lowered) for event in m.backward.memory]

    @cached_property
    def forward(self) -> list[tuple[LoweredModule, TapeEvent]]:
        """The events of forward in order, each with its module."""
        return [(module, event) for module in self.lowered for event in module.forward.memory]

    @cached_property
    def freed_after_forward(self) -> list[str]:
        """The buffers that autocast's cache holds until the whole forward ends."""
        return [event.buffer for m in self.lowered for event in m.freed_with_autocast_cache]

    @cached_property
    def gradients(self) -> list[tuple[LoweredModule, ParameterGradient]]:
        """The gradients of both passes, each with its module."""
        return [
            (module, event)
            for module, event in (*self.forward, *self.backward)
            if isinstance(event, ParameterGradient)
        ]

    @cached_property
    def turns(self) -> dict[str, tuple[str, str]]:
        """The last module and a letter for each event of a gradient in backward, by its fqn.

        u: unmarked, m: marked to be accumulated later, c: the same of a copy, A: accumulated.
        """
        turns: dict[str, tuple[str, str]] = {}
        for module, event in self.backward:
            if isinstance(event, Accumulated | ParameterGradient):
                letters = turns.get(event.fqn, ("", ""))[1] + _letter(event)
                turns[event.fqn] = (module.fqn, letters)
        return turns


def _letter(event: Accumulated | ParameterGradient) -> str:
    if isinstance(event, Accumulated):
        return "A"
    return "u" if not event.accumulation_is_marked else "c" if event.is_copy else "m"


Law = Callable[[Lowering], Breaches]


def lies_in(unit: str, other: str) -> bool:
    """True if `unit` is the `other` one or lies in it: the parameters of `other` are gathered while
    `unit` runs. Every unit lies in the root."""
    return other in (unit, ROOT) or (other != "" and unit.startswith(f"{other}."))


def problems(
    model: ModelSpec, lowered: tuple[LoweredModule, ...], *, loss: Buffer
) -> Iterator[tuple[str, str, str]]:
    """(place, expected, found) of each breach of a law; the arguments are those of `Lowering`."""
    lowering = Lowering(model=model, lowered=lowered, loss=loss)
    for expected, law in LAWS.items():
        for where, instead in law(lowering):
            yield where, expected, instead


def modules_read_gathered_parameters(of: Lowering) -> Breaches:
    """Parameters of other units are sharded while a module runs."""
    for module in of.model.modules:
        for fqn in (fqn for op in module.operators for fqn in (op.weight, op.bias) if fqn):
            if not lies_in(module.unit, of.owner.get(fqn, "")):
                yield module.fqn, fqn


def gradients_are_of_gathered_parameters(of: Lowering) -> Breaches:
    """Autograd makes gradients of what the module may read."""
    for module, event in of.gradients:
        if not lies_in(module.unit, of.owner.get(event.fqn, "")):
            yield module.fqn, event.fqn


def accumulations_follow_gradients(of: Lowering) -> Breaches:
    """An accumulation ends the wait of a marked gradient."""
    for fqn, (module, letters) in of.turns.items():
        if re.search("(^|[uA])A", letters):
            yield module, fqn


def gradients_come_before_their_accumulation(of: Lowering) -> Breaches:
    """Gradients of a parameter are all marked or all unmarked; a copy is the only one."""
    for module, event in of.forward:
        if isinstance(event, Accumulated | ParameterGradient):
            yield module.fqn, event.fqn
    for fqn, (last, letters) in of.turns.items():
        if not re.fullmatch("u*|m+A?|cA?", letters):
            yield last, fqn


def marked_gradients_are_accumulated(of: Lowering) -> Breaches:
    """A gradient that is marked has its accumulation in the same backward."""
    for fqn, (_, letters) in sorted(of.turns.items()):
        if letters[-1] in "mc":
            yield fqn, "one that is only made"


def _live_buffers(of: Lowering) -> tuple[list[tuple[str, str]], set[str]]:
    """(module, buffer) of each event that allocates a live buffer or frees another, and the
    buffers that are live at the end."""
    live, breaches = set[str](), list[tuple[str, str]]()
    for tape in (of.forward, of.backward):
        for module, event in tape:
            if isinstance(event, Alloc | Free):
                if isinstance(event, Alloc) == (event.buffer in live):
                    breaches.append((module.fqn, event.buffer))
                else:
                    live ^= {event.buffer}
        live.difference_update(of.freed_after_forward if tape is of.forward else ())
    return breaches, live


def buffers_alternate(of: Lowering) -> Breaches:
    """An allocation is of a dead buffer, a free of a live one."""
    yield from _live_buffers(of)[0]


def buffers_are_freed(of: Lowering) -> Breaches:
    """Nothing outlives backward."""
    for buffer in sorted(_live_buffers(of)[1]):
        yield buffer, "it still lives"


def trained_parameters_get_gradients(of: Lowering) -> Breaches:
    """A parameter in the loss that requires a gradient gets one."""
    for fqn in sorted(of.model.trained - {event.fqn for _, event in of.gradients}):
        yield fqn, "none"


def other_parameters_get_none(of: Lowering) -> Breaches:
    """Frozen parameters, and those not in the loss, get no gradient."""
    for fqn in sorted({event.fqn for _, event in of.gradients} - of.model.trained):
        yield fqn, "one"


def backward_ends_with_the_loss(of: Lowering) -> Breaches:
    """Backward only frees once the loss's gradient is freed; the loss goes last."""
    tape = next(module for module in of.lowered if module.differentiates).backward.memory
    ends = tape[tape.index(Free(SEED)) :] if Free(SEED) in tape else ()
    if not ends or ends[-1] != Free(of.loss) or not all(isinstance(e, Free) for e in ends):
        yield of.model.name, "another end"


LAWS: dict[str, Law] = {
    "parameters of its own unit, of one that it lies in, or the root's": (
        modules_read_gathered_parameters
    ),
    "gradients of parameters of its own unit, of one that it lies in, or the root's": (
        gradients_are_of_gathered_parameters
    ),
    "gradients accumulated that wait for it": accumulations_follow_gradients,
    "gradients in backward, each until it is accumulated": (
        gradients_come_before_their_accumulation
    ),
    "every buffer allocated once and freed once": buffers_alternate,
    "a buffer that is freed by the end of backward": buffers_are_freed,
    "a gradient that is accumulated": marked_gradients_are_accumulated,
    "a gradient in every backward": trained_parameters_get_gradients,
    "no gradient of a parameter that is frozen or not in the loss": other_parameters_get_none,
    "the loss and its gradient freed last, and between them what the graph held": (
        backward_ends_with_the_loss
    ),
}
"""The laws in the order in which they are asked, by what each expects."""
