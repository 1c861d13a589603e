"""Lowering of a model: the forward and backward of each module; equal modules are lowered once.

A transformer's blocks differ in their names only. The tape needs three blocks of a run of equal
ones: the first, one with equal neighbours on both sides, and the last. The others are copies of the
middle one under other names. Copies share their kernel objects, so that later stages compute
anything about a kernel once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from functools import partial
from operator import attrgetter
from typing import cast

from zsim.autograd import tape
from zsim.autograd.lowered import (
    NO_COPIES,
    Computation,
    HostCopies,
    LoweredModule,
    ParameterGradient,
    TapeEvent,
    UnitHooks,
)
from zsim.autograd.lowering import lower_module
from zsim.autograd.traced.model import TracedModel
from zsim.ir.buffers import Buffer, buffer_of, owner_of, role_of, start_of, sum_of_losses
from zsim.ir.ops import Alloc, Free, HostAlloc
from zsim.models.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.models.operators import Operator
from zsim.models.repeats import repeats
from zsim.models.spec import ModelSpec, Module
from zsim.models.training_options import Batch, Device, SavedTensorsHook

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
    saving: SavedTensorsHook | None = None,
) -> tuple[LoweredModule, ...]:
    """Every module of `model` with the kernels and memory events of one micro-batch's forward and
    backward; a TracedModel brings its own.

    `unit_hooks`: those of the strategy. FSDP1's views of parameters are not leaves of autograd, so
    that autocast does not cache casts of them. A hook may be `saving` tensors in host memory.
    The result equals `lower_module.lower_each`'s, which lowers every module by itself.
    """
    if isinstance(model, TracedModel):
        return model.modules_for(
            batch, dtype=dtype, device=device, casts_input=casts_input,
            checkpointing=checkpointing, autocast=autocast, unit_hooks=unit_hooks,
        )
    checkpointed = checkpointing.applies_to(model)
    lower_each = partial(
        lower_module.lower_each,
        batch=batch, dtype=dtype, casts_input=casts_input, device=device,
        checkpointing=checkpointing, checkpointed=checkpointed, autocast=autocast,
        leaves=unit_hooks != "fsdp1_views", saving=saving,
    )
    far = saving is not None and saving.tensors == "checkpoint_inputs"  # blocks free others' inputs
    if repeats(model) or model.nested or far:
        return lower_each(model)
    runs = list(_runs(model.modules, checkpointed, frozen=model.frozen))
    kept = [module for run in runs for module in (run if len(run) < 4 else (*run[:2], run[-1]))]
    return tuple(_expanded(runs, lower_each(replace(model, modules=tuple(kept)))))


def _expanded(
    runs: Iterable[tuple[Module, ...]], lowered: Iterable[LoweredModule]
) -> Iterator[LoweredModule]:
    """The modules of all `runs`, of whose long ones the first two and the last are `lowered`."""
    each = iter(lowered)
    for run in runs:
        if len(run) < 4:
            yield from (next(each) for _ in run)
            continue
        first, middle, last = next(each), next(each), next(each)
        yield from (first, middle, *_copies(middle, run, places=range(2, len(run) - 1)))
        yield from _copies(last, run, places=range(len(run) - 1, len(run)))


def loss_buffers(model: ModelSpec) -> tuple[Buffer, Buffer]:
    """The buffers of the loss and of its gradient, which the caller of backward holds until it
    returns."""
    last = model.modules[-1]
    return tape.SEED, sum_of_losses(buffer_of(last.fqn, last.operators[-1].output), model.forwards)


def _runs(
    modules: tuple[Module, ...], checkpointed: frozenset[str], *, frozen: frozenset[str]
) -> Iterator[tuple[Module, ...]]:
    """`modules` in runs of neighbours that differ only in their names, all checkpointed or none."""
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
"""Reads an operator without its name and those of its parameters."""


def _pattern(module: Module) -> Pattern:
    """A module without its name: its operators, with parameter names relative to the module."""
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
    for index in places:
        start = {
            OWN: start_of(run[index].fqn), INPUT: start_of(run[index - 1].fqn),
            PARAMETER: f"{run[index].fqn}.", OTHER: "",
        }
        renamed = {name: start[owner] + rest for name, owner, rest in names}
        yield _renamed(traced, run[index], cast(dict[str, Buffer], renamed))


OWN, INPUT, PARAMETER, OTHER = range(4)
"""Owners of a name in a module's events: the module's own value, the module before it, a parameter
of its own, or none of these."""


def _names(traced: LoweredModule, before: str) -> list[tuple[str, int, str]]:
    """Each name in the events of `traced`, its owner, and the rest of it after the owner's name."""
    tape = (
        *traced.forward.memory, *traced.backward.memory, *traced.freed_with_autocast_cache,
        *traced.forward.copies.host, *traced.backward.copies.host,
    )
    owners = {traced.fqn: OWN, before: INPUT}
    names = list[tuple[str, int, str]]()
    buffers = (event.buffer for event in tape if isinstance(event, (Alloc, Free, HostAlloc)))
    for buffer in dict.fromkeys(buffers):
        owner = owners.get(owner_of(buffer), OTHER)
        names.append((buffer, owner, buffer if owner == OTHER else role_of(buffer)))
    prefix = f"{traced.fqn}."
    for fqn in dict.fromkeys(event.fqn for event in tape if isinstance(event, ParameterGradient)):
        own = fqn.startswith(prefix)
        names.append((fqn, PARAMETER if own else OTHER, fqn.removeprefix(prefix)))
    return names


def _renamed(traced: LoweredModule, module: Module, names: dict[str, Buffer]) -> LoweredModule:
    """`traced` as `module`, with `names` for its own."""
    return LoweredModule(
        fqn=module.fqn,
        unit=module.unit,
        forward=Computation(
            kernels=traced.forward.kernels, memory=_events(traced.forward.memory, names),
            copies=_copied(traced.forward.copies, names),
        ),
        backward=Computation(
            kernels=traced.backward.kernels, memory=_events(traced.backward.memory, names),
            copies=_copied(traced.backward.copies, names),
        ),
        input_needs_gradient=traced.input_needs_gradient,
        recompute=traced.recompute,
        freed_with_autocast_cache=tuple(
            Free(names[cached.buffer]) for cached in traced.freed_with_autocast_cache
        ),
        differentiates=traced.differentiates,
    )


def _copied(copies: HostCopies, names: dict[str, Buffer]) -> HostCopies:
    """`copies` with other names."""
    if copies is NO_COPIES:
        return copies
    return HostCopies(
        kernels=copies.kernels,
        host=tuple([replace(event, buffer=names[event.buffer]) for event in copies.host]),
    )


def _events(tape: tuple[TapeEvent, ...], names: dict[str, Buffer]) -> tuple[TapeEvent, ...]:
    """`tape` with other names; a single expression for speed, as all events pass here."""
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
