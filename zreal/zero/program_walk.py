"""A Program carried out while a user's own loop trains.

Each stretch of the module, and each call of the loop, moves the cursor on to its place in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zreal.executor.flat_rank import FlatRank
from zreal.executor.trainer import enter
from zsim.errors import ArgumentError, ProgramError
from zsim.ir.ops import Op
from zsim.ir.program import RankProgram, StepPart
from zsim.models.spec import Module

REDUCTIONS = ("all_reduce", "reduce_scatter")
ORDER = "forward, loss.backward() and zero.step() in turn, then zero.zero_grad()"


@dataclass(slots=True, kw_only=True)
class ProgramWalk:
    """The ops of step after step. `modules` are the traced ones in forward order, `backward` those
    with a backward in its order."""

    program: RankProgram
    rank: FlatRank
    modules: Sequence[Module]
    backward: Sequence[Module]
    trained: dict[str, frozenset[str]]
    """Parameters that get a gradient, by param group."""
    steps: int = 0
    _ops: tuple[Op, ...] = ()
    _cursor: int = 0
    _part: int = 0
    """Index of the part of the step that the loop is in."""
    _next: int = 0
    """Index of the module whose forward, or backward, is next."""
    _arrived: set[str] = field(default_factory=set)
    """Parameters whose gradient of this micro-batch is accumulated."""
    in_backward: bool = False
    _before_step: dict[str, bool] = field(default_factory=dict)
    _before_forward: dict[str, bool] = field(default_factory=dict)
    """Buffers live then; True for those with memory."""
    _forward_start: int = 0
    """Cursor at the beginning of the last forward."""

    def __post_init__(self) -> None:
        self._ops = self.program.first

    @property
    def part(self) -> str:
        """The part that the loop is in: forward, backward, optimizer or zero_grad."""
        return self._parts[self._part].name

    @property
    def _parts(self) -> tuple[StepPart, ...]:
        return self.program.parts("steady" if self.steps else "first")

    def begin_forward(self) -> None:
        """The loop calls the model."""
        self.require("forward", "a forward")
        self._next, self._forward_start = 0, self._cursor
        self._before_forward = self.rank.buffers.with_memory()
        if self._cursor == 0:
            self._before_step = self._before_forward

    def forward(self, fqn: str) -> None:
        """The module `fqn` of the trace begins to compute."""
        self._require_turn(self.modules, fqn)
        op = self._next_compute("forward")
        enter(self.rank, op, self.modules[self._next], backward=False)
        self._next += 1

    def end_forward(self) -> None:
        """The model returns."""
        if self._next < len(self.modules):
            raise _otherwise(f"forward of {self.modules[self._next].fqn}", "the end of forward")
        self._end_part()
        self._next = 0
        self._arrived.clear()

    def abandon_forward(self) -> None:
        """The model has raised: go back to where its forward began."""
        self._next, self._cursor = 0, self._forward_start
        self.rank.restore(self._before_forward)

    def begin_backward(self) -> None:
        """Autograd comes to the first node of the module."""
        self.require("backward", "a backward")
        self.in_backward = True

    def enter_backward(self, fqn: str) -> None:
        """Autograd comes to the module `fqn`, and has left all that ran after it in forward."""
        names = [module.fqn for module in self.backward]
        if fqn not in names:
            return
        while self._next <= names.index(fqn):
            op = self._next_compute("backward")
            enter(self.rank, op, self.backward[self._next], backward=True)
            self._next += 1

    def end_backward(self) -> None:
        """Autograd is done with a micro-batch: carry out the last reductions, beside its loss."""
        self.in_backward = False
        if self._next < len(self.backward):
            raise _otherwise(f"backward of {self.backward[self._next].fqn}", "the end of backward")
        self._end_part()

    def arrived(self, fqn: str) -> None:
        """The gradient of the parameter `fqn` is accumulated."""
        self._arrived.add(fqn)

    def step(self) -> None:
        """Clip, step the shards and all-gather them, as the Program says."""
        self._end_part()

    def zero_grad(self) -> None:
        """Free the gradients after a step. Elsewhere end the step without one: the next forward
        is its first."""
        if self.part == "zero_grad":
            self._end_part()
        elif self.part != "forward" or self._cursor:
            self._cursor = self._part = self._next = 0
            self.in_backward = False
            self.rank.restore(self._before_step)

    def _end_part(self) -> None:
        """Carry out the rest of this part; after the last one the next step begins."""
        parts = self._parts
        last = self._part + 1 == len(parts)
        end = len(self._ops) if last else parts[self._part + 1].start
        with torch.no_grad():
            while self._cursor < end:
                self._perform(self._ops[self._cursor])
                self._cursor += 1
        self._part += 1
        if last:
            self.rank.streams.join()
            self.steps += 1
            self._ops, self._cursor, self._part = self.program.steady, 0, 0

    def _next_compute(self, kind: str) -> Op:
        """Carry out the ops before the next compute op of this `kind`, which the caller's loop
        computes."""
        with torch.no_grad():
            while self._cursor < len(self._ops):
                op = self._ops[self._cursor]
                self._cursor += 1
                if op.kind == kind:
                    return op
                self._perform(op)
        raise ProgramError(where="the step", expected=f"another {kind} op", found="none")

    def _perform(self, op: Op) -> None:
        # torch recomputes when backward needs a tensor that was not kept; the loop makes the loss
        if op.kind in ("recompute", "forward"):
            self.rank.streams.wait(op)
            return
        awaited = self.trained.get(op.unit, frozenset()) if op.kind in REDUCTIONS else frozenset()
        if missing := sorted(awaited - self._arrived):
            raise _otherwise(f"the gradient of {missing[0]} before it is reduced", "none")
        self.rank.perform(op)

    def require(self, part: str, found: str) -> None:
        """ArgumentError where the loop is in another part than `part`."""
        if self.part != part:
            raise ArgumentError(
                where="the training loop", expected=ORDER, found=f"{found} in the {self.part}",
                remedy="accumulation= says how many micro-batches come before a step; forwards "
                       "under torch.no_grad() may come between steps; zero.zero_grad() on all "
                       "ranks drops an unfinished step",
            )

    def _require_turn(self, modules: Sequence[Module], fqn: str) -> None:
        turn = modules[self._next].fqn if self._next < len(modules) else "the end of forward"
        if turn != fqn:
            raise _otherwise(turn, fqn)


def _otherwise(expected: str, found: str) -> ArgumentError:
    return ArgumentError(
        where="module", expected=f"{expected}, as in the first forward", found=found,
        remedy="every forward must run the same units in the same order: what depends on data "
               "belongs inside one unit, named in units",
    )
