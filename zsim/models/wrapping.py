"""Wrapping policies: which modules are one param group (an FSDP unit), gathered and reduced as one.

A policy turns a model into the same model with other units, and the real model is wrapped by these
units too. It knows no strategy: ZeRO's flat buffers are made of units as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

from zsim.errors import listed, shown
from zsim.models.operators import Operator
from zsim.models.spec import (
    PART,
    ROOT,
    ModelSpec,
    Module,
    ParamGroup,
    in_run_of,
    numbered,
    without_run,
)

TRACED = "traced"
"""The family of models that bring their own units."""
SHARED = "shared with a parameter already managed by another FSDP group"
"""torch 2.13's message at the first forward of a model with a weight in two groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapping:
    """Consecutive blocks in one group (`every`), or "all": the whole model is one group, the
    root's.

    `ends`: "root" leaves embedding, last norm and head to the root's group. "apart" makes the
    embedding one group and norm and head another, as torchtitan does; the loss stays with the root,
    which then owns nothing. `nested`: names of modules in each block that are units in its unit,
    which owns all other parameters.
    """

    every: int | Literal["all"] = 1
    ends: Literal["root", "apart"] = "root"
    nested: tuple[str, ...] = ()


def problems(policy: Wrapping, model: ModelSpec) -> Iterator[str]:
    """Refusals of a policy for `model`, one line each, the scenario's key first."""
    if model.family == TRACED:
        if policy != Wrapping():
            yield (
                "wrapping: a traced model keeps the units it was traced with; trace it again with "
                "others, and leave this out"
            )
        return
    blocks = len(model.blocks)
    if policy.every == "all" and policy.ends == "apart":
        yield (
            'wrapping.ends: with every = "all" the whole model is one group, which leaves nothing '
            'apart; use "root", or a number'
        )
    elif policy.every != "all" and policy.every > max(1, blocks):
        yield (
            f'wrapping.every: expected 1 to {max(1, blocks)}, the model\'s blocks, or "all", found '
            f'{policy.every}'
        )
    yield from _nested_problems(policy, model)
    whole = tuple(joined(model.modules))
    in_a_row = any(module.path == following.path for module, following in pairwise(whole))
    if policy.every not in (1, "all") and in_a_row:
        yield (
            'wrapping.every: expected 1 where blocks run several times in a row: fully_shard '
            'ends a group when each module has run once; use model.uses.order = "stack"'
        )
    readers: dict[str, dict[str, None]] = {}
    for group in _groups(_modules(whole, policy), policy):
        for fqn in _parameters(group):
            readers.setdefault(fqn, {})[_name(group)] = None
    for fqn, groups in readers.items():
        if len(groups) > 1:
            yield (
                f"wrapping.ends: expected every parameter in one group, found {fqn} in "
                f"{' and '.join(groups)}; torch refuses it: the parameter "
                f'"is {SHARED}"; use ends = "root", or untie it'
            )


def wrapped(model: ModelSpec, policy: Wrapping, *, in_parts: bool = True) -> ModelSpec:
    """`model` with the units that `policy` makes; a traced one as it is.

    Blocks with nested units stand there in parts; without `in_parts` those units own parameters and
    are no modules. `model` may have been wrapped before, with the same ends. Its idle blocks are
    wrapped as well, and left out of the modules again.
    """
    if model.family == TRACED:
        return model
    modules = _modules(_with_idle(model, tuple(joined(model.modules))), policy)
    parts = tuple(part for module in modules for part in split_block(module, policy.nested))
    units = _units(model, _owned(model, modules, parts, policy))
    runs = [
        part
        for part in (parts if in_parts else modules)
        if (part.within or part.path) not in model.idle
    ]
    return replace(model, modules=tuple(runs), units=units)


class _Owned(NamedTuple):
    """The parameters that a unit owns, and the modules that it wraps if they are several."""

    unit: str
    parameters: tuple[str, ...]
    modules: tuple[str, ...] = ()


def _owned(
    model: ModelSpec, modules: tuple[Module, ...], parts: tuple[Module, ...], policy: Wrapping
) -> Iterator[_Owned]:
    """Each group's unit without its nested units, and then these, in forward order."""
    registered = {fqn: index for index, fqn in enumerate(model.registered)}
    groups = {module.fqn: group for group in _groups(modules, policy) for module in group}
    nested: dict[str, dict[str, _Owned]] = {}
    for part in parts:
        if part.inside:
            unit = _Owned(part.path, tuple(_parameters((part,))))
            nested.setdefault(part.within, {})[part.path] = unit
    for module in modules:
        group = groups.get(module.fqn, (module,))
        inner = [unit for m in group for unit in nested.get(m.fqn, {}).values()]
        if module is group[0] and module.fqn in groups:
            taken = {fqn for unit in inner for fqn in unit.parameters}
            own = [fqn for fqn in _parameters(group) if fqn not in taken]
            own.sort(key=lambda fqn: registered.get(fqn, 0))
            members = tuple(m.fqn for m in group) if len(group) > 1 else ()
            yield _Owned(_name(group), tuple(own), members)
        if module is group[0]:
            yield from inner


def _units(model: ModelSpec, owned: Iterable[_Owned]) -> tuple[ParamGroup, ...]:
    """The param groups of what is `owned`, after the root's, which owns all other parameters."""
    rest = {
        parameter.fqn: parameter
        for unit in sorted(model.units, key=lambda unit: unit.fqn == ROOT)
        for parameter in unit.parameters
    }
    units = [
        ParamGroup(
            fqn=each.unit, parameters=tuple(map(rest.pop, each.parameters)), modules=each.modules
        )
        for each in owned
        if each.parameters
    ]
    root = [ParamGroup(fqn=ROOT, parameters=tuple(rest.values()))] if rest else []
    return (*root, *units)


def _with_idle(model: ModelSpec, modules: tuple[Module, ...]) -> tuple[Module, ...]:
    """`modules` with the blocks that forward skips, as operators that only own parameters, in
    their usual order."""
    for fqn in model.idle:
        names = model.parameters_of(fqn)
        operators = tuple(
            Operator(kind="traced", name=n.rpartition(".")[0], inputs=("x",), output="x", weight=n)
            for n in names
        )
        blocks = {
            index: _number(m.path)
            for index, m in enumerate(modules)
            if m.unit != ROOT and not m.apart and m.fqn == m.path
        }
        index = next(
            (index for index, number in blocks.items() if number > _number(fqn)),
            max(blocks, default=0) + 1,
        )
        modules = (
            *modules[:index], Module(fqn=fqn, unit=fqn, operators=operators), *modules[index:],
        )
    return modules


def _number(block: str) -> int:
    return int(block.rpartition(".")[2])


def _modules(modules: tuple[Module, ...], policy: Wrapping) -> tuple[Module, ...]:
    """The modules, with the root's own ones in parts where they are wrapped apart."""
    if policy.ends == "root":
        return modules
    return tuple(
        part
        for module in modules
        for part in ((module,) if module.unit != ROOT else parts_of_root(module))
    )


def parts_of_root(module: Module, *, others: Collection[str] = ()) -> Iterator[Module]:
    """One of the root's modules as one module per operator. Operators with parameters, and those of
    the kinds `others`, stand by themselves, the rest is still the root's. One that is part of the
    module before stays with it."""
    before, makers, part = "", dict[str, str](), Module(fqn="", unit=ROOT, operators=())
    for operator in module.operators:
        if part.fqn and operator.name.startswith(f"{part.fqn}."):
            part = replace(part, operators=(*part.operators, operator))
        else:
            yield from [part] if part.fqn else []
            inputs = tuple("x" if value == before else value for value in operator.inputs)
            drops = tuple(
                "x" if value == before else makers.get(value, value) for value in operator.drops
            )
            apart = bool(operator.weight) or operator.kind in others
            part = Module(
                fqn=operator.name,
                unit=operator.name if apart else ROOT,
                operators=(replace(operator, inputs=inputs, drops=drops),),
                apart=apart,
            )
        before = operator.output
        makers[before] = f"{part.fqn}:{before}"
    yield part


def _groups(modules: tuple[Module, ...], policy: Wrapping) -> Iterator[tuple[Module, ...]]:
    """The modules of each group but the root's, in forward order: neighbours of one kind, of blocks
    `every` at most."""
    run: list[Module] = []
    for module in modules:
        if module.fqn != module.path:  # a later run of a module that has its group
            continue
        full = policy.every != "all" and len(run) == policy.every
        if run and (
            module.unit == ROOT or module.apart != run[0].apart or (full and not module.apart)
        ):
            yield tuple(run)
            run = []
        if module.unit != ROOT and (module.apart or policy.every != "all"):
            run.append(module)
    if run:
        yield tuple(run)


def _parameters(modules: tuple[Module, ...]) -> dict[str, None]:
    """The fqns of the parameters that `modules` read, in the order of first use."""
    return dict.fromkeys(
        fqn
        for module in modules
        for operator in module.operators
        for fqn in (operator.weight, operator.bias)
        if fqn
    )


def _name(modules: tuple[Module, ...]) -> str:
    """A group's name: its module's, or its first and last."""
    return modules[0].fqn if len(modules) == 1 else f"{modules[0].fqn}..{modules[-1].fqn}"


# -- units in units


def joined(modules: Iterable[Module]) -> Iterator[Module]:
    """The modules with the parts of each block, if it stands there in parts, as one again."""
    for whole, parts in groupby(modules, key=lambda module: module.whole if module.within else ""):
        members = tuple(parts)
        if not whole:
            yield from members
        else:
            operators = tuple(operator for part in members for operator in part.operators)
            yield replace(members[0], fqn=whole, operators=operators, within="")


def split_block(module: Module, nested: tuple[str, ...]) -> Iterator[Module]:
    """A block in parts: those of its modules called `nested`, and what it runs itself before,
    between and after them."""
    path = without_run(module.fqn)
    pieces = [
        (name, tuple(ops))
        for name, ops in groupby(module.operators, key=lambda op: _owner(op, path, nested))
    ]
    if module.unit == ROOT or module.apart or not any(name for name, _ in pieces):
        yield module
        return
    ends = [[("", ())] if pieces[index][0] else [] for index in (0, -1)]
    number = 0
    for name, operators in (*ends[0], *pieces, *ends[1]):
        number += not name
        own = numbered(path, number, PART)
        fqn = f"{path}.{name}" if name else own
        yield replace(
            module, fqn=in_run_of(fqn, module.fqn), unit=fqn if name else module.unit,
            operators=operators, within=path,
        )


def _owner(operator: Operator, path: str, nested: tuple[str, ...]) -> str:
    """The one of the `nested` modules of the block `path` that has the operator, "" for none."""
    return next((name for name in nested if f"{operator.name}.".startswith(f"{path}.{name}.")), "")


def _nested_problems(policy: Wrapping, model: ModelSpec) -> Iterator[str]:
    """Refusals of nested units: each must have parameters, read one value and make one."""
    for name, other in ((name, other) for name in policy.nested for other in policy.nested):
        if name != other and name.startswith(f"{other}."):
            yield (
                f"wrapping.nested: expected modules apart from each other, found {name} in "
                f"{other}; take one of the two"
            )
            return
    for block in (
        module for module in joined(model.modules) if module.unit != ROOT and not module.apart
    ):
        known = dict.fromkeys(
            op.name.removeprefix(f"{block.path}.").split(".")[0]
            for op in block.operators
            if op.weight
        )
        for name in policy.nested:
            indices = [
                i
                for i, op in enumerate(block.operators)
                if _owner(op, block.path, policy.nested) == name
            ]
            operators = tuple(block.operators[i] for i in indices)
            read = replace(block, operators=operators).free_inputs
            if not any(op.weight for op in operators):
                yield (
                    f"wrapping.nested: {block.path} has no module {shown(name)} with parameters; "
                    f"it has {listed(known, 'and')}"
                )
                return
            if indices != list(range(indices[0], indices[-1] + 1)) or len(read) != 1:
                yield (
                    "wrapping.nested: expected a module that reads one value, found "
                    f"{block.path}.{name}, which reads {', '.join(sorted(read))}"
                )
                return
