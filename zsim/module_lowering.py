"""Every module of a model by itself: the calls of its operators, what they keep and free, and the kernels they are.

The calls are `zsim.eager`'s, the memory `zsim.tape`'s; here a model's modules are run through both, forward and backward.
`zsim.lowering` asks for few of them where many are alike.
"""

from __future__ import annotations

from zsim.aten_call import Call
from zsim.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.eager import calls
from zsim.model import ModelSpec, Module
from zsim.needed import needed
from zsim.ops import Kernel
from zsim.regions import Region, Step, packs_something
from zsim.tape import SEED, Tape
from zsim.training import Batch, Computation, Device, LoweredModule, Recomputed, TapeEvent


def _qualified(call: Call, module: Module, entry: str) -> Call:
    """`call` with module-local value names made unique in the model; the module's input is called `entry`."""
    prefix, parameters = f"{module.fqn}:", call.parameters

    def names(values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple([v if v in parameters else entry if v == "x" else prefix + v for v in values])

    return Call(
        operator=call.operator,
        inputs=names(call.inputs),
        output=prefix + call.output,
        nbytes=call.nbytes,
        saves=names(call.saves),
        keeps=tuple([(prefix + value, nbytes) for value, nbytes in call.keeps]),
        scratch=call.scratch,
        backward_scratch=call.backward_scratch,
        gradients=names(call.gradients),
        passes=names(call.passes),
        view=call.view,
        also=names(call.also),
        turns=names(call.turns),
        summed=tuple([(name if name in parameters else prefix + name, way) for name, way in call.summed]),
        drops=names(call.drops),
        parameters=parameters,
        flops=call.flops,
        backward_flops=call.backward_flops,
        moved=call.moved,
        backward_moved=call.backward_moved,
        crossed=call.crossed,
        joint=call.joint,
    )


def _forward_kernels(module_calls: list[Call], *, dtype: str) -> tuple[Kernel, ...]:
    return tuple(Kernel(call.operator, call.flops, call.moved, dtype) for call in module_calls if call.moved)


def _backward_kernels(module_calls: list[Call], *, dtype: str, needs_gradient: set[str]) -> tuple[Kernel, ...]:
    """In reverse order. A call whose inputs need no gradient makes only its parameters' gradients: half of the products."""
    return tuple(
        Kernel(
            call.operator,
            call.backward_flops if needs_gradient.intersection(call.inputs) else call.backward_flops // 2,
            call.backward_moved,
            dtype,
        )
        for call in reversed(module_calls)
        if call.moved and call.differentiable
    )


def lower_each(
    model: ModelSpec,
    *,
    batch: Batch,
    dtype: str,
    casts_input: bool = False,
    device: Device = "cpu",
    checkpointing: Checkpointing = NO_CHECKPOINTING,
    checkpointed: frozenset[str] = frozenset(),
) -> tuple[LoweredModule, ...]:
    """Every module of `model` with the kernels and memory events of one micro-batch's forward and backward.

    `casts_input`: a floating-point model input is cast to `dtype` first and the copy kept as long as autograd needs it.
    Modules in `checkpointed` recompute what `checkpointing` says. The loss is freed with the last event of the last backward,
    that of the first module that has one, as in `loss.backward(); del loss`.
    """
    tape = Tape(in_place=device == "cuda")
    tape.know_parameters(model, dtype=dtype)
    entry, frozen, needs = "x", model.frozen, set[str]()
    traced: list[tuple[Module, list[Step], tuple[TapeEvent, ...], bool]] = []
    for module in model.modules:
        steps = [
            Step([_qualified(call, module, entry) for call in calls(operator, batch=batch, dtype=dtype, device=device)])
            for operator in module.operators
        ]
        for step in steps if frozen else ():
            step.calls[:] = needed(step.calls, needs=needs, frozen=frozen)
        if module.fqn in checkpointed:
            _cut_regions(steps, module, checkpointing)
        module_calls = [call for step in steps for call in step.calls]
        if casts_input and not traced and any("x" in call.inputs for call in module_calls):
            tape.cast_input(model, batch=batch, dtype=dtype)
        needs_gradient = entry in tape.needs_gradient
        tape.run_forward(steps, entry=entry)
        if module is model.modules[-1] and "x" in tape.nbytes:
            tape.storages.release("x")
        traced.append((module, steps, tape.storages.take(), needs_gradient))
        entry = module_calls[-1].output
    tape.storages.allocate(SEED, tape.nbytes[entry], temporary=True)
    tape.storages.hold(SEED)
    tape.gradients[entry] = SEED
    lowered: list[LoweredModule] = []
    last = next(module for module, steps, _, _ in traced if _differentiates(steps, tape))
    for module, steps, forward_memory, needs_gradient in reversed(traced):
        tape.run_backward(steps)
        module_calls = [call for step in steps for call in step.calls]
        again = [call for region in dict.fromkeys(step.region for step in steps) if region for call in region.kernels]
        if module is last:
            tape.storages.release(SEED)
            tape.storages.release(entry)
        lowered.append(
            LoweredModule(
                fqn=module.fqn,
                unit=module.unit,
                forward=Computation(kernels=_forward_kernels(module_calls, dtype=dtype), memory=forward_memory),
                backward=Computation(
                    kernels=_backward_kernels(module_calls, dtype=dtype, needs_gradient=tape.needs_gradient),
                    memory=_last_mark_only(tape.storages.take()),
                ),
                input_needs_gradient=needs_gradient,
                recompute=_forward_kernels(again, dtype=dtype),
                differentiates=_differentiates(steps, tape),
            )
        )
    return tuple(reversed(lowered))


def _differentiates(steps: list[Step], tape: Tape) -> bool:
    """Whether anything that a module makes needs a gradient."""
    return any(call.output in tape.needs_gradient for step in steps for call in step.calls)


def _cut_regions(steps: list[Step], module: Module, checkpointing: Checkpointing) -> None:
    """Mark the stretches of `steps` that are recomputed."""
    by_operator = dict(zip(module.operators, steps, strict=True))
    for operators in checkpointing.regions(module.operators):
        for operator in operators:
            by_operator[operator].cached = checkpointing.keeps(operator)
        cut = [by_operator[operator] for operator in operators]
        if any(packs_something(call) for step in cut for call in step.calls):
            Region.of(cut)


def _last_mark_only(events: tuple[TapeEvent, ...]) -> tuple[TapeEvent, ...]:
    """Of several marks the last one stands for all."""
    marks = [place for place, event in enumerate(events) if isinstance(event, Recomputed)]
    return tuple(event for place, event in enumerate(events) if place not in marks[:-1]) if marks else events
