"""The modules of a model in the order in which they run, with the calls of their operators.

The calls are `zsim.autograd.aten.operator_calls`'s. Names of values are unique in the whole model
here, so that one tape can follow them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby, takewhile
from typing import NamedTuple

from zsim.autograd.aten.call import Call
from zsim.autograd.aten.operator_calls import calls
from zsim.autograd.checkpoint_regions import OperatorCalls, Region, packs_something
from zsim.autograd.requires_grad import needed
from zsim.ir.buffers import buffer_of, owner_of, start_of
from zsim.models.checkpointing import Checkpointing
from zsim.models.operators import Operator
from zsim.models.spec import MODEL_INPUT, ModelSpec, Module, numbered
from zsim.models.training_options import Batch, Device

Maker = Callable[[Operator, dict[str, str]], tuple[Call, ...]]
"""Makes an operator's calls, given the dtypes of the model's values, which it may read and note."""


class ModulePart(NamedTuple):
    """A module, or a part of one, with the calls of its operators and the names of values.

    - `entry`: the output of the part before it.
    - `called`: the input of its block.
    - `taken`: its own input.
    - `later`: the values of its block that other parts read after it.
    - `makes`: its last value, or `entry` where it does nothing.
    """

    module: Module
    steps: list[OperatorCalls]
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
        """The values that only its operators free."""
        return [
            drop
            for op in self.module.operators
            if op.drops
            for drop in _drops(op, self.module, self.entry)
        ]


def maker_of_calls(
    autocast: str, *, batch: Batch, dtype: str, device: Device, uncached: frozenset[str]
) -> Maker:
    """A function that makes an operator's calls; under autocast it follows the values' dtypes."""
    if autocast != "none":
        from zsim.autograd.aten.autocast import Autocast  # start-up: few models run under it

        return Autocast(dtype=autocast, batch=batch, device=device, uncached=uncached).calls
    return lambda operator, _: calls(operator, batch=batch, dtype=dtype, device=device)


def parts_of(model: ModelSpec, make: Maker, *, dtype: str) -> Iterator[ModulePart]:
    """The modules of all forwards, each with the calls that it makes."""
    frozen, needs = model.frozen, set[str]()
    forward_size = len(model.modules) // model.forwards
    dtypes: dict[str, str] = {}
    entry = called = ""
    for index, module in enumerate(model.modules):
        if index % forward_size == 0:
            number = index // forward_size + 1
            entry = numbered(MODEL_INPUT, number)
            dtypes = {entry: dtype}
        if module.within in ("", module.path):
            called = entry
        steps = [
            OperatorCalls(list(make(_qualified(operator, module, called), dtypes)))
            for operator in module.operators
        ]
        for step in steps if frozen else ():
            step.calls[:] = needed(step.calls, needs=needs, frozen=frozen)
        later = _read_later(model.modules[index + 1 :], module, called)
        part = ModulePart(
            module=module, steps=steps, entry=entry, called=called, taken=_taken(module, called),
            later=later,
        )
        yield part
        entry = part.makes


def blocks(parts: Iterable[ModulePart]) -> Iterator[tuple[ModulePart, ...]]:
    """The parts of each run of each module."""
    for _, block in groupby(parts, key=lambda part: part.module.whole):
        yield tuple(block)


def _taken(module: Module, called: str) -> str:
    """The value that `module` is called with: what its block is `called` with, or what a unit in a
    block reads from outside."""
    if not module.inside:
        return called
    (read,) = module.free_inputs
    return called if read == "x" else buffer_of(module.whole, read)


def _read_later(modules: tuple[Module, ...], module: Module, called: str) -> frozenset[str]:
    """The values of the block, of which `module` is a part, that its later parts read, and what the
    block is `called` with."""
    if not module.within:
        return frozenset()
    parts = list(takewhile(lambda part: part.whole == module.whole, modules))
    read = {value for part in parts for operator in part.operators for value in operator.inputs}
    start = start_of(module.whole)
    return frozenset([start + value for value in read] + [called] * bool(parts))


def cut_regions(
    block: tuple[ModulePart, ...], checkpointing: Checkpointing, *, packs: bool = False
) -> None:
    """Mark the regions of a block's steps that are recomputed; where nothing is saved for
    backward, nothing is. A hook `packs` their inputs."""
    by_operator = {
        operator: step
        for part in block
        for operator, step in zip(part.module.operators, part.steps, strict=True)
    }
    for operators in checkpointing.regions(tuple(by_operator)):
        kept = checkpointing.kept(operators)
        for operator in operators:
            # a policy knows attention's kernels, and none of the calls of the composite
            step = by_operator[operator]
            step.cached = operator in kept and any(
                call.operator == operator.kind for call in step.calls
            )
        region = [by_operator[operator] for operator in operators]
        if any(packs_something(call) for step in region for call in step.calls):
            reads = tuple(value for operator in operators for value in operator.reads)
            _tell_units(block, region)
            Region.of(region, reads=reads, stops_early=checkpointing.early_stop, packs=packs)


def _tell_units(block: tuple[ModulePart, ...], region: list[OperatorCalls]) -> None:
    """Tell each step of a `region` that goes beyond a unit in the `block` in which unit it is."""
    for part in block:
        if part.module.inside and len(region) > len(part.steps):
            for step in part.steps:
                step.inside, step.entry = part.module.unit, part.taken


def _qualified(operator: Operator, module: Module, entry: str) -> Operator:
    """`operator` with module-local value names made unique in the model; the module's input is
    called `entry`."""
    prefix = start_of(module.whole)
    inputs = tuple([entry if value == "x" else prefix + value for value in operator.inputs])
    return replace(
        operator, inputs=inputs, output=prefix + operator.output,
        drops=_drops(operator, module, entry),
    )


def _drops(operator: Operator, module: Module, entry: str) -> tuple[str, ...]:
    """The values that `operator` drops, by names unique in the model."""
    prefix = start_of(module.whole)
    return tuple(
        [
            entry if value == "x" else value if owner_of(value) else prefix + value
            for value in operator.drops
        ]
    )
