"""Whether a traced model holds together: names that are unique, parameters that are owned, buffers
that live and die once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from zsim.autograd.lowered import (
    Accumulated,
    InnerCall,
    LoweredModule,
    NodeOver,
    ParameterGradient,
    Recomputed,
)
from zsim.autograd.tape import SEED
from zsim.ir.ops import Alloc, Free
from zsim.models.spec import ROOT, ModelSpec, run_of, without_run


def lies_in(unit: str, other: str) -> bool:
    """Whether the `other` unit is this one or contains it: then its parameters are gathered while
    this runs. The root contains all."""
    return other in (unit, ROOT) or (other != "" and unit.startswith(f"{other}."))


def problems(
    model: ModelSpec, lowered: tuple[LoweredModule, ...], *, loss: str, views: bool = False
) -> Iterator[tuple[str, str, str]]:
    """(where, expected, found) of each thing that does not hold; `loss` is the buffer of the loss.

    With `views` gradients are of what each run of a unit reads, and called after it.
    """
    owner = {parameter.fqn: unit.fqn for unit in model.units for parameter in unit.parameters}
    names = (
        [unit.fqn for unit in model.units], [p.fqn for p in model.parameters],
        [m.fqn for m in model.modules],
    )
    for repeated in (
        name for group in names for name, count in Counter(group).items() if count > 1
    ):
        yield repeated, "one unit, parameter or module of this name", "more"
    if model.registered and sorted(model.registered) != sorted(names[1]):
        yield model.name, "every parameter registered once", "others"
    for parameter in model.parameters:
        if not parameter.shape:
            yield (
                parameter.fqn, "a parameter of at least one dimension, as fully_shard does",
                "a scalar",
            )
    if not lowered or [m.fqn for m in lowered] != [m.fqn for m in model.modules]:
        yield model.name, "one lowered module for each module, and at least one", "other ones"
    units = {ROOT, *(unit.fqn for unit in model.units)}
    for module in model.modules:
        if module.unit not in units:
            yield module.fqn, "a unit of the model", module.unit
        for fqn in (fqn for op in module.operators for fqn in (op.weight, op.bias) if fqn):
            if not lies_in(module.unit, owner.get(fqn, "")):
                yield (
                    module.fqn, "parameters of its own unit, of one that it lies in, or the root's",
                    fqn,
                )
    yield from _lifetime_problems(model, lowered, owner, loss, views)


def _lifetime_problems(
    model: ModelSpec, lowered: tuple[LoweredModule, ...], owner: dict[str, str], loss: str,
    views: bool,
) -> Iterator[tuple[str, str, str]]:
    live: set[str] = set()
    made: set[str] = set()
    turns = _Turns()
    units = {unit.fqn for unit in model.units}
    marked: list[str] = []
    passes = [(module, module.forward) for module in lowered]
    passes += [(module, module.backward) for module in reversed(lowered)]
    for buffer in (
        event.buffer for module in lowered for event in module.freed_with_autocast_cache
    ):
        if all(
            not isinstance(event, Alloc) or event.buffer != buffer
            for module in lowered
            for event in module.forward.memory
        ):
            yield model.name, "what goes after forward to be made in it", buffer
    for module, computation in passes:
        if module is lowered[-1] and computation is module.backward:
            live.difference_update(event.buffer for event in module.freed_with_autocast_cache)
        after = module.events_after_hook if computation is module.backward else ()
        for event in (*computation.memory, *after):
            if isinstance(event, ParameterGradient):
                fqn = event.fqn
                if (
                    views
                    and fqn not in owner
                    and run_of(fqn) == run_of(module.fqn)
                ):
                    fqn = without_run(fqn)
                made.add(fqn)
                if computation is module.forward or turns.made(event):
                    yield (
                        module.fqn, "gradients in backward, each until it is accumulated",
                        event.fqn,
                    )
                if not lies_in(module.unit, owner.get(fqn, "")):
                    yield (
                        module.fqn,
                        "gradients of parameters of its own unit, of one that it lies in, or the "
                        "root's",
                        event.fqn,
                    )
            elif isinstance(event, Recomputed):
                marked.append(module.fqn)
            elif isinstance(event, InnerCall):
                if event.unit not in units or event.kernels > len(module.recompute):
                    yield (
                        module.fqn,
                        "calls of units that there are, between kernels that are recomputed",
                        event.unit,
                    )
            elif isinstance(event, Accumulated):
                if turns.accumulated(event):
                    yield module.fqn, "gradients accumulated that wait for it", event.fqn
            elif isinstance(event, NodeOver):
                continue
            elif isinstance(event, Alloc) == (event.buffer in live):
                yield module.fqn, "every buffer allocated once and freed once", event.buffer
            else:
                live.symmetric_difference_update({event.buffer})
    if marked != [module.fqn for module in reversed(lowered) if module.recompute]:
        yield model.name, "one mark in the backward of each module that recomputes", "other marks"
    for buffer in sorted(live):
        yield buffer, "a buffer that is freed by the end of backward", "it still lives"
    for fqn in sorted(turns.waiting):
        yield fqn, "a gradient that is accumulated", "one that is only made"
    for fqn in sorted(model.trained - made):
        yield fqn, "a gradient in every backward", "none"
    for fqn in sorted(made - model.trained):
        yield fqn, "no gradient of a parameter that is frozen or not in the loss", "one"
    tape = next(module for module in lowered if module.differentiates).backward.memory
    ends = tape[tape.index(Free(SEED)) :] if Free(SEED) in tape else ()
    if not ends or ends[-1] != Free(loss) or not all(isinstance(event, Free) for event in ends):
        yield (
            model.name,
            "the loss and its gradient freed last, and between them what the graph held",
            "another end",
        )


@dataclass(slots=True)
class _Turns:
    """Whether gradients that wait to be accumulated are so once, when all of the parameter's have
    been made. Methods say what is wrong."""

    waiting: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    """Parameters whose gradient waits or has waited."""
    untold: set[str] = field(default_factory=set)
    copies: set[str] = field(default_factory=set)
    """Those of which a copy is kept: of a sum of several gradients none is."""

    def made(self, event: ParameterGradient) -> bool:
        if not event.accumulation_is_marked:
            self.untold.add(event.fqn)
            return event.fqn in self.told
        wrong = event.fqn in self.untold | self.copies or (
            event.fqn in self.told and (event.is_copy or event.fqn not in self.waiting)
        )
        if event.is_copy:
            self.copies.add(event.fqn)
        self.waiting.add(event.fqn)
        self.told.add(event.fqn)
        return wrong

    def accumulated(self, event: Accumulated) -> bool:
        wrong = event.fqn not in self.waiting
        self.waiting.discard(event.fqn)
        return wrong
