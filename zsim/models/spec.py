"""ModelSpec: a model as modules of operators, and the param groups (FSDP units) that own its
parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from zsim.models.operators import Operator

ROOT = "root"
RUN = "#"
"""Between a module's fqn and the number of its run, where it runs more than once."""
PART = "@"
"""Between a block's fqn and the number of its part, where a unit inside the block lies between two
of its own parts."""
TRANSFORMERS = "transformers"
"""The family of models that are lowered as the code of transformers runs them."""
MODEL_INPUT = "x"
"""The model's floating-point input, cast, and further ones of a trace "x.1" and so on; in a second
forward before the backward "x#2"."""


def numbered(name: str, number: int, mark: str = RUN) -> str:
    """The name of run (or part) `number` of `name`, counted from 1; the first has no number.

    >>> numbered("blocks.0", 1), numbered("blocks.0", 2), numbered("blocks.0", 2, PART)
    ('blocks.0', 'blocks.0#2', 'blocks.0@2')
    """
    return f"{name}{mark}{number}" if number > 1 else name


def without_run(name: str) -> str:
    """`name` without the number of its run."""
    return name.partition(RUN)[0]


def run_of(name: str) -> str:
    """The number of the run in `name`; "" for the first."""
    return name.partition(RUN)[2]


def in_run_of(name: str, other: str) -> str:
    """`name` in the same run as the `other`.

    >>> in_run_of("blocks.0", "blocks.0.mlp#2"), in_run_of("blocks.0", "blocks.0.mlp")
    ('blocks.0#2', 'blocks.0')
    """
    return name + "".join(other.partition(RUN)[1:])


def is_model_input(buffer: str) -> bool:
    """True where `buffer` is one of the model's own inputs, in any forward."""
    name = without_run(buffer)
    return name == MODEL_INPUT or (name.startswith(f"{MODEL_INPUT}.") and ":" not in name)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter by fully qualified name and shape; torch's own fqn, without FSDP prefixes. A
    frozen one needs no gradient.

    One that is not `in_loss` needs a gradient and gets none, as the loss does not depend on it.
    """

    fqn: str
    shape: tuple[int, ...]
    requires_grad: bool = True
    in_loss: bool = True

    @cached_property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """An FSDP unit: parameters gathered together, in `named_parameters()` order. `fqn` is ROOT for
    the root's.

    `modules` are the modules that it wraps, as `fully_shard([…])` takes them; () for the one of its
    own name. The root's wraps whatever no other does.
    """

    fqn: str
    parameters: tuple[Parameter, ...]
    modules: tuple[str, ...] = ()

    def wraps(self, other: ParamGroup) -> bool:
        """True where `other` lies in one of this unit's modules."""
        first = (*other.modules, other.fqn)[0]
        return any(first.startswith(f"{fqn}.") for fqn in self.modules or (self.fqn,))

    @cached_property
    def numel(self) -> int:
        """Elements of all its parameters, unpadded."""
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A piece of the forward pass: operators in order, run by the module `unit`. The root runs
    the first and last ones itself.

    A module that runs several times stands there once per run; the second is called `path`#2, and
    so on. `apart`: an embedding, norm or head that a wrapping policy wraps by itself, and no block.

    A block with nested units stands there in parts, each `within` it. Its own parts are called
    `block`, `block`@2, …; each nested unit lies between two of them. The first and the last part
    may be empty. Values are local to the whole block; a nested unit reads one of them.
    """

    fqn: str
    unit: str
    operators: tuple[Operator, ...]
    apart: bool = False
    within: str = ""

    @property
    def path(self) -> str:
        """The fqn of the real module, or of a part of it, whichever of its runs this is."""
        return without_run(self.fqn)

    @property
    def inside(self) -> bool:
        """True for a nested unit: a unit inside a block."""
        return self.within not in ("", self.path) and self.unit == self.path

    @property
    def free_inputs(self) -> tuple[str, ...]:
        """The values that its operators read and that none of them makes; an operator of several
        outputs makes "<output>.…" too."""
        made = {operator.output for operator in self.operators}
        read = dict.fromkeys([value for operator in self.operators for value in operator.inputs])
        return tuple(
            [value for value in read if value not in made and value.partition(".")[0] not in made]
        )

    @property
    def whole(self) -> str:
        """The fqn of this run of the whole module that this is, or of which it is a part."""
        return in_run_of(self.within or self.path, self.fqn)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A whole model: `modules` in forward order, and `units` too, after the root when it owns
    parameters.

    `forwards`: forwards before a backward, each of as many modules, that `modules` holds. `idle`:
    fqns of the blocks that forward skips. A unit of nothing else is unused: it owns parameters, and
    no more.

    `registered`: fqns of the parameters as the real module registers them, unless it has its
    blocks' first and then the root's own. `buffers`: dtype and bytes of each tensor that it holds
    besides.
    """

    name: str
    family: str
    modules: tuple[Module, ...]
    units: tuple[ParamGroup, ...]
    forwards: int = 1
    idle: tuple[str, ...] = ()
    registered: tuple[str, ...] = ()
    buffers: tuple[tuple[str, int], ...] = ()

    @property
    def made_whole(self) -> bool:
        """True where all parameters are there before any is sharded. Only a user's own module is
        built so."""
        return False

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
        if self.nested or self._buffers_in_blocks:
            known = {parameter.fqn: parameter for parameter in self.parameters}
            return tuple([known[fqn] for fqn in _as_registered(self) if fqn in known])
        units = sorted(self.units, key=lambda unit: unit.fqn == ROOT)
        return tuple([parameter for unit in units for parameter in unit.parameters])

    @property
    def blocks(self) -> tuple[Module, ...]:
        """The modules between embedding and head, in forward order, each once."""
        return tuple(
            m
            for m in self.modules
            if m.unit != ROOT and not m.apart and m.fqn == m.path and m.within in ("", m.path)
        )

    @property
    def wrapped_by(self) -> dict[str, str]:
        """Param groups that are gathered for each module."""
        groups = {name: unit.fqn for unit in self.units for name in unit.modules or (unit.fqn,)}
        return {module.fqn: groups.get(module.unit, ROOT) for module in self.modules}

    @property
    def nested(self) -> bool:
        """True where some unit that runs lies in another, or inside a block."""
        return any(module.within for module in self.modules)

    @property
    def _buffers_in_blocks(self) -> frozenset[str]:
        """The fqns of the units in blocks that do not stand there in parts: they own parameters of
        those."""
        blocks = {module.unit for module in self.modules}.union(
            self.idle, *[unit.modules for unit in self.units]
        )
        loose = [unit.fqn for unit in self.units if not unit.modules and unit.fqn not in blocks]
        return frozenset([fqn for fqn in loose if not blocks.isdisjoint(_around(f"{fqn}."))])

    @property
    def inside_out(self) -> tuple[ParamGroup, ...]:
        """The units but the root's in the order in which they are wrapped: those in a unit before
        it."""
        own = [unit for unit in self.units if unit.fqn != ROOT]
        idle = [unit for unit in own if unit.fqn in self.idle]
        if not (self.nested or any(unit.wraps(other) for unit in idle for other in own)):
            return tuple(own)
        order: list[ParamGroup] = []
        for unit in own[::-1]:  # where one wraps others they come after it
            after = next(
                (index for index, other in enumerate(order) if not unit.wraps(other)), len(order)
            )
            order.insert(after, unit)
        return tuple(order)

    @property
    def first_operator(self) -> Operator:
        """The operator that reads the model's input."""
        return next(operator for module in self.modules for operator in module.operators)

    @property
    def frozen(self) -> frozenset[str]:
        """The fqns of the parameters that need no gradient."""
        return frozenset(
            [parameter.fqn for parameter in self.parameters if not parameter.requires_grad]
        )

    @property
    def partly_frozen(self) -> tuple[str, ...]:
        """The fqns of the units of which some parameters are frozen and others are not."""
        return tuple(
            [unit.fqn for unit in self.units if len({p.requires_grad for p in unit.parameters}) > 1]
        )

    @property
    def unused(self) -> frozenset[str]:
        """The fqns of the units that forward skips."""
        idle = frozenset([unit.fqn for unit in self.units]).difference(
            self.wrapped_by.values(), [ROOT]
        )
        in_blocks = self._buffers_in_blocks if idle else idle
        return idle - {
            fqn for fqn in in_blocks if not any(fqn.startswith(f"{block}.") for block in self.idle)
        }

    @property
    def trained(self) -> frozenset[str]:
        """The fqns of the parameters with a gradient: not frozen, needed by the loss, and in blocks
        that forward uses."""
        trained = frozenset(
            [
                parameter.fqn
                for parameter in self.parameters
                if parameter.requires_grad and parameter.in_loss
            ]
        )
        return trained.difference(*map(self.parameters_of, self.idle)) if self.idle else trained

    @property
    def not_in_loss(self) -> tuple[str, ...]:
        """The fqns of the parameters of blocks that are used that the loss does not depend on."""
        return tuple([parameter.fqn for parameter in self.parameters if not parameter.in_loss])

    @property
    def left_out(self) -> tuple[Parameter, ...]:
        """The parameters that need a gradient and get none."""
        trained = self.trained
        return tuple(
            [
                parameter
                for parameter in self.parameters
                if parameter.requires_grad and parameter.fqn not in trained
            ]
        )

    def parameters_of(self, fqn: str) -> list[str]:
        """The fqns of the parameters of the module `fqn`."""
        return [
            parameter.fqn for parameter in self.parameters if parameter.fqn.startswith(f"{fqn}.")
        ]

    @property
    def waits_for_idle(self) -> frozenset[str]:
        """The fqns of the units of several modules of which forward runs some only."""
        waits = (
            {unit.fqn for unit in self.units if not set(self.idle).isdisjoint(unit.modules)}
            if self.idle
            else set()
        )
        return frozenset(waits - self.unused)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones counted once."""
        return sum(parameter.numel for parameter in self.parameters)


def _around(fqn: str) -> list[str]:
    """The fqns of the modules that a parameter lies in, the outermost first."""
    parts = fqn.split(".")
    return [".".join(parts[:index]) for index in range(1, len(parts))]


def _as_registered(model: ModelSpec) -> Iterator[str]:
    """The fqns of parameters in the order of a module that registers its modules, then unit by unit
    units in blocks and parameters.

    A module's own parameters come before those of the modules in it.
    """
    own = [module for module in model.modules if module.unit != ROOT]
    blocks = dict.fromkeys(
        [module.within or module.path for module in own if not module.apart] + list(model.idle)
    )
    numbered = sorted(blocks, key=lambda fqn: int(fqn.rpartition(".")[2]))
    insides = {module.path for module in model.modules if module.inside}
    tree: dict[str, Any] = {}
    for apart in dict.fromkeys(module.path if module.apart else "" for module in own):
        for name in [apart] if apart else numbered:
            _place(tree, name.split("."))
    for unit in model.units:
        if unit.fqn in insides:
            _place(tree, unit.fqn.split("."))
        for parameter in unit.parameters:
            _place(tree, parameter.fqn.split(".")[:-1])[f"{parameter.fqn.rpartition('.')[2]}:"] = (
                None
            )
    yield from _walk(tree, "")


def _place(tree: dict[str, Any], path: list[str]) -> dict[str, Any]:
    for name in path:
        tree = tree.setdefault(name, {})
    return tree


def _walk(tree: dict[str, Any], prefix: str) -> Iterator[str]:
    """Parameters, which have a colon after their names, before what lies in modules."""
    yield from (prefix + name[:-1] for name in tree if name.endswith(":"))
    for name, inner in tree.items():
        if not name.endswith(":"):
            yield from _walk(inner, f"{prefix}{name}.")
