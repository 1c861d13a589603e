"""ModelSpec: a model as modules of operators, and the param groups (FSDP units) that own its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from zsim.operators import Operator

ROOT = "root"
RUN = "#"
"""Between a module's fqn and the number of its run, where it runs more than once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter by fully qualified name and shape; torch's own fqn, without FSDP prefixes. A frozen one needs no gradient."""

    fqn: str
    shape: tuple[int, ...]
    requires_grad: bool = True

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroup:
    """An FSDP unit: parameters gathered together, in `named_parameters()` order. `fqn` is ROOT for the root's.

    `modules` are the modules that it wraps, as `fully_shard([…])` takes them; () for the one of its own name. The root's wraps
    whatever no other does.
    """

    fqn: str
    parameters: tuple[Parameter, ...]
    modules: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of all its parameters, unpadded."""
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A stretch of the forward pass: operators in order, run by the module `unit`. The root runs the first and last ones itself.

    A module that runs several times stands there once per run; the second is called `path`#2, and so on. `apart`: not a block,
    but an embedding, norm or head that is a module of its own because a wrapping policy wraps it.
    """

    fqn: str
    unit: str
    operators: tuple[Operator, ...]
    apart: bool = False

    @property
    def path(self) -> str:
        """The fqn of the real module, whichever of its runs this is."""
        return self.fqn.partition(RUN)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A whole model. `modules` in forward order; `units` too, after the root when it owns parameters.

    `forwards`: how many forwards, one after another and each of as many modules, `modules` holds.

    A unit without a module is unused: it owns parameters, and forward passes it by.

    `registered` are the fqns of the parameters as the real module registers them, where it does not have its blocks' first and then
    the root's own; `buffers` the dtype and the bytes of each tensor that it holds besides.
    """

    name: str
    family: str
    modules: tuple[Module, ...]
    units: tuple[ParamGroup, ...]
    forwards: int = 1
    registered: tuple[str, ...] = ()
    buffers: tuple[tuple[str, int], ...] = ()

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter once, unit by unit."""
        return tuple([parameter for unit in self.units for parameter in unit.parameters])

    @property
    def named_parameters(self) -> tuple[Parameter, ...]:
        """The parameters in the order of the real module's `named_parameters()`."""
        if self.registered:
            known = {parameter.fqn: parameter for parameter in self.parameters}
            return tuple([known[fqn] for fqn in self.registered])
        units = sorted(self.units, key=lambda unit: unit.fqn == ROOT)
        return tuple([parameter for unit in units for parameter in unit.parameters])

    @property
    def blocks(self) -> tuple[Module, ...]:
        """The modules between embedding and head, in forward order, each once."""
        return tuple(m for m in self.modules if m.unit != ROOT and not m.apart and m.fqn == m.path)

    @property
    def wrapped_by(self) -> dict[str, str]:
        """By module: the param group that is gathered for it."""
        groups = {name: unit.fqn for unit in self.units for name in unit.modules or (unit.fqn,)}
        return {module.fqn: groups.get(module.unit, ROOT) for module in self.modules}

    @property
    def frozen(self) -> frozenset[str]:
        """The fqns of the parameters that need no gradient."""
        return frozenset([parameter.fqn for parameter in self.parameters if not parameter.requires_grad])

    @property
    def unused(self) -> frozenset[str]:
        """The fqns of the units that forward passes by."""
        return frozenset([unit.fqn for unit in self.units]).difference(self.wrapped_by.values(), [ROOT])

    @property
    def trained(self) -> frozenset[str]:
        """The fqns of the parameters that get a gradient: those that are not frozen, of units that are used."""
        unused = self.unused
        used = (parameter for unit in self.units if unit.fqn not in unused for parameter in unit.parameters)
        return frozenset([parameter.fqn for parameter in used if parameter.requires_grad])

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones counted once."""
        return sum(parameter.numel for parameter in self.parameters)
