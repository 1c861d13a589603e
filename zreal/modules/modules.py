"""ModelSpec to nn.Module: one generic interpreter over operators, so that what is simulated is what
runs.

Python drops each value after its last use, as hand-written modules that reassign `x` do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from zreal.modules.checkpointing import as_asked, recomputed
from zreal.modules.initial_values import DTYPES, ModelError, initial
from zreal.modules.operators import apply
from zsim.models.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.models.families.transformers import TransformersModel
from zsim.models.operators import Operator
from zsim.models.repeats import first_runs
from zsim.models.spec import ROOT, ModelSpec, Module


class Stretch(nn.Module):
    """One Module of the ModelSpec, checkpointed or not. Parameters of blocks live in the stretch
    itself.

    One that stands in the spec in parts has `later` ones: its own, and those of stretches in it,
    which are called.
    """

    def __init__(
        self, module: Module, checkpointing: Checkpointing = NO_CHECKPOINTING, *,
        later: tuple[Module, ...] = (),
    ) -> None:
        super().__init__()
        self.spec = module
        self.checkpointing = checkpointing
        self.parts = (module, *later)
        self.reads = "x"

    @classmethod
    def inside(cls, part: Module, checkpointing: Checkpointing) -> Stretch:
        """A unit in a block, which reads one of the block's values."""
        (read,) = part.given
        named = tuple(
            replace(op, inputs=tuple("x" if v == read else v for v in op.inputs))
            for op in part.operators
        )
        found = cls(replace(part, operators=named), checkpointing)
        found.reads = read
        return found

    def parameter(self, fqn: str) -> Tensor | None:
        """The parameter called `fqn` in the whole model, None for ""."""
        return _lookup(self, fqn.removeprefix(f"{self.spec.fqn}.")) if fqn else None

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """The value of the last operator."""
        asked = self.checkpointing
        if asked.mode == "none" or asked.recompute:
            return interpret(self.parts, x, targets, self, again=asked.recompute)
        return as_asked(asked, lambda value: interpret(self.parts, value, targets, self), x)

    def inner(self, part: Module) -> Stretch | None:
        """The stretch in this one that runs `part`, None where this one does so itself."""
        if not part.inside or part.path == self.spec.path:
            return None
        return cast(Stretch, self.get_submodule(part.path.removeprefix(f"{self.spec.path}.")))


def interpret(
    parts: tuple[Module, ...], x: Tensor, targets: Tensor | None, owner: Stretch | Model, *,
    again: tuple[str, ...] = (),
) -> Tensor:
    """Run the operators of a module's `parts` on `x`; values are dropped after their last use.

    Operators of kinds in `again` are checkpointed; parts that are stretches in `owner` are called.
    """
    values: dict[str, Tensor] = {"x": x, "tokens": x}
    if targets is not None:
        values["targets"] = targets
    calls: list[Operator | Stretch] = []
    for part in parts:
        inner = owner.inner(part) if isinstance(owner, Stretch) else None
        calls += part.operators if inner is None else (inner,)
    last_use = {value: call for call in calls for value in _reads(call)}
    output = ""
    for call in calls:
        reads = _reads(call)
        if not isinstance(call, Operator):  # a stretch, or what wraps it
            output = call.spec.operators[-1].output
            values[output] = call(values[reads[0]])
        else:
            output = call.output
            values[output] = (
                _checkpointed(call, values, owner)
                if call.kind in again
                else _apply(call, values, owner)
            )
        for value in dict.fromkeys(reads):
            if last_use[value] is call:
                del values[value]
    return values[output]


def _reads(call: Operator | Stretch) -> tuple[str, ...]:
    return call.inputs if isinstance(call, Operator) else (call.reads,)


def _checkpointed(op: Operator, values: dict[str, Tensor], owner: Stretch | Model) -> Tensor:
    return recomputed(
        lambda *inputs: _apply(op, dict(zip(op.inputs, inputs, strict=True)), owner),
        *(values[name] for name in op.inputs),
    )


def _apply(op: Operator, values: Mapping[str, Tensor], owner: Stretch | Model) -> Tensor:
    return apply(op, values, weight=owner.parameter(op.weight), bias=owner.parameter(op.bias))


def _lookup(module: nn.Module, path: str) -> Tensor:
    *parents, name = path.split(".")
    for parent in parents:
        module = cast(nn.Module, getattr(module, parent))
    return cast(Tensor, getattr(module, name))


def _place(module: nn.Module, path: str, parameter: nn.Parameter) -> None:
    parents, _, name = path.rpartition(".")
    _made(module, parents).register_parameter(name, parameter)


def _made(module: nn.Module, path: str) -> nn.Module:
    """The module called `path` in `module`, made with what it lies in where it is not there."""
    for name in path.split(".") if path else ():
        if not hasattr(module, name):
            setattr(module, name, nn.Module())
        module = cast(nn.Module, getattr(module, name))
    return module


class Model(nn.Module):
    """The whole model: blocks in `blocks`, unused ones too, stretches apart and the root's own
    parameters under their fqns in itself.

    They are registered in forward order, the root's own parameters last.
    """

    blocks: nn.ModuleList

    def __init__(
        self,
        spec: ModelSpec,
        *,
        seed: int,
        dtype: torch.dtype = torch.float32,
        checkpointing: Checkpointing = NO_CHECKPOINTING,
    ) -> None:
        super().__init__()
        self.spec = spec
        again = checkpointing.applies_to(spec)
        blocks = nn.ModuleList()
        modules = first_runs(spec.modules)
        parts = {module.path: module for module in modules if module.inside}
        for module in modules:
            if module.within not in ("", module.path):
                continue
            later = tuple(
                part for part in modules if part.within == module.path and part is not module
            )
            stretch = Stretch(
                module, checkpointing if module.fqn in again else NO_CHECKPOINTING, later=later
            )
            if module.apart:
                self.add_module(module.fqn, stretch)
            elif module.unit != ROOT:
                self.blocks = blocks.append(stretch)
        for place in sorted(
            int(fqn.rpartition(".")[2]) for fqn in spec.idle
        ):  # these only own their parameters
            blocks.insert(place, nn.Module())
            self.blocks = blocks
        for unit in spec.units:
            if unit.fqn in parts:
                part = parts[unit.fqn]
                # else it is recomputed with its block
                by_itself = part.within in again and checkpointing.recompute
                own = Stretch.inside(part, checkpointing if by_itself else NO_CHECKPOINTING)
                outside, _, name = unit.fqn.rpartition(".")
                _made(self, outside).add_module(name, own)
            for parameter in unit.parameters:
                made = nn.Parameter(
                    initial(parameter, seed=seed).to(dtype), requires_grad=parameter.requires_grad
                )
                _place(self, parameter.fqn, made)

    def parameter(self, fqn: str) -> Tensor | None:
        """The root's parameter `fqn`, None for ""."""
        return _lookup(self, fqn) if fqn else None

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss of tokens (or, for mlp, floats) `x` against `targets`."""
        for module in self.spec.modules:
            if module.within in ("", module.path):
                x = self.run(module, x, targets)
        return x

    def run(self, module: Module, x: Tensor, targets: Tensor) -> Tensor:
        """One of the modules of `spec`, or a later run of it: by the stretch that it is, or by the
        root itself."""
        if module.unit == ROOT:
            return interpret((module,), x, targets, self)
        return cast(Tensor, self.stretch(module.path)(x))

    def stretch(self, fqn: str) -> nn.Module:
        """The real module of the spec's module `fqn`, which is not the root's own."""
        return self.get_submodule(fqn)


def build(
    spec: ModelSpec, *, seed: int, dtype: str = "float32",
    checkpointing: Checkpointing = NO_CHECKPOINTING,
) -> Model:
    """The real module of `spec`, in `dtype`; ModelError for a traced one, of which only its memory
    and work are known."""
    if any(op.kind == "traced" for module in spec.modules for op in module.operators):
        raise ModelError(
            where=spec.name,
            expected="a preset, a family or a config.json, of which torch can build the module",
            found="a traced model",
            remedy="simulate it, and compare with a run of your own module",
        )
    if isinstance(spec, TransformersModel):
        from zreal.modules import transformers  # needs an extra

        return cast(
            Model, transformers.build(spec, seed=seed, dtype=dtype, checkpointing=checkpointing)
        )
    return Model(spec, seed=seed, dtype=DTYPES[dtype], checkpointing=checkpointing)
