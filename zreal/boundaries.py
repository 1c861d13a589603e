"""Where one unit of a module ends and the next begins, in forward and in backward, as fully_shard sees it.

A unit's backward begins when a gradient of its output arrives and ends when those of its inputs are complete: the same hooks
and the same identity function that torch puts there. Here too: which gradients of parameters come from where.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zreal.storages import Place, StorageLog
from zreal.untraceable import UntraceableError
from zsim.model import ROOT


class _InputsDone(torch.autograd.Function):
    """Identity on a unit's inputs; its backward says that the unit's is over."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.done = done
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.done()
        return (None, *gradients)


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with every tensor in its tuples, lists and dicts mapped."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(function, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(function, item) for item in value)
    if type(value) is dict:
        return {key: mapped(function, item) for key, item in value.items()}
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a module's arguments or output: tuples, lists and mappings, ModelOutput among them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


def cast_floats(value: Any, dtype: torch.dtype | None) -> Any:
    """`value` with floating-point tensors in `dtype`, as fully_shard casts a module's inputs; None casts nothing."""
    if dtype is None:
        return value
    return mapped(lambda t: t.to(dtype) if t.is_floating_point() else t, value)


class Boundaries:
    """Follows the units of a module and tells the log its place. `order` are the units as forward met them.

    `constant` are the places of those whose output needs no gradient, as nothing up to them is trained: they have no backward.
    """

    def __init__(self, log: StorageLog, *, units: Mapping[str, nn.Module], dtype: torch.dtype | None) -> None:
        self.log = log
        self.order: list[str] = []
        self.needs_gradient: list[bool] = []
        self.begun: set[int] = set()
        self.constant: set[int] = set()
        self._units = units
        self._dtype = dtype

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Every unit watched inside."""
        handles: list[Any] = []
        for fqn, module in self._units.items():
            before = partial(self._before, fqn)
            handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(self._after))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin_backward(self) -> None:
        """Forward is over: UntraceableError for a unit that did not run."""
        for fqn in self._units:
            if fqn not in self.order:
                raise UntraceableError(
                    where=fqn,
                    expected="every unit to run in forward",
                    found="it did not run, or not by being called",
                    remedy="leave it out of units: it then belongs to the root",
                )
        self.log.place = Place(backward=True, unit=len(self.order), inside=False)

    def end_backward(self) -> None:
        """Backward is over: UntraceableError for a unit whose backward nobody saw begin."""
        for place, fqn in enumerate(self.order):
            if place not in self.begun | self.constant:
                raise UntraceableError(
                    where=fqn,
                    expected="the gradient of the unit's output",
                    found="none",
                    remedy="return tensors, or tuples, lists and dicts of them, that the loss depends on",
                )

    def _before(self, fqn: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.log.place.backward:  # recomputed by activation checkpointing
            self._require_own_backward(fqn)
            return cast_floats((args, kwargs), self._dtype)
        if self.log.place.inside or fqn in self.order:
            found = "a second run of it" if fqn in self.order else f"a run of it inside {self.order[-1]}"
            raise UntraceableError(
                where=fqn,
                expected="units that run one after another, each once",
                found=found,
                remedy="make the outer module the unit, or leave this one to the root",
            )
        self.order.append(fqn)
        self.log.place = Place(backward=False, unit=len(self.order) - 1, inside=True)
        args, kwargs = cast_floats((args, kwargs), self._dtype)
        wanted = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        self.needs_gradient.append(bool(wanted))
        if not wanted:
            return args, kwargs
        marked = iter(_InputsDone.apply(partial(self._end, len(self.order) - 1), *wanted))
        return mapped(lambda tensor: next(marked) if tensor.requires_grad else tensor, (args, kwargs))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.log.place.backward:
            return
        unit = self.log.place.unit
        wanted = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        for tensor in wanted:
            tensor.register_hook(partial(self.gradient_arrives, unit))
        if not wanted and not any(p.requires_grad for p in module.parameters()) and not self.needs_gradient[unit]:
            self.constant.add(unit)
        self.log.place = Place(backward=False, unit=unit + 1, inside=False)

    def gradient_arrives(self, unit: int, gradient: Tensor) -> None:
        """A gradient of a unit's output is there: its backward begins. UntraceableError when it is not its turn."""
        if unit in self.begun:
            return
        place = self.log.place
        if place.unit != unit + 1 or (place.inside and self.needs_gradient[place.unit]):
            self._refuse_order(unit)
        self.begun.add(unit)
        self.log.place = Place(backward=True, unit=unit, inside=True)

    def _end(self, unit: int) -> None:
        if self.log.place != Place(backward=True, unit=unit, inside=True):
            self._refuse_order(unit)
        self.log.place = Place(backward=True, unit=unit, inside=False)

    def _require_own_backward(self, fqn: str) -> None:
        place = self.log.place
        if not place.inside or self.order[place.unit] != fqn:
            raise UntraceableError(
                where=fqn,
                expected="a unit that is recomputed in its own backward",
                found=f"one recomputed in that of {self.order[place.unit] if place.inside else ROOT}",
                remedy="checkpoint the unit itself, or parts inside it, and not more",
            )

    def _refuse_order(self, unit: int) -> None:
        raise UntraceableError(
            where=self.order[unit],
            expected="units whose backward runs in the reverse order of forward",
            found="another order: the unit's backward overlaps with that of a unit beside it",
            remedy="make the module that contains both the unit",
        )


class ParameterGradients:
    """Which storages are gradients of which parameter: those that autograd makes, and the one it keeps."""

    def __init__(self, log: StorageLog) -> None:
        self.made: dict[str, list[int]] = defaultdict(list)
        self.kept: dict[str, int] = {}
        self._log = log
        self._arrived: Counter[int] = Counter()

    @contextmanager
    def hooks(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """The gradients that are kept are noted inside."""
        trained = {fqn: parameter for fqn, parameter in parameters.items() if parameter.requires_grad}
        handles = [p.register_post_accumulate_grad_hook(partial(self._keep, fqn)) for fqn, p in trained.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def follow(self, loss: Tensor, parameters: Mapping[str, nn.Parameter]) -> None:
        """Watch every value of the graph that gets more than one gradient: autograd adds those up."""
        names = {id(parameter): fqn for fqn, parameter in parameters.items()}
        edges: dict[tuple[Any, int], list[tuple[Any, int]]] = defaultdict(list)
        for node in _nodes(loss.grad_fn):
            for place, (target, number) in enumerate(node.next_functions):
                if target is not None:
                    edges[target, number].append((node, place))
        for value, ((target, _), sources) in enumerate(edges.items()):
            if len(sources) > 1:
                fqn = names.get(id(getattr(target, "variable", None)), "")
                for node, place in sources:
                    node.register_hook(partial(self._arrive, value, place, fqn))

    def _arrive(self, value: int, place: int, fqn: str, gradients: tuple[Any, ...], _: Any) -> None:
        if gradients[place] is None:
            return
        self._arrived[value] += 1
        self._log.sums_due += self._arrived[value] > 1
        if fqn:
            self.made[fqn].append(self._log.number(gradients[place]))

    def _keep(self, fqn: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.kept[fqn] = self._log.number(parameter.grad)


def _nodes(first: Any) -> Iterator[Any]:
    """Every node of an autograd graph, once."""
    seen, waiting = {first}, [first]
    while waiting:
        node = waiting.pop()
        yield node
        for target, _ in node.next_functions:
            if target is not None and target not in seen:
                seen.add(target)
                waiting.append(target)
