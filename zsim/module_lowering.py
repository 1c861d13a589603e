"""Every module of a model by itself: the calls of its operators, what they keep and free, and the kernels they are.

The calls are `zsim.eager`'s, the memory `zsim.tape`'s; here a model's modules are run through both, forward and backward.
`zsim.lowering` asks for few of them where many are alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, takewhile

from zsim.aten_call import Call
from zsim.autocast import Autocast
from zsim.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.eager import calls
from zsim.model import MODEL_INPUT, RUN, ModelSpec, Module
from zsim.module_kernels import backward_kernels, forward_kernels
from zsim.needed import needed
from zsim.operators import Operator
from zsim.ops import MemoryEvent
from zsim.regions import Region, Step, packs_something
from zsim.tape import SEED, Tape, summed
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
    source, losses = "", list[str]()
    sums: dict[str, tuple[MemoryEvent, ...]] = {}
    uncached = model.frozen if leaves else frozenset([parameter.fqn for parameter in model.parameters])
    make = _maker_of_calls(autocast, batch=batch, dtype=dtype, device=device, uncached=uncached)
    parts = list(_parts(model, make, dtype=dtype))
    over, drops = dict[str, list[Step]](), dict[str, frozenset[str]]()
    for block in _blocks(parts):
        drops[block[0].module.whole] = frozenset([drop for part in block for drop in part.drops])
        over[block[-1].module.fqn] = [step for part in block for step in part.steps]
        if block[0].block in checkpointed:
            _cut_regions(block, checkpointing)
    differentiates: dict[str, bool] = {}
    framed = frozenset([drop for module in model.modules for op in module.operators for drop in op.drops if ":" in drop])
    traced: list[tuple[_Part, tuple[TapeEvent, ...], bool]] = []
    forward_size = len(model.modules) // model.forwards
    for place, part in enumerate(parts):
        if place % forward_size == 0:
            source = part.called
            if casts_input and "tokens" not in model.first_operator.inputs:
                tape.cast_input(model, source, batch=batch, dtype=dtype)
        tape.framed = framed.union(drops[part.module.whole])
        needs_gradient = part.taken in tape.needs_gradient
        passes_on = not part.steps and part.entry in tape.needs_gradient
        tape.run_forward(part.steps, entry=part.taken, later=part.later, over=over.get(part.module.fqn, ()))
        if (place + 1) % forward_size == 0:
            tape.end_forward(source)
        traced.append((part, tape.storages.take(), needs_gradient))
        differentiates[part.module.fqn] = passes_on or _differentiates(part.steps, tape)
        if (place + 1) % forward_size == 0:
            losses.append(part.makes)
            sums[part.module.fqn] = tape.sum_losses(losses)
    let_go = {part.module.fqn: tape.let_go(part.steps) for part in parts}
    tape.seed(losses)
    lowered, added = [], Counter[str]()
    parameters = {parameter.fqn: parameter for parameter in model.parameters}
    last = next(part for part in parts if differentiates[part.module.fqn])
    for part, forward_memory, needs_gradient in reversed(traced):
        bound = part.taken if part.module.inside and needs_gradient else ""
        recomputed = tape.run_backward(part.steps, bound=bound)
        if part is last:
            tape.storages.release(SEED)
            tape.storages.release(summed(losses[-1], len(losses)))
        backward_memory = _last_mark_only(tape.storages.take())
        tape.gradients.pass_on()
        module, module_calls = part.module, [call for step in part.steps for call in step.calls]
        again = [call for region in reversed(recomputed) for call in region.kernels]
        lowered.append(
            LoweredModule(
                fqn=module.fqn,
                unit=module.unit,
                forward=Computation(kernels=forward_kernels(module_calls, dtype=dtype), memory=forward_memory),
                backward=Computation(
                    kernels=tuple(
                        backward_kernels(
                            module_calls,
                            dtype=dtype,
                            needs_gradient=tape.needs_gradient,
                            nbytes=tape.nbytes,
                            parameters=parameters,
                            made=added,
                        )
                    ),
                    memory=backward_memory,
                ),
                passes_on=tape.storages.take(),
                input_needs_gradient=needs_gradient,
                recompute=forward_kernels(again, dtype=dtype),
                differentiates=differentiates[module.fqn],
                takes=part.taken if module.within else "",
                sums_losses=sums.get(module.fqn, ()),
                uncached=let_go[module.fqn],
                hands_on=not part.steps,
            )
        )
    return tuple(reversed(lowered))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A module, or a part of one, with the calls of its operators and the names of values.

    `entry` is what ran before it has made, `called` what its block is called with, `taken` what it is itself; `later` are the values
    of its block that other parts read after it, and `makes` the last that it makes, or `entry` where it does nothing.
    """

    module: Module
    steps: list[Step]
    entry: str
    called: str
    taken: str
    later: frozenset[str]

    @property
    def block(self) -> str:
        """The fqn of the whole module, for any of its runs."""
        return self.module.within or self.module.path

    @property
    def makes(self) -> str:
        """The value that what runs next is given."""
        return self.steps[-1].calls[-1].output if self.steps else self.entry

    @property
    def drops(self) -> list[str]:
        """What its operators alone let go."""
        return [drop for op in self.module.operators if op.drops for drop in _drops(op, self.module, self.entry)]


def _parts(
    model: ModelSpec, make: Callable[[Operator, dict[str, str]], tuple[Call, ...]], *, dtype: str
) -> Iterator[_Part]:
    """The modules of all forwards, each with the calls that it makes."""
    frozen, needs = model.frozen, set[str]()
    forward_size = len(model.modules) // model.forwards
    dtypes: dict[str, str] = {}
    entry = called = ""
    for place, module in enumerate(model.modules):
        if place % forward_size == 0:
            number = place // forward_size + 1
            entry = f"{MODEL_INPUT}{RUN}{number}" if number > 1 else MODEL_INPUT
            dtypes = {entry: dtype}
        if module.within in ("", module.path):
            called = entry
        steps = [Step(list(make(_qualified(operator, module, called), dtypes))) for operator in module.operators]
        for step in steps if frozen else ():
            step.calls[:] = needed(step.calls, needs=needs, frozen=frozen)
        later = _read_later(model.modules[place + 1 :], module, called)
        part = _Part(module=module, steps=steps, entry=entry, called=called, taken=_taken(module, called), later=later)
        yield part
        entry = part.makes


def _blocks(parts: list[_Part]) -> Iterator[tuple[_Part, ...]]:
    """The parts of each run of each module."""
    for _, block in groupby(parts, key=lambda part: part.module.whole):
        yield tuple(block)


def _taken(module: Module, called: str) -> str:
    """The value that `module` is called with: what its block is `called` with, or what a unit in a block reads from outside."""
    if not module.inside:
        return called
    (read,) = module.given
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


def _cut_regions(block: tuple[_Part, ...], checkpointing: Checkpointing) -> None:
    """Mark the stretches of a block's steps that are recomputed; where nothing is saved for backward, nothing is."""
    by_operator = {operator: step for part in block for operator, step in zip(part.module.operators, part.steps, strict=True)}
    for operators in checkpointing.regions(tuple(by_operator)):
        kept = checkpointing.kept(operators)
        for operator in operators:
            step = by_operator[operator]  # a policy knows attention's kernels, and none of the calls of the composite
            step.cached = operator in kept and any(call.operator == operator.kind for call in step.calls)
        stretch = [by_operator[operator] for operator in operators]
        if any(packs_something(call) for step in stretch for call in step.calls):
            reads = tuple(value for operator in operators for value in operator.reads)
            _tell_units(block, stretch)
            Region.of(stretch, reads=reads, stops_early=checkpointing.early_stop)


def _tell_units(block: tuple[_Part, ...], stretch: list[Step]) -> None:
    """Tell each step of a `stretch` that goes beyond a unit in the `block` in which unit it is."""
    for part in block:
        if part.module.inside and len(stretch) > len(part.steps):
            for step in part.steps:
                step.inside, step.entry = part.module.unit, part.taken


def _last_mark_only(events: tuple[TapeEvent, ...]) -> tuple[TapeEvent, ...]:
    """Of several marks the last one stands for all."""
    marks = [place for place, event in enumerate(events) if isinstance(event, Recomputed)]
    return tuple(event for place, event in enumerate(events) if place not in marks[:-1]) if marks else events
