"""Hook events: the order in which the hooks of units fire around the modules of a micro-batch.

FSDP1 and FSDP2 share it, and differ in the work of each hook. A unit begins with the first of its
modules and ends with the last, in each run (model.uses). Nested units do so inside their block. A
unit with a skipped module (model.unused) begins with the first that runs, and ends with the root's
forward. Source: torch/distributed/fsdp/_fully_shard/_fsdp_state.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from zsim.autograd.lowered import LoweredModule
from zsim.autograd.traced.model import LOSS_MODULE
from zsim.models.spec import ROOT, ModelSpec, run_of, without_run
from zsim.strategies.building.parameters import used_parameters
from zsim.strategies.building.training import Training


@dataclass(frozen=True, slots=True)
class PreForward:
    """`unit` is called; `module` runs next."""

    unit: str
    module: LoweredModule


@dataclass(frozen=True, slots=True)
class ModuleRun:
    """`module` runs forward or backward; `returns`: a hook after forward fires next."""

    module: LoweredModule
    returns: bool = False


@dataclass(frozen=True, slots=True)
class PostForward:
    """`unit` returns after `module`; `at_root`: with the root's forward."""

    unit: str
    module: LoweredModule
    at_root: bool = False


@dataclass(frozen=True, slots=True)
class PreBackward:
    """The gradient of an output of `unit` is there; the backward of `module` runs next."""

    unit: str
    module: LoweredModule


@dataclass(frozen=True, slots=True)
class PostBackward:
    """The gradient of the input of `unit` is there, after the backward of `module`."""

    unit: str
    module: LoweredModule


ForwardHookEvent = PreForward | ModuleRun | PostForward
BackwardHookEvent = PreBackward | ModuleRun | PostBackward


class HookEvents(NamedTuple):
    """The events of a training's forwards and backwards, in issue order."""

    training: Training
    root: tuple[str, ...]
    """The root, if it has a param group."""
    root_modules: frozenset[str]
    """The modules that the root runs itself, if it has a param group."""
    begins: dict[str, str]
    """Units by the module that they are called with, but for the root."""
    ends: dict[str, str]
    """Units by the module after which they return, but for the root."""
    incomplete: tuple[str, ...]
    """The units that wait for a skipped module, in reverse order, as torch lists them."""

    def forward(self, modules: tuple[LoweredModule, ...]) -> Iterator[ForwardHookEvent]:
        """The events of one forward: those of the root first and last. Its caller then runs the
        modules `after_root`."""
        modules = tuple([module for module in modules if not module.after_root])
        for root in self.root:
            yield PreForward(root, modules[0])
        for module in modules:
            if unit := self.begins.get(module.fqn):
                yield PreForward(unit, module)
            unit = self.ends.get(module.fqn)
            yield ModuleRun(module, returns=unit is not None or module is modules[-1])
            if unit is not None:
                yield PostForward(unit, module)
        for unit in (*self.root, *self.incomplete):
            yield PostForward(unit, modules[-1], at_root=True)

    def backward(self) -> Iterator[BackwardHookEvent]:
        """The events of the backward of all forwards of a micro-batch.

        A block that returns the output of a nested unit has no node of its own after it: its hook
        on that output fires second.
        """
        last = {
            [module.fqn for module in modules if not module.after_root][-1]
            for modules in self.training.forwards
        }
        returned: list[str] = []
        loss_is_inner = True
        for module in self.training.backward_modules:
            if module.after_root:
                yield ModuleRun(module)
                returned, loss_is_inner = [*self.root], module.returns_inner_output
                continue
            if not loss_is_inner:
                yield from (PreBackward(unit, module) for unit in returned)
                returned, loss_is_inner = [], True
            if module.fqn in self.root_modules:
                returned = [ROOT, *(unit for unit in returned if unit != ROOT)]
            elif module.fqn in self.ends:
                returned.insert(0, self.ends[module.fqn])
            if not module.returns_inner_output:
                yield from (PreBackward(unit, module) for unit in returned)
                returned = []
            if module.fqn in last:
                yield from (PreBackward(unit, module) for unit in self.incomplete)
            yield ModuleRun(module)
            if module.fqn in self.begins and module.input_needs_gradient:
                yield PostBackward(self.begins[module.fqn], module)


def traced_problems(model: ModelSpec) -> Iterator[str]:
    """Refusals of both FSDPs: scalar parameters, and a loss that reads what may be sharded again by
    then."""
    scalars = [parameter.fqn for parameter in model.parameters if not parameter.shape]
    if scalars:
        yield (
            f"model.traced: torch's FSDP takes no scalar parameters, and {scalars[0]} is one; give "
            "it the shape (1,), or use ddp"
        )
    read = [fqn for m in model.modules if m.fqn == LOSS_MODULE for fqn in used_parameters(m)]
    if read:
        yield (
            f"model.traced: the loss reads {read[0]} after the module has returned, when it may be "
            "sharded again; compute that in the module's forward, or use ddp"
        )


def hook_events(training: Training, units: Collection[str]) -> HookEvents:
    """The hook events of `training`, of whose model `units` have a param group."""
    model = training.model
    unit_of = {fqn: unit for fqn, unit in model.wrapped_by.items() if unit in units}
    own = {fqn: unit for fqn, unit in unit_of.items() if unit != ROOT}
    incomplete = model.waits_for_idle
    first_runs = [f for f, unit in own.items() if not run_of(f) and unit not in incomplete]
    first = {own[fqn]: fqn for fqn in reversed(first_runs)}
    last = {own[fqn]: fqn for fqn in first_runs}
    begins = {f: unit for f, unit in own.items() if without_run(f) == first.get(unit)}
    for modules in training.forwards if incomplete else ():
        called = {own[m.fqn]: m.fqn for m in modules[::-1] if m.fqn in own}
        begins |= {fqn: unit for unit, fqn in called.items() if unit in incomplete}
    return HookEvents(
        training=training,
        root_modules=frozenset(fqn for fqn, unit in unit_of.items() if unit == ROOT),
        root=tuple(unit for unit in units if unit == ROOT),
        begins=begins,
        ends={f: unit for f, unit in own.items() if without_run(f) == last.get(unit)},
        incomplete=tuple(unit for unit in reversed(tuple(units)) if unit in incomplete),
    )
