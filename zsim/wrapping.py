"""Wrapping policies: which modules are one param group (an FSDP unit), gathered and reduced as one.

A policy turns a model into the same model with other units, and the real model is wrapped by these units too. It knows no
strategy: ZeRO's flat buffers are made of units as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from zsim.model import ROOT, ModelSpec, Module, ParamGroup

TRACED = "traced"
"""The family of models that bring their own units."""
SHARED = "shared with a parameter already managed by another FSDP group"
"""What torch 2.13 says at the first forward of a model with a weight in two groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapping:
    """`every`: consecutive blocks in one group, or "all": the whole model is one group, the root's.

    `ends`: "root" leaves embedding, last norm and head to the root's group; "apart" makes the embedding one group and norm and
    head another, as torchtitan does; the loss stays with the root, which then owns nothing.
    """

    every: int | Literal["all"] = 1
    ends: Literal["root", "apart"] = "root"


def problems(asked: Wrapping, model: ModelSpec) -> Iterator[str]:
    """What cannot be, one line each, with the scenario's key in front."""
    if model.family == TRACED:
        if asked != Wrapping():
            yield "wrapping: a traced model keeps the units it was traced with; trace it again with others, and leave this out"
        return
    blocks = len(model.blocks)
    if asked.every == "all" and asked.ends == "apart":
        yield 'wrapping.ends: with every = "all" the whole model is one group, which leaves nothing apart; use "root", or a number'
    elif asked.every != "all" and asked.every > max(1, blocks):
        yield f'wrapping.every: expected 1 to {max(1, blocks)}, the model\'s blocks, or "all", found {asked.every}'
    in_a_row = any(module.path == following.path for module, following in pairwise(model.modules))
    if asked.every not in (1, "all") and in_a_row:
        yield (
            'wrapping.every: expected 1 where blocks run several times in a row: fully_shard takes a group of modules for done when '
            'each has run once; use model.uses.order = "stack"'
        )
    readers: dict[str, dict[str, None]] = {}
    for group in _groups(_modules(model, asked), asked):
        for fqn in _parameters(group):
            readers.setdefault(fqn, {})[_name(group)] = None
    for fqn, groups in readers.items():
        if len(groups) > 1:
            yield (
                f"wrapping.ends: expected every parameter in one group, found {fqn} in {' and '.join(groups)}; torch refuses it: "
                f'the parameter "is {SHARED}"; '
                'use ends = "root", which holds them together, or untie the weight'
            )


def wrapped(model: ModelSpec, asked: Wrapping) -> ModelSpec:
    """`model` with the units that `asked` makes; a traced one as it is. Every parameter is in one unit, in its order.

    `model` may have been wrapped before, with the same ends.
    """
    if model.family == TRACED:
        return model
    modules = _modules(model, asked)
    shapes = {parameter.fqn: parameter for parameter in model.parameters}
    order = {fqn: place for place, fqn in enumerate(shapes)}
    units = [
        ParamGroup(
            fqn=_name(group),
            parameters=tuple(shapes.pop(fqn) for fqn in sorted(_parameters(group), key=order.__getitem__)),
            modules=tuple(module.fqn for module in group) if len(group) > 1 else (),
        )
        for group in _groups(modules, asked)
    ]
    rest = [
        p for unit in sorted(model.units, key=lambda unit: unit.fqn == ROOT) for p in unit.parameters if p.fqn in shapes
    ]
    root = [ParamGroup(fqn=ROOT, parameters=tuple(rest))] if rest else []
    return replace(model, modules=modules, units=(*root, *units))


def _modules(model: ModelSpec, asked: Wrapping) -> tuple[Module, ...]:
    """The modules, with the root's own ones in parts where they are wrapped apart."""
    if asked.ends == "root":
        return model.modules
    return tuple(part for module in model.modules for part in ((module,) if module.unit != ROOT else _parts(module)))


def _parts(module: Module) -> Iterator[Module]:
    """One of the root's modules as one module per operator: those with parameters by themselves, the others still the root's."""
    before = ""
    for operator in module.operators:
        inputs = tuple("x" if value == before else value for value in operator.inputs)
        before, apart = operator.output, bool(operator.weight)
        yield Module(
            fqn=operator.name,
            unit=operator.name if apart else ROOT,
            operators=(replace(operator, inputs=inputs),),
            apart=apart,
        )


def _groups(modules: tuple[Module, ...], asked: Wrapping) -> Iterator[tuple[Module, ...]]:
    """The modules of each group but the root's, in forward order: neighbours of one kind, of blocks `every` at most."""
    run: list[Module] = []
    for module in modules:
        if module.fqn != module.path:  # a later run of a module that has its group
            continue
        full = asked.every != "all" and len(run) == asked.every
        if run and (module.unit == ROOT or module.apart != run[0].apart or (full and not module.apart)):
            yield tuple(run)
            run = []
        if module.unit != ROOT and (module.apart or asked.every != "all"):
            run.append(module)
    if run:
        yield tuple(run)


def _parameters(modules: tuple[Module, ...]) -> dict[str, None]:
    """The fqns of the parameters that `modules` read, in the order of first use."""
    return dict.fromkeys(
        fqn for module in modules for operator in module.operators for fqn in (operator.weight, operator.bias) if fqn
    )


def _name(modules: tuple[Module, ...]) -> str:
    """A group's name: its module's, or its first and last."""
    return modules[0].fqn if len(modules) == 1 else f"{modules[0].fqn}..{modules[-1].fqn}"
