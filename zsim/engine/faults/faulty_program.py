"""The Program of a step with faults: ranks with a fault have rank programs of their own.

A skipped collective stays as an op that does nothing, so that ops keep their numbers and memory is
as it was. Two reordered ones exchange what they communicate. A failing rank's ops end before it
fails; no other part of the Program changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as replaced
from difflib import get_close_matches

from zsim.engine.faults.fault import (
    AT_OPS,
    OF_RANKS,
    AtOp,
    FailingRank,
    Fault,
    Jitter,
    SkippedCollective,
)
from zsim.errors import ScenarioError
from zsim.ir.ops import COLLECTIVES, Op
from zsim.ir.program import Program, RankProgram

COMMUNICATED = ("kind", "unit", "group", "nbytes", "root", "dtype")
"""The fields of an op that say what a collective communicates."""


def faulty_program(program: Program, faults: Sequence[Fault]) -> Program:
    """`program` with a rank program for each rank that some fault is of, and with what they change
    in it; `program` itself without any such.

    ScenarioError where the rank has no such op.
    """
    everyone = any(isinstance(fault, Jitter) for fault in faults)
    own = {fault.rank for fault in faults if isinstance(fault, OF_RANKS)}
    if everyone:
        own = set(range(program.mesh.world_size))
    if not own:
        return program
    kinds: dict[tuple[int, int | None], int] = {}
    ranks: list[RankProgram] = []
    assignment: list[int] = []
    for rank, kind in enumerate(program.assignment):
        alike = kind, rank if rank in own else None
        if alike not in kinds:
            kinds[alike] = len(ranks)
            steady = program.ranks[kind].steady
            for key, fault in _at_ops(faults, rank).items():
                steady = _change(steady, index_of(program, fault, key=key), fault, key=key)
            ranks.append(_with_steady(program.ranks[kind], steady))
        assignment.append(kinds[alike])
    return replaced(program, ranks=tuple(ranks), assignment=tuple(assignment))


def _at_ops(faults: Sequence[Fault], rank: int) -> dict[str, AtOp]:
    """The faults of `rank` at single ops, by their keys in the scenario.

    Its failures are last, so that all ops are there for the others.
    """
    own = {
        f"faults[{number}].at": fault for number, fault in enumerate(faults)
        if isinstance(fault, AT_OPS) and fault.rank == rank
    }
    return dict(sorted(own.items(), key=lambda item: isinstance(item[1], FailingRank)))


def _with_steady(program: RankProgram, steady: tuple[Op, ...]) -> RankProgram:
    """`program` itself where nothing in it changes: what is computed of it once holds for all."""
    return program if steady is program.steady else replaced(program, steady=steady)


def index_of(program: Program, fault: AtOp, *, key: str) -> int:
    """The index of the first op that `fault` names; ScenarioError, with its `key`, for none."""
    ops = program.of_rank(fault.rank).steady
    if not isinstance(fault, FailingRank):
        ops = tuple(op for op in ops if _joins_ranks(op, program))
    names = {f"{op.kind} {op.unit}": op.index for op in reversed(ops)}
    if fault.at not in names:
        wanted = "an op" if isinstance(fault, FailingRank) else "a collective of several ranks"
        raise _unfit(
            key, f"the kind and unit of {wanted} in rank {fault.rank}'s steady step", fault.at,
            _nearest(fault.at, [*names]),
        )
    return names[fault.at]


def failures(program: Program, faults: Sequence[Fault]) -> dict[int, int]:
    """The index of the op in whose place each rank that fails ends, by rank."""
    ends: dict[int, int] = {}
    for number, fault in enumerate(faults):
        if isinstance(fault, FailingRank):
            index = index_of(program, fault, key=f"faults[{number}].at")
            ends[fault.rank] = min(index, ends.get(fault.rank, index))
    return ends


def _joins_ranks(op: Op, program: Program) -> bool:
    return op.kind in COLLECTIVES and program.mesh.size(op.group) > 1


def _nearest(written: str, names: list[str]) -> str:
    near = get_close_matches(written, names, n=1)
    if near:
        return f", did you mean {near[0]}?"
    return "; `zsim show --program` lists its ops" if names else "; it has none"


def _unfit(key: str, expected: str, written: str, hint: str) -> ScenarioError:
    return ScenarioError((f"{key}: expected {expected}, found {written[:60]}{hint}",))


def _change(
    ops: tuple[Op, ...], index: int, fault: AtOp, *, key: str
) -> tuple[Op, ...]:
    """The ops of a rank with `fault` at the op of that index."""
    if isinstance(fault, FailingRank):
        return ops[:index]
    if isinstance(fault, SkippedCollective):
        idle = replaced(ops[index], kind="alloc", group="", nbytes=0, root=0)
        return (*ops[:index], idle, *ops[index + 1 :])
    later = next((op for op in ops[index + 1 :] if op.kind in COLLECTIVES), None)
    if later is None:
        raise _unfit(key, "a collective that another one follows", fault.at, "")
    first = ops[index]
    exchanged = {
        op.index: replaced(op, **{field: getattr(other, field) for field in COMMUNICATED})
        for op, other in ((first, later), (later, first))
    }
    return tuple(exchanged.get(op.index, op) for op in ops)
