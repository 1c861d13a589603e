"""Calls of modules in a forward, as DeepSpeed's hooks see them: the root, each block, and each
module that owns parameters.

Each module's input and output pass through an autograd node of their own. Nodes run in the reverse
of the order in which they were made, so a backward is a forward read from its end.
Source: deepspeed/runtime/zero/parameter_offload.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zsim.autograd.lowered import LoweredModule, storage_events
from zsim.ir.ops import MemoryEvent
from zsim.models.called_modules import containers
from zsim.models.spec import ROOT, Module
from zsim.strategies.building.training import Training


@dataclass(frozen=True, slots=True)
class Called:
    """`module` is called; in a backward its input has its gradient, if that needs one.

    `differentiates`: its output needs one; else it has no backward. `adds`: memory of adding the
    input's gradient to others of the same value.
    """

    module: str
    input_needs_gradient: bool
    differentiates: bool = True
    adds: tuple[MemoryEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class Returned:
    """`module` returns; in a backward the gradient of its output is there, if that needs one."""

    module: str
    differentiates: bool = True


ModuleCall = Called | LoweredModule | Returned


def module_calls(training: Training) -> tuple[ModuleCall, ...]:
    """The calls of a forward, with the modules that compute in between."""
    return (Called(ROOT, False), *_calls(training), Returned(ROOT))


def _calls(training: Training) -> Iterator[ModuleCall]:
    pairs = list(zip(training.model.modules, training.modules, strict=True))
    around = containers(training.model)
    outputs = {
        outer: lowered.differentiates for module, lowered in pairs for outer in around[module.fqn]
    }
    stack = tuple[str, ...]()
    for module, lowered in pairs:
        yield from (Returned(each, outputs[each]) for each in _left(stack, around[module.fqn]))
        for each in _left(around[module.fqn], stack)[::-1]:
            yield Called(each, lowered.input_needs_gradient, outputs[each])
        stack = around[module.fqn]
        if _is_called(module):
            yield _call(module, lowered)
        yield lowered
        if _is_called(module):
            yield Returned(module.path, _call(module, lowered).differentiates)
    yield from (Returned(each, outputs[each]) for each in stack[::-1])


def _left(before: tuple[str, ...], after: tuple[str, ...]) -> tuple[str, ...]:
    """The modules around something that are not around the next thing, innermost first."""
    return tuple(each for each in before[::-1] if each not in after)


def _call(module: Module, lowered: LoweredModule) -> Called:
    """The call of a module. Tables of rotary positions are constants, and places of tokens are
    integers."""
    kind = module.operators[0].kind
    return Called(
        module.path, lowered.input_needs_gradient and kind != "position_embedding",
        lowered.differentiates and kind != "rotary_tables",
        tuple(storage_events(lowered.events_after_hook)),
    )


def _is_called(module: Module) -> bool:
    """True for a module that is no part of a block, and that the root does not run itself."""
    return module.inside or module.apart or (not module.within and module.unit != ROOT)
