"""Gradients of parameters, and the nodes of autograd's graph that make them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from zreal.tracing.storage_log import StorageLog
from zsim.autograd.lowered import Accumulated


class ParameterGradients:
    """Storages of the gradients of each parameter: those that autograd makes, and the one it keeps,
    perhaps a copy."""

    def __init__(self, log: StorageLog) -> None:
        self.made: dict[str, list[int]] = defaultdict(list)
        self.kept: dict[str, int] = {}
        self.shared: list[str] = []
        """Parameters whose gradient is a part of another's storage, passed on to earlier nodes."""
        self._kept_at: dict[str, int] = {}
        self._log = log
        self.copied: set[str] = set()
        self._arrived: Counter[int] = Counter()
        self._before: dict[str, int] = {}

    @contextmanager
    def hooks(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """The gradients that are kept are noted inside."""
        trained = {
            fqn: parameter for fqn, parameter in parameters.items() if parameter.requires_grad
        }
        handles = [p.register_hook(partial(self._accumulate, fqn)) for fqn, p in trained.items()]
        handles += [
            p.register_post_accumulate_grad_hook(partial(self._keep, fqn))
            for fqn, p in trained.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            in_turn = sorted(self.kept, key=lambda fqn: self._kept_at[fqn])
            # halves of a weight may have one storage
            last = {self.kept[fqn]: self._kept_at[fqn] for fqn in in_turn}
            self.shared = [
                fqn
                for fqn, number in self.kept.items()
                if self._log.last_read.get(number, -1) >= last[number]
            ]

    def follow(self, loss: Tensor, parameters: Mapping[str, nn.Parameter]) -> None:
        """Watch every value of the graph that gets more than one gradient: autograd adds those up.
        """
        names = {id(parameter): fqn for fqn, parameter in parameters.items()}
        edges: dict[tuple[Any, int], list[tuple[Any, int]]] = defaultdict(list)
        for node in nodes(loss.grad_fn):
            for output, (target, number) in enumerate(node.next_functions):
                if target is not None:
                    edges[target, number].append((node, output))
        for value, ((target, _), sources) in enumerate(edges.items()):
            if len(sources) > 1:
                fqn = names.get(id(getattr(target, "variable", None)), "")
                for node, output in sources:
                    node.register_hook(partial(self._arrive, value, output, fqn))

    def _arrive(
        self, value: int, output: int, fqn: str, gradients: tuple[Any, ...], _: Any
    ) -> None:
        if gradients[output] is None:
            return
        self._arrived[value] += 1
        self._log.sums_due += self._arrived[value] > 1
        if fqn:
            self.made[fqn].append(self._log.number(gradients[output]))

    def _accumulate(self, fqn: str, gradient: Tensor | None) -> None:
        if gradient is not None:  # as a Function may return
            self._before[fqn] = self._log.number(gradient)

    def _keep(self, fqn: str, parameter: Tensor) -> None:
        self._log.entries.append((self._log.place, Accumulated(fqn)))
        if parameter.grad is not None:
            self.kept[fqn], self._kept_at[fqn] = (
                self._log.number(parameter.grad), len(self._log.entries),
            )
            (
                self.copied.discard
                if self.kept[fqn] == self._before.pop(fqn, 0)
                else self.copied.add
            )(fqn)


def nodes(first: Any) -> Iterator[Any]:
    """Every node of an autograd graph, once."""
    visited, waiting = {first}, [first]
    while waiting:
        node = waiting.pop()
        yield node
        for target, _ in node.next_functions:
            if target is not None and target not in visited:
                visited.add(target)
                waiting.append(target)
