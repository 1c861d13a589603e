"""Boundaries between units of a module, in forward and in backward, as fully_shard sees them.

Under fully_shard a unit's backward begins when a gradient of its output arrives. It ends when those
of its inputs are complete. The tracer puts torch's own hooks and identity function there. Other
strategies put nothing there: a unit's backward is then that of the nodes that its forward made.
The engine takes nodes from the last made to the first, so it begins with the last of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zreal import torch_private
from zreal.tracing.errors import refuse
from zreal.tracing.fakes.changed_views import require_unchanged
from zreal.tracing.gradients.parameter_gradients import nodes
from zreal.tracing.module_values import cast_floats, mapped, tensors_in
from zreal.tracing.storage_log import CalledAgain, Died, Place, StorageLog
from zsim.autograd.lowered import UnitHooks
from zsim.models.spec import ROOT


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


@dataclass(frozen=True, slots=True)
class Visit:
    """A piece of forward between two hooks, and its unit.

    `begins`: the first piece of the unit. `needs_gradient`: some input of the unit needs one.
    `returns_inner_output`: the last piece of a unit, which returns the output of a unit in it.
    `after_root`: the whole module has returned, and its caller makes the loss.
    """

    unit: str
    begins: bool = False
    needs_gradient: bool = False
    returns_inner_output: bool = False
    after_root: bool = False


class Boundaries:
    """Follows the units of a module and tells the log its place.

    - `visits`: the stretches in the order of forward. A nested unit cuts the outer one's in two.
    - `constant`: the last stretches of units without backward. Nothing up to them is trained, or
      their output has no part in the loss.
    - `unit_hooks`: those of the strategy. Hooks make a difference where they cast (`casts`), where
      they sum gradients of their own (`keeps_apart`), and where backward leaves a unit whose end no
      hook sees (`passes_by`).
    """

    def __init__(
        self,
        log: StorageLog,
        *,
        model: nn.Module,
        units: Mapping[str, nn.Module],
        dtype: torch.dtype | None,
        unit_hooks: UnitHooks = "fully_shard",
    ) -> None:
        self.log = log
        self.visits: list[Visit] = [Visit(ROOT)]
        self.begun: set[int] = set()
        self.constant: set[int] = set()
        self._ends: dict[int, int] = {}
        self._differentiable: set[int] = set()
        self._open: list[int] = []
        self._idle: set[int] = set()
        self._model = model
        self._units = units
        self._hooked = unit_hooks == "fully_shard"
        self._dtype = dtype if self._hooked else None
        self._since = [0]
        self.casts = self.keeps_apart = self.passes_by = False
        self._forward_is_over = False
        self._handles: list[Any] = []

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Every unit watched inside, and the return of the whole module."""
        handles = self._handles
        for fqn, module in self._units.items():
            before = partial(self._before, fqn)
            handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(partial(self._after, fqn)))
        handles.append(self._model.register_forward_hook(self._root_returns))
        try:
            yield
        finally:
            while handles:
                handles.pop().remove()

    def is_running(self, fqn: str) -> bool:
        """True while forward is inside the unit; in backward always."""
        return self.log.place.backward or any(
            self.visits[index].unit == fqn for index in self._open
        )

    @property
    def differs(self) -> bool:
        """True if other things may happen without hooks."""
        return self.casts or self.keeps_apart or self.passes_by

    def leave_autocast(self) -> None:
        """Forward is over, and autocast about to drop what it has cached: that has a place of its
        own."""
        self.log.place = Place(backward=False, stretch=len(self.visits))

    def begin_backward(self, loss: Tensor) -> None:
        """Forward is over, and has made `loss`: UntraceableError for a unit that did not run,
        unless nobody has read what it owns."""
        self._forward_is_over = True
        run, read = (
            {visit.unit for visit in self.visits},
            {fqn for reads in self.log.reads.values() for fqn in reads},
        )
        for fqn in self._units:
            if fqn not in run and any(parameter.startswith(f"{fqn}.") for parameter in read):
                raise refuse(
                    fqn, "every unit to run in forward",
                    "a unit that did not run, or not by being called",
                    "leave it out of units: it then belongs to the root",
                )
        worked = {at.stretch for at, entry in self.log.entries if not isinstance(entry, Died)}
        self._idle = set(range(len(self.visits))) - worked
        last = len(self.visits) - 1
        if last in self._idle:  # the loss is an output: backward begins in the root
            last -= 1
            self.begun.add(last)
        self.log.place = Place(backward=True, stretch=last)
        made = [*self._made(loss)]
        reached = {stretch for stretch, _, _ in made}
        for index in range(len(self.visits) - 2, len(self.visits)):
            inner = len(self.visits) - 2 not in reached  # the root has put no node behind a unit's
            self.visits[index] = replace(self.visits[index], returns_inner_output=inner)
        self._pass_by(reached)
        if self._hooked:
            self._unhook_detached(loss)
            self.passes_by = any(
                v.begins and not v.needs_gradient and index > min(reached)
                for index, v in enumerate(self.visits)
            )
            self.keeps_apart = _keeps_apart(loss)
        else:
            self._follow(made)

    def _made(self, loss: Tensor) -> Iterator[tuple[int, int, Any]]:
        """The nodes that backward comes to: the stretch that has made each in forward, its number,
        and the node."""
        for node in nodes(loss.grad_fn):
            if not hasattr(node, "variable"):  # which accumulates, as soon as it can
                number = torch_private.sequence_number(node)
                yield bisect_right(self._since, number) - 1, number, node

    def _pass_by(self, reached: set[int]) -> None:
        """Runs of units with nothing of theirs in the loss, as their output was detached, have no
        backward: no gradient arrives there."""
        dead = {
            first
            for first in self._differentiable
            if reached.isdisjoint(range(first, self._ends[first] + 1))
        }
        for first in dead:
            around = [
                other
                for other, last in self._ends.items()
                if other < first and self._ends[first] < last
            ]
            if not dead.issuperset(around):
                raise refuse(
                    self.visits[first].unit,
                    "a unit in a unit to have a part in the loss wherever it runs",
                    "a run whose output is detached, or goes no way into the loss",
                    "leave it out of units: it then belongs to the unit that it lies in",
                )
            self.constant.add(self._ends[first])
            self.visits[first] = replace(self.visits[first], needs_gradient=False)

    def _unhook_detached(self, loss: Tensor) -> None:
        """A unit may detach what it was called with: no gradient then comes to the hook on its
        inputs, and nobody sees its backward end."""
        reached = {node.done.args[0] for node in nodes(loss.grad_fn) if _is_hook(node)}
        for index, visit in enumerate(self.visits):
            if visit.needs_gradient and index not in reached:
                self.visits[index] = replace(visit, needs_gradient=False)

    def _follow(self, made: Iterable[tuple[int, int, Any]]) -> None:
        """Watch the first node of each stretch in backward, the last one of it made in forward."""
        last: dict[int, tuple[int, Any]] = {}
        for stretch, number, node in made:
            last[stretch] = max(
                last.get(stretch, (-1, None)), (number, node), key=lambda pair: pair[0]
            )
        for stretch, (_, node) in last.items():
            self.begun.add(stretch)
            node.register_prehook(partial(self._arrive_at, stretch))

    def _arrive_at(self, stretch: int, gradients: Any) -> None:
        self.log.place = Place(backward=True, stretch=stretch)

    def end_backward(self) -> None:
        """Backward is over: UntraceableError for a unit whose backward no hook saw begin."""
        for first, last in self._ends.items() if self._hooked else ():
            if last not in self.begun | self.constant:
                raise refuse(
                    self.visits[first].unit, "the gradient of the unit's output", "none",
                    "return tensors, or tuples, lists and dicts of them, that the loss "
                    "depends on; a unit that runs under no_grad must be frozen",
                )

    def _before(self, fqn: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.log.place.backward:  # recomputed by activation checkpointing
            self._require_own_backward(fqn)
            self._call_again(fqn, returns=False)
            return cast_floats((args, kwargs), self._dtype)
        self._require_own_place(fqn)
        inputs = [*tensors_in((args, kwargs))]
        args, kwargs = cast_floats((args, kwargs), self._dtype)
        self.casts |= any(
            old is not new for old, new in zip(inputs, tensors_in((args, kwargs)), strict=True)
        )
        del inputs
        wanted = [
            tensor
            for tensor in tensors_in((args, kwargs))
            if tensor.requires_grad and torch.is_grad_enabled()
        ]
        index = self._visit(Visit(fqn, begins=True, needs_gradient=bool(wanted)))
        self._open.append(index)
        if not wanted or not self._hooked:
            return args, kwargs
        marked = iter(_InputsDone.apply(partial(self._end, index), *wanted))
        return mapped(
            lambda tensor: next(marked) if tensor.requires_grad else tensor, (args, kwargs)
        )

    def _visit(self, visit: Visit) -> int:
        self.visits.append(visit)
        self._since.append(torch_private.next_sequence_number())
        self.log.place = Place(backward=False, stretch=len(self.visits) - 1)
        return self.log.place.stretch

    def _require_own_place(self, fqn: str) -> None:
        """UntraceableError for a unit that runs elsewhere than in the unit that it is a part of. It
        may run several times."""
        within = self.visits[self._open[-1]].unit if self._open else ROOT
        if self.visits[-1].after_root:
            raise refuse(
                fqn, "units that run in the module's forward", "a run of it in the loss",
                "leave it out of units, or run it in the forward",
            )
        if within != self._outer(fqn):
            raise refuse(
                fqn, "units that run one after another, or in the one they are part of",
                f"a run of it inside {within}",
                "make the outer module the unit, or leave this one to the root",
            )

    def _call_again(self, fqn: str, *, returns: bool) -> None:
        """A unit in a unit is called while that is recomputed, or returns: its hooks run once more.
        """
        if self._outer(fqn) != ROOT:
            self.log.entries.append((self.log.place, CalledAgain(fqn, returns)))

    def _outer(self, fqn: str) -> str:
        """The unit that the unit `fqn` lies in."""
        return max(
            (other for other in self._units if fqn.startswith(f"{other}.")), key=len, default=ROOT
        )

    def _after(self, fqn: str, module: nn.Module, args: Any, output: Any) -> None:
        if self.log.place.backward:
            self._call_again(fqn, returns=True)
            return
        last, first = self.log.place.stretch, self._open.pop()
        self._ends[first] = last
        wanted = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if wanted:
            self._differentiable.add(first)
        for tensor in wanted if self._hooked else ():
            require_unchanged(fqn, [tensor])
            tensor.register_hook(partial(self.gradient_arrives, last))
        if wanted and self._hooked:  # asked last: who asks for a node makes a stale one anew
            self.visits[last] = replace(
                self.visits[last], returns_inner_output=all(map(self._made_before, wanted))
            )
        trains = any(p.requires_grad for p in module.parameters())
        if not wanted and not trains and not self.visits[first].needs_gradient:
            self.constant.add(last)
        self._visit(Visit(self.visits[self._open[-1]].unit if self._open else ROOT))

    def _root_returns(self, module: nn.Module, args: Any, output: Any) -> None:
        """The whole module returns: the root's backward begins when a gradient of `output` is
        there. UntraceableError where it is called again."""
        if self.visits[-1].after_root:
            raise refuse(
                ROOT, "one call of the module in a step", "another one, in the loss",
                "make a module of both, whose forward calls this one and makes the loss",
            )
        last = self.log.place.stretch
        for tensor in tensors_in(output) if self._hooked else ():
            if tensor.requires_grad:
                require_unchanged(ROOT, [tensor])
                self._handles.append(tensor.register_hook(partial(self.gradient_arrives, last)))
        self._visit(Visit(ROOT, after_root=True))

    def _made_before(self, tensor: Tensor) -> bool:
        """True if the node that made `tensor` is older than this stretch of forward, which then has
        put none of its own behind it."""
        node = tensor.grad_fn
        return (
            node is not None
            and torch_private.sequence_number(node) < self._since[self.log.place.stretch]
        )

    def gradient_arrives(self, last: int, gradient: Tensor) -> None:
        """A gradient of a unit's output is there: its backward begins with its `last` stretch.
        UntraceableError when not its turn."""
        if not self._forward_is_over:
            raise refuse(
                self.visits[last].unit, "a unit whose gradients are taken when forward is over",
                "torch.autograd.grad, or a backward, within forward that goes through its "
                "output",
                "make the module that takes them the unit; no units make the whole model one",
            )
        if last in self.begun:
            return
        # stretches that are left without anybody's notice
        for index in range(self.log.place.stretch, last + 1, -1):
            visit = self.visits[index]
            if visit.needs_gradient or not (
                visit.begins
                or index - 1 in self._idle | self.constant
                or (visit.after_root and visit.returns_inner_output)
            ):
                self._refuse_order(last)
            self.begun.add(index - 1)
        if self.log.place.stretch <= last:
            self._refuse_order(last)
        self.begun.add(last)
        self.log.place = Place(backward=True, stretch=last)

    def _end(self, first: int) -> None:
        if self.log.place != Place(backward=True, stretch=first):
            self._refuse_order(first)
        self.log.place = Place(backward=True, stretch=first - 1)

    def _require_own_backward(self, fqn: str) -> None:
        now, whole = self.log.place.stretch, fqn
        while self._outer(whole) != ROOT:  # one in a unit is recomputed with that too
            whole = self._outer(whole)
        runs = [
            index for index, visit in enumerate(self.visits) if visit.unit == whole and visit.begins
        ]
        if not any(first <= now <= self._ends.get(first, -1) for first in runs):
            raise refuse(
                fqn, "a unit that is recomputed in its own backward",
                f"one recomputed in that of {self.visits[now].unit}",
                "checkpoint the unit itself, or parts inside it, and not more, with "
                "use_reentrant=False",
            )

    def _refuse_order(self, index: int) -> None:
        raise refuse(
            self.visits[index].unit, "units whose backward runs in the reverse order of forward",
            "another order: the unit's backward overlaps with that of a unit beside it",
            "make the module that contains both the unit",
        )


def _is_hook(node: Any) -> bool:
    return bool(node.name() == f"{_InputsDone.__name__}Backward")


def _keeps_apart(loss: Tensor) -> bool:
    """True if a unit takes what gets other gradients too, or takes it twice: its own are then added
    up before they meet those.

    Or takes what it does not use, of which the node of the hook then makes a gradient of zeros.
    """
    graph = [*nodes(loss.grad_fn)]
    edges = Counter(edge for node in graph for edge in node.next_functions)
    hooks = [*filter(_is_hook, graph)]
    if any(not edges[node, number] for node in hooks for number in range(len(node.next_functions))):
        return True
    taken = (edge for node in hooks for edge in node.next_functions)
    return any(
        node is not None and (edges[node, number] > 1 or hasattr(node, "variable"))
        for node, number in taken
    )
