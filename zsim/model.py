"""ModelSpec: a model as modules of operators, and the param groups (FSDP units) that own its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from zsim.operators import Operator

ROOT = "root"


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
    """An FSDP unit: parameters gathered together, in `named_parameters()` order. `fqn` is ROOT for the root's."""

    fqn: str
    parameters: tuple[Parameter, ...]

    @property
    def numel(self) -> int:
        """Elements of all its parameters, unpadded."""
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A stretch of the forward pass: operators in order, run by `unit`. The root runs the first and last ones."""

    fqn: str
    unit: str
    operators: tuple[Operator, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A whole model. `modules` in forward order; `units` too, after the root when it owns parameters.

    A unit without a module is unused: it owns parameters, and forward passes it by.
    """

    name: str
    family: str
    modules: tuple[Module, ...]
    units: tuple[ParamGroup, ...]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter once, unit by unit."""
        return tuple(parameter for unit in self.units for parameter in unit.parameters)

    @property
    def frozen(self) -> frozenset[str]:
        """The fqns of the parameters that need no gradient."""
        return frozenset([parameter.fqn for parameter in self.parameters if not parameter.requires_grad])

    @property
    def unused(self) -> frozenset[str]:
        """The fqns of the units that forward passes by."""
        return frozenset([unit.fqn for unit in self.units]) - {module.unit for module in self.modules} - {ROOT}

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
