"""Lowers a model: what each module's forward and backward do, with modules that are alike traced once.

A transformer's blocks differ in their names only. Of a run of equal blocks the tape needs the first, one that has equal
neighbours on both sides, and the last; the others are that middle one under other names. Kernels are the same objects,
so that whatever is computed from them once is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zsim import module_lowering, tape
from zsim.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.model import ModelSpec, Module
from zsim.ops import Alloc, Free
from zsim.repeats import repeats
from zsim.traced import TracedModel
from zsim.training import Batch, Computation, Device, LoweredModule, NodeOver, Recomputed, TapeEvent

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
) -> tuple[LoweredModule, ...]:
    """Every module of `model` with the kernels and memory events of one micro-batch's forward and backward.

    Equal to `module_lowering.lower_each`, which traces every module by itself. A TracedModel brings its own.
    """
    if isinstance(model, TracedModel):
        asked = checkpointing != NO_CHECKPOINTING
        return model.modules_for(batch, dtype=dtype, casts_input=casts_input, checkpointed=asked)
    checkpointed = checkpointing.applies_to(model)
    if repeats(model):
        return module_lowering.lower_each(
            model,
            batch=batch,
            dtype=dtype,
            casts_input=casts_input,
            device=device,
            checkpointing=checkpointing,
            checkpointed=checkpointed,
        )
    runs = list(_runs(model.modules, checkpointed, frozen=model.frozen))
    kept = tuple(module for run in runs for module in (run if len(run) < 4 else (*run[:2], run[-1])))
    few = replace(model, modules=kept)
    each = module_lowering.lower_each(
        few,
        batch=batch,
        dtype=dtype,
        casts_input=casts_input,
        device=device,
        checkpointing=checkpointing,
        checkpointed=checkpointed,
        autocast=autocast,
    )
    traced = iter(each)
    lowered: list[LoweredModule] = []
    for run in runs:
        if len(run) < 4:
            lowered += [next(traced) for _ in run]
            continue
        first, middle, last = next(traced), next(traced), next(traced)
        places = range(2, len(run) - 1)
        lowered += [first, middle, *(_renamed(middle, run, place=place) for place in places)]
        lowered.append(_renamed(last, run, place=len(run) - 1))
    return tuple(lowered)


def loss_buffers(model: ModelSpec) -> tuple[str, str]:
    """The buffers of the loss and of its gradient, which the caller of backward holds until it returns."""
    last = model.modules[-1]
    return tape.SEED, tape.summed(f"{last.fqn}:{last.operators[-1].output}", model.forwards)


def _runs(
    modules: tuple[Module, ...], checkpointed: frozenset[str], *, frozen: frozenset[str]
) -> Iterator[tuple[Module, ...]]:
    """`modules` in runs of neighbours that differ in their names only, and are checkpointed or are not."""
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


def _pattern(module: Module) -> Pattern:
    """What a module does, without its name: its operators with parameters named from the module on."""
    prefix = f"{module.fqn}."
    return tuple(
        (
            op.kind,
            op.inputs,
            op.output,
            op.weight.removeprefix(prefix),
            op.bias.removeprefix(prefix),
            op.in_features,
            op.out_features,
            op.num_embeddings,
            op.num_heads,
            op.num_kv_heads,
            op.head_dim,
            op.implementation,
            op.causal,
            op.dtype,
        )
        for op in module.operators
    )


def _renamed(traced: LoweredModule, run: tuple[Module, ...], *, place: int) -> LoweredModule:
    """`traced`, the second or last of `run`, as run[place]: its own values, its input and its parameters."""
    names = {f"{traced.fqn}:": f"{run[place].fqn}:"}
    names |= {f"{run[0 if traced.fqn == run[1].fqn else 1].fqn}:": f"{run[place - 1].fqn}:"}
    prefix, other = f"{traced.fqn}.", f"{run[place].fqn}."

    def name(buffer: str) -> str:
        module, colon, value = buffer.partition(":")
        return names.get(module + colon, module + colon) + value

    def event(given: TapeEvent) -> TapeEvent:
        if isinstance(given, Alloc):
            return Alloc(name(given.buffer), given.kind, given.nbytes)
        if isinstance(given, Free):
            return Free(name(given.buffer))
        if isinstance(given, Recomputed | NodeOver):
            return given
        return replace(given, fqn=other + given.fqn[len(prefix) :]) if given.fqn.startswith(prefix) else given

    def computation(given: Computation) -> Computation:
        return Computation(kernels=given.kernels, memory=tuple(map(event, given.memory)))

    return LoweredModule(
        fqn=run[place].fqn,
        unit=run[place].unit,
        forward=computation(traced.forward),
        backward=computation(traced.backward),
        input_needs_gradient=traced.input_needs_gradient,
        recompute=traced.recompute,
        uncached=tuple(Free(name(given.buffer)) for given in traced.uncached),
        differentiates=traced.differentiates,
    )
