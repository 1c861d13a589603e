"""A model by the modules that own parameters, each of which is called by itself.

Runtimes that hook ordinary modules, such as DeepSpeed, see every linear, norm and embedding. Here
each is a unit: the root's stand apart, a block's are nested in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby

from zsim.models.operators import ONE_NODE, Operator, OperatorKind
from zsim.models.repeats import first_runs
from zsim.models.spec import ROOT, ModelSpec, Module, ParamGroup
from zsim.models.wrapping import TRACED, joined, parts_of_root, split_block

TRANSFORMERS = "transformers"
"""The family of models whose modules are those of transformers."""
MOST_IN_LEAF = 10**9
"""Elements of the largest module that DeepSpeed takes for a leaf by its mean size."""
WITHOUT_PARAMETERS: tuple[OperatorKind, ...] = (
    "silu", "gelu", "gelu_new", "dropout", "rotary_tables"
)
"""Operators that transformers has modules of, though they own nothing."""


def by_module(model: ModelSpec, *, leaf_blocks: bool = False) -> ModelSpec:
    """`model` with a unit for each operator that owns parameters; a traced one as it is. With
    `leaf_blocks` each block is one unit, whose modules have no hooks.

    A tied weight belongs to the first module that reads it. Others read it too, and are modules
    without a unit.
    """
    if model.family == TRACED:
        return model
    others = WITHOUT_PARAMETERS if model.family == TRANSFORMERS else ()
    cut = [
        (module, tuple(_called(module, others, whole=leaf_blocks)))
        for module in joined(model.modules)
    ]
    names = {
        f"{module.fqn}:{op.output}": f"{part.fqn}:{op.output}"
        for module, parts in cut if module.unit == ROOT for part in parts for op in part.operators
    }
    modules = tuple(_renamed(part, names) for _, parts in cut for part in parts)
    places = {fqn: index for index, fqn in enumerate(model.registered)}
    owned = [
        (m.path, sorted(
            [fqn for op in m.operators for fqn in (op.weight, op.bias)],
            key=(lambda fqn: places.get(fqn, 0)) if is_leaf(m) else (lambda _: 0),
        ))
        for m in modules
    ]
    return replace(model, modules=modules, units=_units(model, owned))


def is_leaf(module: Module) -> bool:
    """True for a block of a model `by_module` that is one unit."""
    return not module.within and not module.apart and module.unit != ROOT


def granular(model: ModelSpec, most: int) -> tuple[str, ...]:
    """The outermost modules with others inside that have at most `most` elements a module, which
    DeepSpeed takes for leaves. Modules of over a billion elements, and lists, are none.

    Such a module itself counts, and so do all inside that own parameters or have such inside.
    """
    numels = {parameter.fqn: parameter.numel for parameter in model.parameters}
    owned = Counter[str]()
    for op in (op for module in first_runs(model.modules) for op in module.operators):
        for fqn in (op.weight, op.bias):
            owned[op.name] += numels.get(fqn, 0)
    owned = +owned
    around = {name: (ROOT, *_outer(name)) for name in owned}
    sizes, members = Counter[str](), dict[str, set[str]]()
    for name, outer in around.items():
        for each in outer:
            sizes[each] += owned[name]
            members.setdefault(each, set()).update((name, *outer))
    lists = {name.rpartition(".")[0] for name in members if name.rpartition(".")[2].isdecimal()}

    def is_fine(name: str) -> bool:
        inside = [m for m in members[name] if m not in lists and _is_in(m, name)]
        return name not in lists and sizes[name] <= MOST_IN_LEAF and (
            sizes[name] // len(inside) <= most
        )

    fine = {name for name in members if is_fine(name)}
    return tuple(name for name in members if name in fine and not fine.intersection(
        outer for outer in (ROOT, *_outer(name)) if outer != name
    ))


def _is_in(name: str, outer: str) -> bool:
    return name == outer or outer == ROOT or name.startswith(f"{outer}.")


def by_block(model: ModelSpec) -> ModelSpec:
    """A model `by_module` with a unit for each block again, and one for the rest."""
    if model.family == TRACED:
        return model
    whole = [_linears(module, implementation="") for module in joined(model.modules)]
    neighbours = groupby(whole, key=lambda m: m.apart or m.unit == ROOT)
    modules: list[Module] = []
    names = dict[str, str]()
    for is_roots, members in neighbours:
        parts = list(members)
        if is_roots:
            root = _roots(tuple(parts), is_first=not modules)
            names |= {
                f"{part.fqn}:{op.output}": f"{root.fqn}:{op.output}"
                for part in parts for op in part.operators
            }
            parts = [root]
        modules += parts
    modules = [_renamed(module, names) for module in modules]
    places = {fqn: index for index, fqn in enumerate(model.registered)}
    blocks = [
        (m.path, sorted(model.parameters_of(m.path), key=lambda fqn: places.get(fqn, 0)))
        for m in modules if m.unit != ROOT
    ]
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
            is_given = bool(operators) and op is part.operators[0]
            names = {"x": operators[-1].output} if is_given else {}
            inputs, drops = (
                tuple(names.get(value, value) for value in each) for each in (op.inputs, op.drops)
            )
            operators.append(replace(op, inputs=inputs, drops=drops))
    return Module(fqn="embed" if is_first else "head", unit=ROOT, operators=tuple(operators))


def containers(model: ModelSpec) -> dict[str, tuple[str, ...]]:
    """The modules around each module of a model `by_module`, outermost first: its block, and with
    transformers those that are called too."""
    if model.family != TRANSFORMERS:
        return {m.fqn: (m.within,) if m.within else () for m in model.modules}
    lists = {m.within.rpartition(".")[0] for m in model.modules if m.within}
    called = {m.path for m in model.modules if m.apart or m.inside}
    around = {outer for path in called for outer in _outer(path)} - lists
    return {
        m.fqn: tuple(each for each in (*_outer(name), name) if each in around)
        for m in model.modules
        for name in ((m.operators[0].name if m.operators else m.path),)
    }


def called_inside(model: ModelSpec) -> dict[str, tuple[str, ...]]:
    """The `containers` of each module in a block, without the block and what is around it."""
    around = containers(model)
    return {
        m.path: around[m.fqn][around[m.fqn].index(m.within) + 1 :]
        for m in model.modules if m.inside
    }


def _outer(path: str) -> Iterator[str]:
    """The paths of all modules around `path`, outermost first."""
    yield from (path[:index] for index, letter in enumerate(path) if letter == ".")


def _renamed(module: Module, names: Mapping[str, str]) -> Module:
    """`module` with the new `names` of other modules' values, and of what belongs to them."""

    def new(value: str) -> str:
        maker, colon, name = value.partition(":")
        whole, dot, part = name.partition(".")
        renamed = names.get(maker + colon + whole, maker + colon + whole)
        return renamed.removeprefix(f"{module.fqn}:") + dot + part

    return replace(module, operators=tuple(
        replace(op, reads=tuple(map(new, op.reads)), drops=tuple(map(new, op.drops)))
        for op in module.operators
    ))


def _called(
    module: Module, others: Collection[OperatorKind], *, whole: bool
) -> Iterator[Module]:
    """A block in parts or `whole`, or the root's own operators one by one."""
    module = _linears(module, implementation=ONE_NODE)
    if module.apart or (whole and module.unit != ROOT):
        yield module
    elif module.unit == ROOT:
        yield from parts_of_root(module, others=others)
    else:
        owners = [
            op.name.removeprefix(f"{module.path}.") for op in module.operators
            if op.weight or op.kind in others
        ]
        yield from split_block(module, tuple(owners))


def _linears(module: Module, *, implementation: str) -> Module:
    """`module` with another implementation of its linears."""
    operators = [
        replace(op, implementation=implementation) if op.kind == "linear" else op
        for op in module.operators
    ]
    return replace(module, operators=tuple(operators))
