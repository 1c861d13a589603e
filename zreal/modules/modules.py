"""ModelSpec to nn.Module: a generic interpreter runs the very operators that are simulated.

It drops each value after its last use, as hand-written modules that reassign `x` do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from zreal.modules.checkpointing import checkpointed, checkpointed_whole
from zreal.modules.emulation import Timers
from zreal.modules.initial_values import DTYPES, ModelError, fill, initial
from zreal.modules.operators import apply, seed_by
from zreal.modules.own.deferred import Deferred
from zreal.modules.own.own_module import DEFERRED, OwnModel
from zsim.models.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.models.families.transformers import TransformersModel
from zsim.models.operators import Operator
from zsim.models.repeats import first_runs
from zsim.models.spec import ROOT, ModelSpec, Module
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES
from zsim.strategies.building.parameters import used_parameters

TIED = "weight"
"""Name of a weight of another module in a module that reads it too."""


class SpecModule(nn.Module):
    """One Module of the ModelSpec with its parameters, checkpointed or not.

    A module that the spec lists in parts has `later` ones: its own, and those of nested modules,
    which it calls.
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
        self.timers = Timers()

    @classmethod
    def nested(cls, part: Module, checkpointing: Checkpointing) -> SpecModule:
        """A unit in a block, which reads one of the block's values."""
        (read,) = part.free_inputs
        named = tuple(
            replace(op, inputs=tuple("x" if v == read else v for v in op.inputs))
            for op in part.operators
        )
        module = cls(replace(part, operators=named), checkpointing)
        module.reads = read
        return module

    def parameter(self, fqn: str) -> Tensor | None:
        """The parameter called `fqn` in the whole model, None for ""."""
        own = fqn.removeprefix(f"{self.spec.fqn}.")
        return _lookup(self, own if own != fqn else TIED) if fqn else None

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """The value of the last operator."""
        settings = self.checkpointing
        if settings.mode == "none" or settings.recompute:
            return interpret(self.parts, x, targets, self, recompute=settings.recompute)
        run = partial(interpret, self.parts, targets=targets, owner=self)
        return cast(Tensor, checkpointed_whole(settings, run, x))

    def inner(self, part: Module) -> SpecModule | None:
        """The nested module that runs `part`, None where this one runs it itself."""
        if not part.inside or part.path == self.spec.path:
            return None
        return cast(SpecModule, self.get_submodule(part.path.removeprefix(f"{self.spec.path}.")))


def interpret(
    parts: tuple[Module, ...], x: Tensor, targets: Tensor | None, owner: SpecModule | Model, *,
    recompute: tuple[str, ...] = (),
) -> Tensor:
    """Run the operators of a module's `parts` on `x`; values are dropped after their last use.

    Operators of kinds in `recompute` are checkpointed; parts that are nested modules are called.
    """
    if owner.timers.running:
        used = (owner.parameter(fqn) for part in parts for fqn in used_parameters(part))
        return owner.timers.run(parts[0].path, x, *(own for own in used if own is not None))
    values: dict[str, Tensor] = {"x": x, "tokens": x}
    if targets is not None:
        values["targets"] = targets
    calls: list[Operator | SpecModule] = []
    for part in parts:
        inner = owner.inner(part) if isinstance(owner, SpecModule) else None
        calls += part.operators if inner is None else (inner,)
    last_use = {value: call for call in calls for value in _reads(call)}
    output = ""
    for call in calls:
        reads = _reads(call)
        if not isinstance(call, Operator):  # a nested module, or its wrapper
            output = call.spec.operators[-1].output
            values[output] = call(values[reads[0]])
        else:
            output = call.output
            values[output] = (
                _checkpointed(call, values, owner)
                if call.kind in recompute
                else _apply(call, values, owner)
            )
        for value in dict.fromkeys(reads):
            if last_use[value] is call:
                del values[value]
    owner.timers.note(parts[0].path, values[output])
    return values[output]


def _reads(call: Operator | SpecModule) -> tuple[str, ...]:
    return call.inputs if isinstance(call, Operator) else (call.reads,)


def _checkpointed(op: Operator, values: dict[str, Tensor], owner: SpecModule | Model) -> Tensor:
    return checkpointed(
        lambda *inputs: _apply(op, dict(zip(op.inputs, inputs, strict=True)), owner),
        *(values[name] for name in op.inputs),
    )


def _apply(op: Operator, values: Mapping[str, Tensor], owner: SpecModule | Model) -> Tensor:
    return apply(op, values, weight=owner.parameter(op.weight), bias=owner.parameter(op.bias))


def _lookup(module: nn.Module, path: str) -> Tensor:
    *parents, name = path.split(".")
    for parent in parents:
        module = cast(nn.Module, getattr(module, parent))
    return cast(Tensor, getattr(module, name))


def _register(module: nn.Module, path: str, parameter: nn.Parameter) -> None:
    parents, _, name = path.rpartition(".")
    _made(module, parents).register_parameter(name, parameter)


def _made(module: nn.Module, path: str) -> nn.Module:
    """The module at `path` in `module`; missing ones on the way to it are made."""
    for name in path.split(".") if path else ():
        if not hasattr(module, name):
            setattr(module, name, nn.Module())
        module = cast(nn.Module, getattr(module, name))
    return module


class Model(nn.Module):
    """The whole model: `blocks` with unused ones, modules outside blocks, and the root's own
    parameters, all under their fqns.

    They are registered in forward order, the root's own parameters last, on the meta device.
    """

    blocks: nn.ModuleList

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: torch.dtype = torch.float32,
        checkpointing: Checkpointing = NO_CHECKPOINTING,
    ) -> None:
        super().__init__()
        self.spec = spec
        self._checkpointing = checkpointing
        self._checkpointed = checkpointing.applies_to(spec)
        self.timers = Timers()
        self._drops_out = any(op.dropout for part in spec.modules for op in part.operators)
        self._add_modules()
        for unit in spec.units:
            self._add_nested(unit.fqn)
            for parameter in unit.parameters:
                empty = torch.empty(parameter.shape, dtype=dtype, device="meta")
                made = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                _register(self, parameter.fqn, made)
        for module in spec.modules:
            for tied in module.operators if module.apart else ():
                if tied.weight and not tied.weight.startswith(f"{module.path}."):
                    _register(self, f"{module.path}.{TIED}", self.get_parameter(tied.weight))

    def _add_modules(self) -> None:
        """Add every module that is not nested in another, in forward order, and unused blocks."""
        blocks, modules = nn.ModuleList(), first_runs(self.spec.modules)
        for spec in modules:
            if spec.within not in ("", spec.path):
                continue
            later = tuple(part for part in modules if part.within == spec.path and part is not spec)
            is_checkpointed = spec.fqn in self._checkpointed
            settings = self._checkpointing if is_checkpointed else NO_CHECKPOINTING
            module = SpecModule(spec, settings, later=later)
            if spec.apart:
                self.add_module(spec.fqn, module)
            elif spec.unit != ROOT:
                self.blocks = blocks.append(module)
        for index in sorted(int(fqn.rpartition(".")[2]) for fqn in self.spec.idle):
            blocks.insert(index, nn.Module())  # an unused block only owns its parameters
            self.blocks = blocks

    def _add_nested(self, fqn: str) -> None:
        """Add the unit `fqn` to its block, if it is nested in one."""
        parts = {part.path: part for part in first_runs(self.spec.modules) if part.inside}
        if fqn not in parts:
            return
        part, settings = parts[fqn], NO_CHECKPOINTING  # recomputed with its block, if at all
        if part.within in self._checkpointed and self._checkpointing.recompute:
            settings = self._checkpointing
        parent, _, name = fqn.rpartition(".")
        _made(self, parent).add_module(name, SpecModule.nested(part, settings))

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
        """Run one of the modules of `spec`, or a later run of it."""
        if module is self.spec.modules[0] and self._drops_out:
            seed_by(x)
        if module.unit == ROOT:
            return interpret((module,), x, targets, self)
        return cast(Tensor, self.module_at(module.path)(x))

    def module_at(self, fqn: str) -> nn.Module:
        """The torch module of the spec's module `fqn`, which is not the root's own."""
        return self.get_submodule(fqn)


def build(
    spec: ModelSpec, *, seed: int, dtype: str = "float32",
    checkpointing: Checkpointing = NO_CHECKPOINTING,
) -> Model:
    """The torch module of `spec` in `dtype`, with its initial values; errors are those of `empty`.
    """
    model = empty(spec, seed=seed, dtype=dtype, checkpointing=checkpointing)
    if value := own_values(model):
        for fqn, meta in list(model.named_parameters()):
            if meta.is_meta:
                fill(model, meta, value(fqn).to(DTYPES[dtype]))
        return model
    for parameter in spec.parameters:
        meta = model.get_parameter(parameter.fqn)
        if meta.is_meta:
            fill(model, meta, initial(parameter, seed=seed).to(DTYPES[dtype]))
    return model


def own_values(model: nn.Module) -> Callable[[str], Tensor] | None:
    """The values of parameters of a user's own module on the meta device; None of other modules."""
    deferred: Deferred | None = getattr(model, DEFERRED, None)
    return deferred.parameter if deferred is not None else None


def cast_buffers(model: nn.Module, scenario: Scenario) -> None:
    """Cast floating-point buffers as `Module.to` does, where no unit casts parameters by itself;
    transformers keeps its own as they are."""
    precision = scenario.precision
    casts = STRATEGIES[scenario.strategy].casts(precision)
    if casts or isinstance(getattr(model, "spec", None), TransformersModel):
        return
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(DTYPES[precision.parameters]))


def cast_all(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and floating-point buffers in the order of Module.to, which would discard the
    imaginary parts of complex ones."""
    kept = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in list(module.named_buffers(recurse=False))
        if buffer.is_complex()
    ]
    for module, name, _ in kept:
        setattr(module, name, None)
    model.to(dtype)
    for module, name, buffer in kept:
        setattr(module, name, buffer)


def empty(
    spec: ModelSpec, *, seed: int, dtype: str = "float32",
    checkpointing: Checkpointing = NO_CHECKPOINTING,
) -> Model:
    """The torch module of `spec`, its parameters on the meta device and in `dtype`.

    A user's own module is made as its user makes it, whole or not, with buffers in their dtypes.

    ModelError for a traced model, of which only memory and work are known.
    """
    if isinstance(spec, OwnModel):
        module: Any = spec.own.make(seed)
        module.module_at = module.get_submodule
        for parameter in module.parameters():
            parameter.data = parameter.data.to(DTYPES[dtype])
        return cast(Model, module)
    if any(op.kind == "traced" for module in spec.modules for op in module.operators):
        raise ModelError(
            where=spec.name,
            expected="a preset, a family or a config.json, of which torch can build the module",
            found="a traced model",
            remedy="validate it with --module mypackage.mymodel:build, which makes the module",
        )
    if isinstance(spec, TransformersModel):
        from zreal.modules import transformers  # needs an extra

        return cast(
            Model, transformers.build(spec, dtype=dtype, checkpointing=checkpointing)
        )
    return Model(spec, dtype=DTYPES[dtype], checkpointing=checkpointing)
