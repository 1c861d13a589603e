"""Lowers a model: what each module's forward and backward do, with modules that are alike traced
once.

A transformer's blocks differ in their names only. Of a run of equal blocks the tape needs the
first, one that has equal neighbours on both sides, and the last; the others are that middle one
under other names. Kernels are the same objects, so that whatever is computed from them once is
computed once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from operator import attrgetter

from zsim.autograd import lower_module, tape
from zsim.autograd.lowered import (
    Computation,
    LoweredModule,
    ParameterGradient,
    TapeEvent,
    UnitHooks,
)
from zsim.autograd.traced import TracedModel
from zsim.ir.buffers import Buffer, start_of
from zsim.ir.ops import Alloc, Free
from zsim.models.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.models.operators import Operator
from zsim.models.repeats import repeats
from zsim.models.spec import ModelSpec, Module
from zsim.models.training_options import Batch, Device

Pattern = tuple[tuple[object, ...], ...]


def lower(
    model: ModelSpec,
    *,
    batch: Batch,
    dtype: str,
    casts_input: bool = False,
    device: Device = "cpu",
    checkpointing: Checkpointing = NO_CHECKPOINTING,
    autocast: str = "none",
    unit_hooks: UnitHooks = "fully_shard",
) -> tuple[LoweredModule, ...]:
    """Every module of `model` with the kernels and memory events of one micro-batch's forward and
    backward.

    `unit_hooks`: those of the strategy. Views of parameters are no leaves, so that autocast
    caches no casts of them. Equal to `module_lowering.lower_each`, which traces every module by
    itself. A TracedModel brings its own.
    """
    if isinstance(model, TracedModel):
        return model.modules_for(
            batch,
            dtype=dtype,
            device=device,
            casts_input=casts_input,
            checkpointing=checkpointing,
            autocast=autocast,
            unit_hooks=unit_hooks,
        )
    checkpointed = checkpointing.applies_to(model)
    if repeats(model) or model.nested:
        return lower_module.lower_each(
            model,
            batch=batch,
            dtype=dtype,
            casts_input=casts_input,
            device=device,
            checkpointing=checkpointing,
            checkpointed=checkpointed,
            autocast=autocast,
            leaves=unit_hooks != "fsdp1_views",
        )
    runs = list(_runs(model.modules, checkpointed, frozen=model.frozen))
    kept = tuple(
        module for run in runs for module in (run if len(run) < 4 else (*run[:2], run[-1]))
    )
    few = replace(model, modules=kept)
    each = lower_module.lower_each(
        few,
        batch=batch,
        dtype=dtype,
        casts_input=casts_input,
        device=device,
        checkpointing=checkpointing,
        checkpointed=checkpointed,
        autocast=autocast,
        leaves=unit_hooks != "fsdp1_views",
    )
    traced = iter(each)
    lowered: list[LoweredModule] = []
    for run in runs:
        if len(run) < 4:
            lowered += [next(traced) for _ in run]
            continue
        first, middle, last = next(traced), next(traced), next(traced)
        lowered += [first, middle, *_copies(middle, run, places=range(2, len(run) - 1))]
        lowered += _copies(last, run, places=range(len(run) - 1, len(run)))
    return tuple(lowered)


def loss_buffers(model: ModelSpec) -> tuple[str, str]:
    """The buffers of the loss and of its gradient, which the caller of backward holds until it
    returns."""
    last = model.modules[-1]
    return tape.SEED, tape.summed(Buffer.of(last.fqn, last.operators[-1].output), model.forwards)


def _runs(
    modules: tuple[Module, ...], checkpointed: frozenset[str], *, frozen: frozenset[str]
) -> Iterator[tuple[Module, ...]]:
    """`modules` in runs of neighbours that differ in their names only, and are checkpointed or are
    not."""
    run: list[Module] = []
    pattern: Pattern = ()
    for module in modules:
        own = (*_pattern(module), (module.fqn in checkpointed,))
        if frozen:
            own += (tuple((op.weight in frozen, op.bias in frozen) for op in module.operators),)
        if run and own != pattern:
            yield tuple(run)
            run = []
        run.append(module)
        pattern = own
    yield tuple(run)


_SHAPE = attrgetter(
    *(field.name for field in fields(Operator) if field.name not in ("name", "weight", "bias"))
)
"""What an operator does, without its name and those of its parameters."""


def _pattern(module: Module) -> Pattern:
    """What a module does, without its name: its operators with parameters named from the module on.
    """
    prefix = f"{module.fqn}."
    return tuple(
        [
            (_SHAPE(op), op.weight.removeprefix(prefix), op.bias.removeprefix(prefix))
            for op in module.operators
        ]
    )


def _copies(
    traced: LoweredModule, run: tuple[Module, ...], *, places: range
) -> Iterator[LoweredModule]:
    """`traced`, the second or last of `run`, as the module at each of `places`: its own values, its
    input and its parameters."""
    before = run[0 if traced.fqn == run[1].fqn else 1].fqn
    names = _names(traced, before)
    for place in places:
        start = {
            OWN: start_of(run[place].fqn), INPUT: start_of(run[place - 1].fqn),
            PARAMETER: f"{run[place].fqn}.", OTHER: "",
        }
        yield _renamed(
            traced, run[place], {name: start[whose] + rest for name, whose, rest in names}
        )


OWN, INPUT, PARAMETER, OTHER = range(4)
"""Whose a name is in the events of a module: its own value's, that of the module before it, a
parameter's of its own, or neither."""


def _names(traced: LoweredModule, before: str) -> list[tuple[str, int, str]]:
    """Every name in the events of `traced` once: whose it is, and what of it stays when the module
    is another."""
    tape = (*traced.forward.memory, *traced.backward.memory, *traced.freed_with_autocast_cache)
    owners = {traced.fqn: OWN, before: INPUT}
    found = []
    for buffer in dict.fromkeys(event.buffer for event in tape if isinstance(event, (Alloc, Free))):
        name = Buffer(buffer)
        whose = owners.get(name.owner, OTHER)
        found.append((buffer, whose, buffer if whose == OTHER else name.role))
    prefix = f"{traced.fqn}."
    for fqn in dict.fromkeys(event.fqn for event in tape if isinstance(event, ParameterGradient)):
        own = fqn.startswith(prefix)
        found.append((fqn, PARAMETER if own else OTHER, fqn.removeprefix(prefix)))
    return found


def _renamed(traced: LoweredModule, module: Module, names: dict[str, str]) -> LoweredModule:
    """`traced` as `module`, with `names` for its own."""
    return LoweredModule(
        fqn=module.fqn,
        unit=module.unit,
        forward=Computation(
            kernels=traced.forward.kernels, memory=_events(traced.forward.memory, names)
        ),
        backward=Computation(
            kernels=traced.backward.kernels, memory=_events(traced.backward.memory, names)
        ),
        input_needs_gradient=traced.input_needs_gradient,
        recompute=traced.recompute,
        freed_with_autocast_cache=tuple(
            Free(names[given.buffer]) for given in traced.freed_with_autocast_cache
        ),
        differentiates=traced.differentiates,
    )


def _events(tape: tuple[TapeEvent, ...], names: dict[str, str]) -> tuple[TapeEvent, ...]:
    """`tape` with other names; in one expression, as every event of every block passes here."""
    return tuple(
        [
            Alloc(names[event.buffer], event.kind, event.nbytes)
            if type(event) is Alloc
            else Free(names[event.buffer])
            if type(event) is Free
            else ParameterGradient(names[event.fqn], event.node_makes_more)
            if type(event) is ParameterGradient
            else event
            for event in tape
        ]
    )
