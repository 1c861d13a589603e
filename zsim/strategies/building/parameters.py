"""Parameters that a step reads and trains, by unit."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.models.spec import ModelSpec, Module, Parameter


def used_parameters(module: Module) -> tuple[str, ...]:
    """The fqns that the operators of `module` read, each once."""
    return tuple(
        dict.fromkeys([fqn for op in module.operators for fqn in (op.weight, op.bias) if fqn])
    )


def units_read(model: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Units that own the parameters of each module."""
    owner = {parameter.fqn: unit.fqn for unit in model.units for parameter in unit.parameters}
    return {
        m.fqn: tuple(dict.fromkeys([owner[fqn] for fqn in used_parameters(m)]))
        for m in model.modules
    }


def units_read_by_blocks(model: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Units that own the parameters of each block in parts, without those of its nested units; by
    part."""
    own = {part.whole: dict[str, None]() for part in model.modules if part.within}
    reads = units_read(model)
    for part in model.modules:
        if part.within and not part.inside:
            own[part.whole].update(dict.fromkeys(reads[part.fqn]))
    return {part.fqn: tuple(own[part.whole]) for part in model.modules if part.within}


def named_parameters(model: ModelSpec) -> tuple[Parameter, ...]:
    """The parameters in the order of the real module's `named_parameters()`."""
    return model.named_parameters


def trained_parameters(model: ModelSpec) -> tuple[Parameter, ...]:
    """Parameters of `named_parameters` that get a gradient: what an optimizer steps."""
    trained = model.trained
    return tuple([parameter for parameter in named_parameters(model) if parameter.fqn in trained])


def children_first(parameters: Sequence[Parameter], *, depth: int = 0) -> list[Parameter]:
    """Parameters in the order in which `Module.to` casts them: those of a module's children before
    its own (torch.nn.Module._apply)."""
    own: list[Parameter] = []
    children: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        child, *inside = parameter.fqn.split(".")[depth:]
        (children.setdefault(child, []) if inside else own).append(parameter)
    return [
        *(p for child in children.values() for p in children_first(child, depth=depth + 1)),
        *own,
    ]
