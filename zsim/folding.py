"""Folding: ranks that are alike do the same at the same time, so one stands for all, and meets those that stand for its partners.

Ranks are alike when they run the same program, when collectives over their groups take equally long (a group inside a node is
not like one that crosses nodes), and when those groups join ranks that are alike in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from zsim.ops import COLLECTIVES
from zsim.program import Program

Group = tuple[int, ...]
Durations = Callable[[str, int, Group], int]


def stand_ins(program: Program, *, duration_ns: Durations) -> tuple[int, ...]:
    """By rank: the first rank that is like it. `duration_ns(kind, nbytes, group)` tells groups apart.

    Classes of ranks, at first by program, are split by the durations and the classes of their groups until no split is left.
    """
    sizes: dict[str, set[tuple[str, int]]] = {}
    for ops in program.ranks:
        for op in ops.steady:
            if op.kind in COLLECTIVES:
                sizes.setdefault(op.group, set()).add((op.kind, op.nbytes))
    groups = {axis: program.mesh.groups(axis) for axis in sorted(sizes)}
    costs = {
        (axis, group): tuple(duration_ns(kind, nbytes, group) for kind, nbytes in sorted(sizes[axis]))
        for axis in groups
        for group in groups[axis]
    }
    classes, count = list(program.assignment), 0
    while len(set(classes)) > count:
        count = len(set(classes))
        met = [_met(members, classes, [costs[axis, group] for group in members]) for axis, members in groups.items()]
        classes = _numbered(zip(classes, *met, strict=True))
    first: dict[int, int] = {}
    return tuple(first.setdefault(own, rank) for rank, own in enumerate(classes))


def _met(members: tuple[Group, ...], classes: list[int], costs: list[tuple[int, ...]]) -> list[int]:
    """By rank: a number for what the group it is in costs and which classes meet there."""
    found = [0] * len(classes)
    numbers = _numbered((cost, frozenset(classes[rank] for rank in group)) for group, cost in zip(members, costs, strict=True))
    for group, number in zip(members, numbers, strict=True):
        for rank in group:
            found[rank] = number
    return found


def _numbered(marks: Iterable[Hashable]) -> list[int]:
    """Equal marks get equal numbers, in the order in which they appear."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(mark, len(numbers)) for mark in marks]


class Meetings:
    """Which of the ranks that stand for others meet in groups of one name; `stand_ins` are those of every rank."""

    def __init__(self, program: Program, stand_ins: tuple[int, ...]) -> None:
        self.program, self.stand_ins = program, stand_ins

    def present(self, axis: str, rank: int) -> Group:
        """The simulated ranks that a simulated rank meets, itself among them, in order."""
        return tuple(sorted({self.stand_ins[member] for member in self.program.mesh.group(axis, rank)}))
