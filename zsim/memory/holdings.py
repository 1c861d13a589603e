"""Buffers that live at the peak of a rank's phase, by kind and unit.

It replays a rank's Program; of devices, and of what torch reserves, it knows nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zsim.ir.buffers import owner_of
from zsim.ir.ledger_replay import replay
from zsim.ir.ops import Alloc, MemoryKind, Op
from zsim.ir.program import PHASES, PhaseName, RankProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Bytes of one kind that belong to one unit at the peak, and their number of buffers."""

    kind: MemoryKind
    unit: str
    nbytes: int
    count: int


def live_at_peak(program: RankProgram, phase: PhaseName) -> tuple[tuple[Alloc, str], ...]:
    """Every buffer that lives when allocated bytes of `phase` are first at their highest, with the
    unit that made it."""
    peak = replay(program, timeline=False)[phase].peak_bytes
    live, allocated = dict[str, tuple[Alloc, str]](), 0
    for op, is_inside in until_end(program, phase):
        for event in op.memory:
            if type(event) is Alloc:
                live[event.buffer] = event, owner_of(op.unit) or op.unit
                allocated += event.nbytes
            else:
                allocated -= live.pop(event.buffer)[0].nbytes
            if allocated == peak and is_inside:
                return tuple(live.values())
    return tuple(live.values())


def until_end(program: RankProgram, phase: PhaseName) -> Iterator[tuple[Op, bool]]:
    """Every op from the first of construction to the last of `phase`, and whether it is in that."""
    for name in PHASES:
        for op in program.before(name):
            yield op, False
        for op in program.phase(name):
            yield op, name == phase
        if name == phase:
            return


def holdings(program: RankProgram, phase: PhaseName) -> tuple[Holding, ...]:
    """Live bytes at the peak of `phase`, by kind and unit, the largest first."""
    nbytes: Counter[tuple[MemoryKind, str]] = Counter()
    count: Counter[tuple[MemoryKind, str]] = Counter()
    for alloc, unit in live_at_peak(program, phase):
        nbytes[alloc.kind, unit] += alloc.nbytes
        count[alloc.kind, unit] += 1
    ordered = sorted(nbytes.items(), key=lambda item: (-item[1], item[0]))
    return tuple(
        Holding(kind=kind, unit=unit, nbytes=size, count=count[kind, unit])
        for (kind, unit), size in ordered
    )


def alike(held: Sequence[Holding]) -> Iterator[tuple[str, str, int, int]]:
    """Rows of kind, units, bytes and number of buffers live at the peak, the largest first.

    Units that hold as many bytes of a kind share a row.
    """
    groups: dict[tuple[str, int, int], list[str]] = {}
    for holding in held:
        groups.setdefault((holding.kind, holding.nbytes, holding.count), []).append(holding.unit)
    for (kind, nbytes, count), units in sorted(
        groups.items(), key=lambda group: -group[0][1] * len(group[1])
    ):
        more = f" and {len(units) - 1:,} like it" if len(units) > 1 else ""
        yield kind, f"{units[0]}{more}", nbytes * len(units), count * len(units)
