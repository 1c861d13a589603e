"""A model by the modules that own parameters, each of which is called by itself.

Runtimes that hook ordinary modules, such as DeepSpeed, see every linear, norm and embedding. Here
each is a unit: the root's stand apart, a block's are nested in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from zsim.models.operators import ONE_NODE, Operator
from zsim.models.spec import ROOT, ModelSpec, Module, ParamGroup
from zsim.models.wrapping import TRACED, joined, parts_of_root, split_block

TRANSFORMERS = "transformers"
"""The family of models whose modules are those of transformers."""


def by_module(model: ModelSpec) -> ModelSpec:
    """`model` with a unit for each operator that owns parameters; a traced one as it is.

    A tied weight belongs to the first module that reads it. Others read it too, and are modules
    without a unit.
    """
    if model.family in (TRACED, TRANSFORMERS):
        return model
    modules = tuple(part for module in joined(model.modules) for part in _called(module))
    owned = [(m.path, [fqn for op in m.operators for fqn in (op.weight, op.bias)]) for m in modules]
    return replace(model, modules=modules, units=_units(model, owned))


def by_block(model: ModelSpec) -> ModelSpec:
    """A model `by_module` with a unit for each block again, and one for the rest."""
    if model.family in (TRACED, TRANSFORMERS):
        return model
    whole = [_linears(module, implementation="") for module in joined(model.modules)]
    stretches = groupby(whole, key=lambda m: m.apart or m.unit == ROOT)
    modules: list[Module] = []
    for is_roots, members in stretches:
        modules += [_roots(tuple(members), is_first=not modules)] if is_roots else members
    blocks = [(m.path, model.parameters_of(m.path)) for m in modules if m.unit != ROOT]
    return replace(model, modules=tuple(modules), units=_units(model, blocks))


def _units(model: ModelSpec, owned: Iterable[tuple[str, Iterable[str]]]) -> tuple[ParamGroup, ...]:
    """Units of the parameters that each module has `owned`, in front of which the root has others.
    """
    rest = {parameter.fqn: parameter for parameter in model.parameters}
    units = [
        ParamGroup(fqn=fqn, parameters=tuple(rest.pop(name) for name in names if name in rest))
        for fqn, names in owned
    ]
    root = ParamGroup(fqn=ROOT, parameters=tuple(rest.values()))
    return tuple(unit for unit in (root, *units) if unit.parameters)


def _roots(parts: tuple[Module, ...], *, is_first: bool) -> Module:
    """The root's module that was cut into `parts`, each of which reads what the one before makes.
    """
    operators: list[Operator] = []
    for part in parts:
        for op in part.operators:
            before = operators[-1].output if operators else "x"
            inputs = tuple(before if value == "x" else value for value in op.inputs)
            operators.append(replace(op, inputs=inputs))
    return Module(fqn="embed" if is_first else "head", unit=ROOT, operators=tuple(operators))


def _called(module: Module) -> Iterator[Module]:
    """A block in parts, or the root's own operators one by one."""
    module = _linears(module, implementation=ONE_NODE)
    if module.apart:
        yield module
    elif module.unit == ROOT:
        yield from parts_of_root(module)
    else:
        owners = [op.name.removeprefix(f"{module.path}.") for op in module.operators if op.weight]
        yield from split_block(module, tuple(owners))


def _linears(module: Module, *, implementation: str) -> Module:
    """`module` with another implementation of its linears."""
    operators = [
        replace(op, implementation=implementation) if op.kind == "linear" else op
        for op in module.operators
    ]
    return replace(module, operators=tuple(operators))
