"""Views of flat parameters: under FSDP1 autograd differentiates them, new ones for every unshard in
forward.

The gradients of a unit's runs meet in the flat parameter. One trained parameter makes all views of
its flat one need a gradient. Views are no leaves, so that autocast does not cache their casts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zsim.autograd.traced.model import TracedModel
from zsim.models.operators import Operator
from zsim.models.repeats import most_runs
from zsim.models.spec import ROOT, ModelSpec, Module, Parameter, numbered, run_of


def view(fqn: str, run: int) -> str:
    """Name of the view of the parameter `fqn` that the `run`-th unshard of its unit makes, from 1.
    """
    return numbered(fqn, run)


def viewed(model: ModelSpec) -> ModelSpec:
    """`model` with views for parameters, but a traced one, whose units run once."""
    runs = most_runs(model)
    if isinstance(model, TracedModel) or (runs == 1 and not model.frozen):
        return model
    owner = {parameter.fqn: unit.fqn for unit in model.units for parameter in unit.parameters}
    units = [
        replace(
            unit,
            parameters=tuple(
                _views(unit.parameters, runs=runs if unit.fqn != ROOT else model.forwards)
            ),
        )
        for unit in model.units
    ]
    size = len(model.modules) // model.forwards
    modules = [
        _reading_views(module, owner, forward=index // size + 1)
        for index, module in enumerate(model.modules)
    ]
    return replace(model, modules=tuple(modules), units=tuple(units))


def _views(parameters: tuple[Parameter, ...], *, runs: int) -> Iterator[Parameter]:
    trained = any(parameter.requires_grad for parameter in parameters)
    for run in range(1, runs + 1):
        for parameter in parameters:
            yield replace(parameter, fqn=view(parameter.fqn, run), requires_grad=trained)


def _reading_views(module: Module, owner: dict[str, str], *, forward: int) -> Module:
    """`module`, whose operators read the views of this run: of the root's parameters there are new
    ones in each forward."""
    own = int(run_of(module.fqn) or 1)

    def named(fqn: str) -> str:
        return view(fqn, forward if owner[fqn] == ROOT else own) if fqn else ""

    operators: list[Operator] = [
        replace(op, weight=named(op.weight), bias=named(op.bias)) for op in module.operators
    ]
    return replace(module, operators=tuple(operators))
