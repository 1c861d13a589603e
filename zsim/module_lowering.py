"""Every module of a model by itself: the calls of its operators, what they keep and free, and the kernels they are.

The calls are `zsim.eager`'s, the memory `zsim.tape`'s; here a model's modules are run through both, forward and backward.
`zsim.lowering` asks for few of them where many are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile

from zsim.aten_call import Call
from zsim.autocast import Autocast
from zsim.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.eager import calls
from zsim.model import RUN, ModelSpec, Module
from zsim.module_kernels import backward_kernels, forward_kernels
from zsim.needed import needed
from zsim.operators import Operator
from zsim.ops import MemoryEvent
from zsim.regions import Region, Step, packs_something
from zsim.tape import MODEL_INPUT, SEED, Tape, summed
from zsim.training import Batch, Computation, Device, LoweredModule, Recomputed, TapeEvent


def _qualified(operator: Operator, module: Module, entry: str) -> Operator:
    """`operator` with module-local value names made unique in the model; the module's input is called `entry`."""
    prefix = f"{module.whole}:"
    inputs = tuple([entry if value == "x" else prefix + value for value in operator.inputs])
    return replace(operator, inputs=inputs, output=prefix + operator.output, drops=_drops(operator, module, entry))


def _drops(operator: Operator, module: Module, entry: str) -> tuple[str, ...]:
    """What `operator` drops, by names unique in the model."""
    prefix = f"{module.whole}:"
    return tuple([entry if value == "x" else value if ":" in value else prefix + value for value in operator.drops])


def _maker_of_calls(
    autocast: str, *, batch: Batch, dtype: str, device: Device, uncached: frozenset[str]
) -> Callable[[Operator, dict[str, str]], tuple[Call, ...]]:
    """What makes an operator's calls, and under autocast reads and notes the dtypes of the module's values."""
    if autocast != "none":
        return Autocast(dtype=autocast, batch=batch, device=device, uncached=uncached).calls
    return lambda operator, _: calls(operator, batch=batch, dtype=dtype, device=device)


def lower_each(
    model: ModelSpec,
    *,
    batch: Batch,
    dtype: str,
    casts_input: bool = False,
    device: Device = "cpu",
    checkpointing: Checkpointing = NO_CHECKPOINTING,
    checkpointed: frozenset[str] = frozenset(),
    autocast: str = "none",
    leaves: bool = True,
) -> tuple[LoweredModule, ...]:
    """Every module of `model` with the kernels and memory events of one micro-batch's forward and backward.

    `casts_input`: a floating-point model input is cast to `dtype` first and the copy kept as long as autograd needs it.
    Modules in `checkpointed` recompute what `checkpointing` says. `autocast` is the dtype of torch.autocast around forward, and
    caches casts of parameters that are `leaves`. The loss
    is freed with the last event of the last backward, that of the first module that has one, as in `loss.backward(); del loss`.
    """
    tape = Tape(in_place=device == "cuda")
    tape.know_parameters(model, dtype=dtype, casts_once=autocast != "none" and leaves)
    entry, source, losses = "", "", list[str]()
    sums: dict[str, tuple[MemoryEvent, ...]] = {}
    frozen, needs = model.frozen, set[str]()
    traced: list[tuple[Module, list[Step], tuple[TapeEvent, ...], bool]] = []
    uncached = frozen if leaves else frozenset([parameter.fqn for parameter in model.parameters])
    make = _maker_of_calls(autocast, batch=batch, dtype=dtype, device=device, uncached=uncached)
    dtypes: dict[str, str] = {}
    called, takes, differentiates = "", dict[str, str](), dict[str, bool]()
    framed = frozenset([drop for module in model.modules for op in module.operators for drop in op.drops if ":" in drop])
    forward_size = len(model.modules) // model.forwards
    for place, module in enumerate(model.modules):
        if place % forward_size == 0:
            source = entry = f"{MODEL_INPUT}{RUN}{len(losses) + 1}" if losses else MODEL_INPUT
            dtypes = {entry: dtype}
        if module.within in ("", module.path):
            called = entry
        steps = [Step(list(make(_qualified(operator, module, called), dtypes))) for operator in module.operators]
        taken, later = _taken(module, called), _read_later(model.modules[place + 1 :], module, called)
        for step in steps if frozen else ():
            step.calls[:] = needed(step.calls, needs=needs, frozen=frozen)
        if (module.within or module.path) in checkpointed:
            _cut_regions(steps, module, checkpointing)
        module_calls = [call for step in steps for call in step.calls]
        tape.framed = framed.union(drop for op in module.operators if op.drops for drop in _drops(op, module, entry))
        if casts_input and place % forward_size == 0 and "tokens" not in model.first_operator.inputs:
            tape.cast_input(model, entry, batch=batch, dtype=dtype)
        needs_gradient = taken in tape.needs_gradient
        passes_on = not steps and entry in tape.needs_gradient
        tape.run_forward(steps, entry=taken, later=later)
        if (place + 1) % forward_size == 0:
            tape.end_forward(source)
        traced.append((module, steps, tape.storages.take(), needs_gradient))
        takes[module.fqn] = taken if module.within else ""
        differentiates[module.fqn] = passes_on or _differentiates(steps, tape)
        entry = module_calls[-1].output if steps else entry
        if (place + 1) % forward_size == 0:
            losses.append(entry)
            sums[module.fqn] = tape.sum_losses(losses)
    let_go = {module.fqn: tape.let_go(steps) for module, steps, _, _ in traced}
    tape.seed(losses)
    lowered = []
    last = next(module for module, *_ in traced if differentiates[module.fqn])
    for module, steps, forward_memory, needs_gradient in reversed(traced):
        tape.run_backward(steps)
        module_calls = [call for step in steps for call in step.calls]
        again = [call for region in dict.fromkeys(step.region for step in steps) if region for call in region.kernels]
        if module is last:
            tape.storages.release(SEED)
            tape.storages.release(summed(losses[-1], len(losses)))
        lowered.append(
            LoweredModule(
                fqn=module.fqn,
                unit=module.unit,
                forward=Computation(kernels=forward_kernels(module_calls, dtype=dtype), memory=forward_memory),
                backward=Computation(
                    kernels=backward_kernels(
                        module_calls, dtype=dtype, needs_gradient=tape.needs_gradient, nbytes=tape.nbytes
                    ),
                    memory=_last_mark_only(tape.storages.take()),
                ),
                input_needs_gradient=needs_gradient,
                recompute=forward_kernels(again, dtype=dtype),
                differentiates=differentiates[module.fqn],
                takes=takes[module.fqn],
                sums_losses=sums.get(module.fqn, ()),
                uncached=let_go[module.fqn],
            )
        )
    return tuple(reversed(lowered))


def _taken(module: Module, called: str) -> str:
    """The value that `module` is called with: what its block is `called` with, or what a unit in a block reads from outside."""
    if not module.inside:
        return called
    made = {operator.output for operator in module.operators}
    (read,) = {value for operator in module.operators for value in operator.inputs} - made
    return called if read == "x" else f"{module.whole}:{read}"


def _read_later(modules: tuple[Module, ...], module: Module, called: str) -> frozenset[str]:
    """The values of the block, of which `module` is a part, that its later parts read, and what the block is `called` with."""
    if not module.within:
        return frozenset()
    parts = list(takewhile(lambda part: part.whole == module.whole, modules))
    read = {value for part in parts for operator in part.operators for value in operator.inputs}
    return frozenset([f"{module.whole}:{value}" for value in read] + [called] * bool(parts))


def _differentiates(steps: list[Step], tape: Tape) -> bool:
    """Whether anything that a module makes needs a gradient."""
    return any(call.output in tape.needs_gradient for step in steps for call in step.calls)


def _cut_regions(steps: list[Step], module: Module, checkpointing: Checkpointing) -> None:
    """Mark the stretches of `steps` that are recomputed; where nothing is saved for backward, nothing is."""
    by_operator = dict(zip(module.operators, steps, strict=True))
    for operators in checkpointing.regions(module.operators):
        kept = checkpointing.kept(operators)
        for operator in operators:
            by_operator[operator].cached = operator in kept
        stretch = [by_operator[operator] for operator in operators]
        if any(packs_something(call) for step in stretch for call in step.calls):
            reads = tuple(value for operator in operators for value in operator.reads)
            Region.of(stretch, reads=reads, stops_early=checkpointing.early_stop)


def _last_mark_only(events: tuple[TapeEvent, ...]) -> tuple[TapeEvent, ...]:
    """Of several marks the last one stands for all."""
    marks = [place for place, event in enumerate(events) if isinstance(event, Recomputed)]
    return tuple(event for place, event in enumerate(events) if place not in marks[:-1]) if marks else events
