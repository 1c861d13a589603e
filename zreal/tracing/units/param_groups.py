"""Units of a module that is traced, and the parameters that each owns, in fully_shard's order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from zreal.tracing.errors import refuse
from zsim.io.json_reader import is_name
from zsim.io.units import format_bytes
from zsim.models.spec import ROOT, Parameter, ParamGroup

UnitChoice = Sequence[str] | Callable[[str, nn.Module], bool] | None


def find_units(model: nn.Module, units: UnitChoice) -> dict[str, nn.Module]:
    """Units of `model` by fqn: those named, as layers.0 or layers.*, those a function accepts, or
    the default ones."""
    modules = dict(model.named_modules())
    if units is None:
        return _default_units(model, modules)
    inner = [fqn for fqn in modules if fqn]
    if callable(units):
        wanted = {fqn for fqn in inner if units(fqn, modules[fqn])}
    else:
        wanted = {fqn for name in units for fqn in _named(name, inner)}
    return {fqn: module for fqn, module in modules.items() if fqn in wanted}


def _named(pattern: str, fqns: Sequence[str]) -> list[str]:
    """The fqns that `pattern` names; a star in it stands for no dot, so layers.* is each layer."""
    parts = pattern.split(".")
    named = [
        fqn for fqn in fqns
        if len(names := fqn.split(".")) == len(parts) and all(map(fnmatchcase, names, parts))
    ]
    if not named:
        near = get_close_matches(pattern, fqns, n=1)
        raise refuse(
            pattern, "the fqn of a module in the model",
            "none of that name", f"did you mean {near[0]}?" if near else "see model.named_modules()"
        )
    return named


def _default_units(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    lists = {fqn: each for fqn, each in modules.items() if isinstance(each, nn.ModuleList)}
    outer = {  # the experts of a layer may be more than the layers
        fqn: each for fqn, each in lists.items()
        if not any(fqn.startswith(f"{other}.") for other in lists)
    }
    if outer:
        fqn, longest = max(outer.items(), key=lambda item: len(item[1]))
        return dict(_called(fqn, longest))
    nbytes = total(model.parameters())
    warnings.warn(
        f"{type(model).__name__} has no ModuleList, so the whole model is one unit, gathered at "
        f"once ({format_bytes(nbytes)} as they are); name its units",
        stacklevel=4,
    )
    return {}


def _called(fqn: str, container: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with parameters in a container. Containers in it are not called, but their own
    children are."""
    for name, child in container.named_children():
        inner = f"{fqn}.{name}" if fqn else name
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called(inner, child)
        elif next(child.parameters(), None) is not None:
            yield inner, child


def param_groups(model: nn.Module, units: Mapping[str, nn.Module]) -> tuple[ParamGroup, ...]:
    """The root's parameters, then each unit's; UntraceableError for one that two of them share, and
    for a unit without any."""
    owners: dict[int, str] = {}
    for fqn, unit in units.items():
        own = [
            (name, p)
            for name, p in unit.named_parameters()
            if _innermost(f"{fqn}.{name}", units) == fqn
        ]
        if not own:
            raise refuse(
                fqn, "a unit with parameters of its own", "none",
                "leave it out of units: it then belongs to what contains it",
            )
        for name, parameter in own:
            _require_own(owners.get(id(parameter), fqn), fqn, name)
            owners[id(parameter)] = fqn
    members: dict[str, list[Parameter]] = {fqn: [] for fqn in (ROOT, *units)}
    for fqn, parameter in _in_order_of_fully_shard(model):
        if not is_name(fqn):
            raise refuse(
                repr(fqn), "a name without blanks, commas and bars", "another one",
                "rename the module",
            )
        if not parameter.is_contiguous():
            raise refuse(
                fqn,
                "a contiguous parameter, as fully_shard takes alone",
                "one with its dimensions in another order in memory, as "
                ".to(memory_format=torch.channels_last) makes it",
                "leave that out of the module; its inputs may have channels that come last",
            )
        owned = Parameter(
            fqn=fqn, shape=tuple(parameter.shape), requires_grad=parameter.requires_grad
        )
        members[owners.get(id(parameter), ROOT)].append(owned)
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        owner = owners.get(id(parameter), ROOT)
        if owner != ROOT:
            _require_own(owner, _innermost(fqn, units), fqn)
    if not any(members.values()):
        raise refuse(
            type(model).__name__, "a module with parameters", "none", "name one that has some"
        )
    return tuple(ParamGroup(fqn=fqn, parameters=tuple(own)) for fqn, own in members.items() if own)


def _innermost(fqn: str, units: Iterable[str]) -> str:
    """The unit that the parameter `fqn` lies in, the inner one of several, or the root."""
    return max((unit for unit in units if fqn.startswith(f"{unit}.")), key=len, default=ROOT)


def _in_order_of_fully_shard(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """`named_parameters()`, but those of a module after those of its children."""
    names = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    known: set[nn.Module] = set()

    def own(module: nn.Module) -> Iterator[nn.Parameter]:
        known.add(module)
        for child in module.children():
            if child not in known:
                yield from own(child)
        yield from module.parameters(recurse=False)

    for parameter in own(model):
        if id(parameter) in names:
            yield names.pop(id(parameter)), parameter


def _require_own(owner: str, unit: str, parameter: str) -> None:
    if owner != unit:
        remedy = "tie weights inside one unit only, or leave both modules to the root"
        raise refuse(
            parameter, "a parameter of one unit", f"one tied between {owner} and {unit}", remedy
        )


def total(tensors: Any) -> int:
    """Bytes of the elements of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
