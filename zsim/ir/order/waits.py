"""Waits of ranks for one another: the rings that they close, and the first op in which the Programs
of ranks differ. The engine's deadlocks and `zsim explain` of real hangs share them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zsim.ir.ledger import label
from zsim.ir.ops import COLLECTIVES, Op
from zsim.ir.program import Program, ProgramSection

MOST_TOLD = 8
"""The most ranks that a message tells of."""


class Wait(NamedTuple):
    """A rank inside a collective, and the ranks that have not entered it."""

    rank: int
    group: str
    seq: int
    op: str
    absent: tuple[int, ...]
    at: str = ""


def rings(waits: Sequence[Wait]) -> Iterator[tuple[Wait, ...]]:
    """The rings of ranks each of which waits for the next, once each; `waits` has one wait of each
    rank."""
    by_rank = {wait.rank: wait for wait in waits}
    known: set[frozenset[int]] = set()
    for start in by_rank:
        path = [start]
        while (wait := by_rank.get(path[-1])) is not None:
            following = next((rank for rank in wait.absent if rank in by_rank), None)
            if following is None:
                break
            if following in path:
                ring = path[path.index(following):]
                if len(ring) > 1 and frozenset(ring) not in known:
                    known.add(frozenset(ring))
                    yield tuple(by_rank[rank] for rank in ring)
                break
            path.append(following)


def named_ranks(ranks: Sequence[int]) -> str:
    """Ranks as a message names them: "rank 1", "ranks 0, 2"; many are cut."""
    shown = ", ".join(map(str, ranks[:MOST_TOLD]))
    more = f" and {len(ranks) - MOST_TOLD} more" if len(ranks) > MOST_TOLD else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"


def first_difference(mine: Sequence[Op], theirs: Sequence[Op]) -> tuple[Op | None, Op | None]:
    """The first collectives, in issue order, in which two ranks differ; None beside a collective
    for a rank that has no more, and twice where all are alike."""
    own, others = (
        [op for op in ops if op.kind in COLLECTIVES] for ops in (mine, theirs)
    )
    for index in range(max(len(own), len(others))):
        pair = tuple(ops[index] if index < len(ops) else None for ops in (own, others))
        if len({op and (op.kind, op.unit, op.group, op.nbytes, op.root) for op in pair}) > 1:
            return pair[0], pair[1]
    return None, None


def wait_table(
    program: Program, waits: Sequence[Wait], *, section: ProgramSection
) -> tuple[str, ...]:
    """Lines of a table: a ring of ranks that wait for one another, or all waits where none closes.

    Beside each stands the rank that it waits for, and the first collective that they do not issue
    alike.
    """
    first = {wait.rank: wait for wait in reversed(waits)}
    ring = next(rings([first[rank] for rank in sorted(first)]), None)
    listed = list(ring or waits)[:MOST_TOLD]
    rows = [("rank", "waits in", "for", "first difference")]
    for position, wait in enumerate(listed):
        following = ring[(position + 1) % len(ring)].rank if ring else wait.absent[0]
        awaited = (following,) if ring else wait.absent
        rows.append((
            str(wait.rank), f"{wait.op}, #{wait.seq} of {wait.group}", named_ranks(awaited),
            difference(program, wait.rank, following, section=section),
        ))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, (*widths, 0), strict=True)).rstrip()
        for row in rows
    ]
    left_out = len(ring or waits) - len(listed)
    return (*lines, *([f"and {left_out} more"] if left_out else []))


def difference(program: Program, rank: int, other: int, *, section: ProgramSection) -> str:
    """The first collectives that two ranks do not issue alike, as text."""
    mine, theirs = first_difference(
        program.of_rank(rank).phase(section), program.of_rank(other).phase(section)
    )
    if mine is None and theirs is None:
        return "none: both issue alike"
    return f"{_issued(mine)}; on rank {other} {_issued(theirs)}"


def _issued(op: Op | None) -> str:
    return "nothing more" if op is None else (
        f"op {op.index} ({label(op)} over {op.group}, {op.nbytes:,} B)"
    )
