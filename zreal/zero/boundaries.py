"""Boundaries between the units of a user's module while it trains, under the names of its trace.

Forward is seen by hooks of the units, backward at the last node that a stretch has made. The tracer
looks for it there too: no tensor is added, and none is kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from zreal import torch_private
from zreal.tracing.gradients.parameter_gradients import nodes
from zreal.tracing.module_values import tensors_in
from zsim.models.spec import PART, ROOT, numbered


@dataclass(slots=True, kw_only=True)
class LiveBoundaries:
    """Tells `enter_forward` and `enter_backward` the stretch that begins, by the fqn that its trace
    gives it. Stretches that are not `known` do nothing, and belong to the one before them."""

    units: Mapping[str, nn.Module]
    known: Collection[str]
    enter_forward: Callable[[str], None]
    enter_backward: Callable[[str], None]
    active: bool = False
    """True inside a forward that trains. In backward, where activation checkpointing calls units
    again, nothing is followed."""
    _open: list[str] = field(default_factory=list)
    _parts: Counter[str] = field(default_factory=Counter)
    _runs: Counter[str] = field(default_factory=Counter)
    _since: list[int] = field(default_factory=list)
    _stretches: list[str] = field(default_factory=list)

    def watch(self) -> None:
        """Register the hooks of every unit."""
        for fqn, module in self.units.items():
            module.register_forward_pre_hook(partial(self._before, fqn), prepend=True)
            module.register_forward_hook(partial(self._after, fqn))

    def begin(self) -> None:
        """The model is called: its first stretch is the root's."""
        self.active = True
        self._open, self._parts, self._runs = [], Counter(), Counter()
        self._since, self._stretches = [], []
        self._enter(ROOT)

    def end(self, output: Any) -> None:
        """The model has returned `output`: watch its graph for the beginning of each stretch's
        backward.

        The loss may leave tensors of it out, so each tells its own beginning; stretches that have
        begun do not begin again.
        """
        self.active = False
        watched = {
            (stretch, node)
            for tensor in tensors_in(output) if tensor.grad_fn is not None
            for stretch, node in self._last_nodes(tensor.grad_fn).items() if stretch >= 0
        }
        for stretch, node in watched:
            node.register_prehook(partial(self._arrive_at, self._stretches[stretch]))

    def _last_nodes(self, grad_fn: Any) -> dict[int, Any]:
        """The last node in the graph of `grad_fn` that each stretch has made."""
        last: dict[int, tuple[int, Any]] = {}
        for node in nodes(grad_fn):
            if not hasattr(node, "variable"):
                number = torch_private.sequence_number(node)
                stretch = bisect_right(self._since, number) - 1
                last[stretch] = max(
                    last.get(stretch, (-1, None)), (number, node), key=lambda pair: pair[0]
                )
        return {stretch: node for stretch, (_, node) in last.items()}

    def _arrive_at(self, fqn: str, gradients: Any) -> None:
        self.enter_backward(fqn)

    def _before(self, fqn: str, module: nn.Module, args: Any) -> None:
        if self.active:
            self._open.append(fqn)
            self._runs[fqn] += 1
            self._parts[fqn] = 0
            self._enter(fqn)

    def _after(self, fqn: str, module: nn.Module, args: Any, output: Any) -> None:
        if self.active:
            self._open.pop()
            self._enter(self._open[-1] if self._open else ROOT)

    def _enter(self, unit: str) -> None:
        name = f"{ROOT}.{self._runs.total()}"
        if unit != ROOT:
            self._parts[unit] += 1
            name = numbered(numbered(unit, self._parts[unit], PART), self._runs[unit])
        if name in self.known:
            self._since.append(torch_private.next_sequence_number())
            self._stretches.append(name)
            self.enter_forward(name)
