"""A step as laws look at it: the ops of one kind of rank, what lives before them and after them.

Steps follow one another: what construction leaves the first step finds, and what that and `second`
leave, a steady one. After that comes a steady step again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zsim.ir.ledger import label
from zsim.ir.ops import Alloc, Op, Stream
from zsim.ir.order.happens_before import Happened, happened
from zsim.ir.program import PhaseName, Program, ProgramSection

STEPS: dict[PhaseName, ProgramSection] = {"first": "construction", "steady": "second"}
"""The steps that laws are asked of, each with what is run between it and the step before."""


@dataclass(frozen=True, slots=True)
class Made:
    """A live buffer, and the op that made it."""

    alloc: Alloc
    op: Op
    section: ProgramSection

    def __str__(self) -> str:
        op = f"{self.section} op {self.op.index} ({label(self.op)})"
        return f"{self.alloc.buffer}, made by {op}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """The step `phase` of the rank program `number`, with the buffers that live before and after it
    and the ops that come next.

    `pending` are the streams of all-gathers in the steps before it, by unit, whose end nothing on
    the compute stream has awaited.
    """

    program: Program
    number: int
    phase: PhaseName
    ops: tuple[Op, ...]
    order: Happened
    before: Mapping[str, Made]
    after: Mapping[str, Made]
    pending: Mapping[str, Stream]
    following: tuple[Op, ...]


def rank_steps(program: Program, number: int) -> Iterator[RankStep]:
    """The first step and a steady one of a kind of rank."""
    rank = program.ranks[number]
    live, pending = dict[str, Made](), dict[str, Stream]()
    for phase, leading in STEPS.items():
        _follow(live, rank.phase(leading), leading)
        ops = rank.phase(phase)
        order, after = happened(ops), dict(live)
        _follow(after, ops, phase)
        earlier, pending = pending, pending | _pending(ops, order)
        yield RankStep(
            program=program, number=number, phase=phase, ops=ops, order=order, before=live,
            after=after, pending=pending if phase == "steady" else earlier,
            following=(*(rank.second if phase == "first" else ()), *rank.steady),
        )
        live = after


def unsharded(live: Mapping[str, Made]) -> list[Made]:
    """Live buffers that hold unsharded parameters."""
    return [made for made in live.values() if made.alloc.kind == "unsharded_parameters"]


def _follow(live: dict[str, Made], ops: tuple[Op, ...], section: ProgramSection) -> None:
    """Add to `live` what `ops` allocate, and take from it what they free."""
    for op in ops:
        for event in op.memory:
            if isinstance(event, Alloc):
                live[event.buffer] = Made(event, op, section)
            else:
                live.pop(event.buffer, None)


def _pending(ops: tuple[Op, ...], order: Happened) -> dict[str, Stream]:
    """The streams of all-gathers, by unit, that no op on the compute stream has awaited."""
    last = max((op.index for op in ops if op.stream == "compute"), default=-1)
    gathers = {op.unit: op for op in ops if op.kind == "all_gather"}
    return {
        unit: op.stream for unit, op in gathers.items() if not order.before(op.index, last)
    }
