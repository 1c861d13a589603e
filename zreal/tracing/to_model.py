"""Modules from the log of a traced step: each unit, and the root's stretches between them, with
buffers by name.

Names and kinds are those that `zsim.autograd.tape` gives to the built-in families, so that
strategies cannot tell them apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from zreal.tracing.errors import refuse
from zreal.tracing.gradients.gradient_storages import accumulated_once, gradient_storages
from zreal.tracing.gradients.parameter_gradients import ParameterGradients
from zreal.tracing.kernels import loss_named
from zreal.tracing.storage_log import Born, CalledAgain, Died, Entry, Place, RecomputedKernel
from zreal.tracing.units.gathered import require_gathered
from zreal.tracing.units.stretches import Stretch, stretches_of
from zreal.tracing.watched_step import WatchedStep
from zsim.autograd.lowered import (
    Accumulated,
    Computation,
    InnerCall,
    LoweredModule,
    ParameterGradient,
    Recomputed,
    TapeEvent,
)
from zsim.autograd.tape import SEED
from zsim.autograd.traced.model import FAMILY, LOSS, TracedModel, check, placed, stretch, whole
from zsim.ir.buffers import Buffer, buffer_of, numbered, traced_of
from zsim.ir.ops import Alloc, Free, Kernel, MemoryKind
from zsim.models.spec import MODEL_INPUT, ROOT, Module, ParamGroup
from zsim.models.training_options import Batch, Device, Dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A traced step: the param groups, the stretches in the order of forward, and the bytes that no
    strategy counts."""

    name: str
    groups: tuple[ParamGroup, ...]
    dtype: Dtype
    batch: Batch
    casts_input: bool
    autocast: Dtype | Literal["none"]
    buffer_nbytes: int
    input_nbytes: int
    devices: tuple[Device, ...]
    registered: tuple[str, ...]
    """The parameters as the module registers them."""
    buffers: tuple[tuple[str, int], ...]
    """The dtype and bytes of each of its buffers."""


def traced_model(step: TracedStep, run: WatchedStep) -> TracedModel:
    """The model of one traced step; UntraceableError or TracedModelError where it does not hold
    together."""
    idle = _idle(step, run)
    step = replace(step, groups=_in_loss(step, run.gradients, idle))
    parts = _seen(step, run)
    return check(
        TracedModel(
            name=step.name, family=FAMILY,
            modules=placed(
                [_module(s, last=s is parts.stretches[-1]) for s in parts.stretches],
                units=step.groups,
            ),
            units=step.groups, idle=idle, lowered=parts.lowered, dtype=step.dtype,
            batch=step.batch, casts_input=step.casts_input, autocast=step.autocast,
            buffer_nbytes=step.buffer_nbytes, input_nbytes=step.input_nbytes,
            registered=step.registered, buffers=step.buffers, devices=step.devices,
        )
    )


def traced_otherwise(
    step: TracedStep, run: WatchedStep, *, like: TracedModel
) -> tuple[LoweredModule, ...]:
    """The lowered modules of a step of the same module in which autograd has something else of its
    units, for the modules of `like`."""
    names = [module.fqn for module in like.modules]
    parts = _seen(step, run, names=frozenset(names))
    if [module.fqn for module in parts.lowered] != names:
        raise refuse(
            step.name, "the same parts whatever autograd has of units", "others",
            "trace it without units",
        )
    for fqn in sorted(like.trained - run.gradients.kept.keys()):
        raise refuse(
            fqn, "the gradient that it has under fully_shard",
            "none: the loss does not depend on it",
            "drop the parameter, freeze it, or use it in forward",
        )
    return parts.lowered


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelParts:
    """The parts of one step that a model takes."""

    stretches: list[Stretch]
    marks: Mapping[int, tuple[str, ...]]
    lowered: tuple[LoweredModule, ...]


def _trained(step: TracedStep, idle: tuple[str, ...]) -> dict[str, int]:
    """The elements of each parameter of the units that run that is not frozen."""
    return {
        p.fqn: p.numel
        for group in step.groups
        if group.fqn not in idle
        for p in group.parameters
        if p.requires_grad
    }


def _in_loss(
    step: TracedStep, gradients: ParameterGradients, idle: tuple[str, ...]
) -> tuple[ParamGroup, ...]:
    """The groups, with a mark on each parameter of a running unit that needs a gradient and got
    none."""
    kept = gradients.kept
    used = [group for group in step.groups if group.fqn not in idle]
    marked = {
        g.fqn: tuple(replace(p, in_loss=p.fqn in kept or not p.requires_grad) for p in g.parameters)
        for g in used
    }
    return tuple(
        replace(group, parameters=marked.get(group.fqn, group.parameters)) for group in step.groups
    )


def _idle(step: TracedStep, run: WatchedStep) -> tuple[str, ...]:
    """The units that do not run."""
    visited = {visit.unit for visit in run.boundaries.visits}
    return tuple(group.fqn for group in step.groups if group.fqn not in (ROOT, *visited))


def _seen(
    step: TracedStep, run: WatchedStep, *, names: frozenset[str] = frozenset()
) -> _ModelParts:
    visits, lives, gradients, loss = run.boundaries.visits, run.lives, run.gradients, run.loss
    require_gathered(run.reads, visits, step.groups)
    trained = _trained(step, _idle(step, run))
    marks = gradient_storages(trained, lives, gradients, dtype=step.dtype)
    stretches = stretches_of(visits, accumulated_once(lives, marks), run.reads, names=names)
    buffers = _Names(
        marks=marks, copied=gradients.copied,
        own=dict(
            zip(map(lives.final, loss), (SEED, buffer_of(stretches[-1].fqn, LOSS)), strict=True)
        ),
        inputs={
            storage: numbered(MODEL_INPUT, i) if i else Buffer(MODEL_INPUT)
            for i, storage in enumerate(run.cast_inputs)
        },
    )
    forward = [_computation(s.fqn, s.forward, buffers) for s in stretches]
    after = [entry for at, entry in lives.entries if at == Place(False, len(visits))]
    freed = tuple(e for e in _computation("", after, buffers).memory if isinstance(e, Free))
    backward = _backward(stretches, buffers, loss=lives.final(loss[0]))
    return _ModelParts(
        stretches=stretches,
        marks=marks,
        lowered=whole(
            LoweredModule(
                fqn=s.fqn, unit=s.unit, forward=f, backward=b,
                input_needs_gradient=s.needs_gradient,
                recompute=tuple(
                    entry.kernel for entry in s.backward if isinstance(entry, RecomputedKernel)
                ),
                caller_frees=tuple(buffers.freed[n] for n in s.caller_frees if n in buffers.freed),
                returns_inner_output=s.returns_inner_output,
                after_root=s.after_root,
                freed_with_autocast_cache=(
                    freed if s is stretches[-1] and step.autocast != "none" else ()
                ),
            )
            for s, f, b in zip(stretches, forward, backward, strict=True)
        ),
    )


def _backward(stretches: list[Stretch], buffers: _Names, *, loss: int) -> list[Computation]:
    """The backward of each stretch; that of the first trained one ends as `loss.backward()` does.

    First the gradient of the loss goes, whose storage is `loss`. Then go leaves in the graph and
    tensors on the ctx of a Function, and at last the loss.
    """
    buffers.backward = True
    first = stretches[next((i for i, s in enumerate(stretches) if s.backward), 0)]
    end = first.backward.index(Died(loss)) if Died(loss) in first.backward else None
    with_graph = first.backward[end:] if end is not None else []
    first.backward = first.backward[:end]
    backward = [_computation(s.fqn, s.backward, buffers) for s in reversed(stretches)][::-1]
    seed, dropped_loss = (Free(name) for name in buffers.own.values())
    index = stretches.index(first)
    held = _computation("", with_graph, buffers).memory
    backward[index] = replace(
        backward[index], memory=(*backward[index].memory, seed, *held, dropped_loss)
    )
    return backward


@dataclass(slots=True, kw_only=True)
class _Names:
    """Buffers by storage. `marks` are storages that are gradients of parameters, some `copied`;
    `own` have a name of their own."""

    marks: Mapping[int, tuple[str, ...]]
    copied: set[str]
    own: Mapping[int, Buffer]
    inputs: Mapping[int, Buffer]
    backward: bool = False
    known: dict[int, Buffer] = field(default_factory=dict)
    freed: dict[int, Buffer] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


def _computation(fqn: str, entries: list[Entry], names: _Names) -> Computation:
    kernels: list[Kernel] = []
    memory: list[TapeEvent] = []
    again, recomputed = None, 0
    for entry in entries:
        if isinstance(entry, Kernel):
            kernels.append(entry)
        elif isinstance(entry, RecomputedKernel):
            again, recomputed = len(memory), recomputed + 1
        elif isinstance(entry, CalledAgain):
            memory.append(InnerCall(entry.unit, returns=entry.returns, kernels=recomputed))
            again = len(memory)
        elif isinstance(entry, Born):
            memory += _born(fqn, entry, names)
        elif isinstance(entry, Accumulated):
            memory.append(entry)
        elif isinstance(entry, Died) and entry.storage in names.known:
            names.freed[entry.storage] = names.known.pop(entry.storage)
            memory.append(Free(names.freed[entry.storage]))
    if again is not None:
        memory.insert(again, Recomputed())
    return Computation(kernels=loss_named(kernels), memory=tuple(memory))


def _born(fqn: str, born: Born, names: _Names) -> list[TapeEvent]:
    if born.storage in names.marks:
        return [
            ParameterGradient(fqn, accumulation_is_marked=True, is_copy=fqn in names.copied)
            for fqn in names.marks[born.storage]
        ]
    kind: MemoryKind = "temporaries" if names.backward else "activations"
    if born.storage in names.own:
        return [Alloc(names.own[born.storage], kind, born.nbytes)]
    names.counts[fqn] += 1
    name = names.inputs.get(born.storage, traced_of(fqn, names.counts[fqn], born.operator))
    names.known[born.storage] = name
    return [Alloc(name, kind, born.nbytes)]


def _module(of: Stretch, *, last: bool) -> Module:
    """Module of a stretch, with its reads as operators."""
    return stretch(of.fqn, unit=of.unit, weights=tuple((fqn, "") for fqn in of.reads), last=last)
