"""Folding: ranks that are alike do the same at the same time, so one stands for all, and meets
those that stand for its partners.

Ranks are alike when they run the same program, when collectives over their groups take equally long
(a group inside a node is not like one that crosses nodes) and as much of their links, and when
those groups join ranks that are alike in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from fractions import Fraction

from zsim.ir.ops import COLLECTIVES
from zsim.ir.program import Program

Group = tuple[int, ...]
Durations = Callable[[str, int, Group], int]
Usages = Callable[[Group], Mapping[int, Mapping[str, Fraction]]]


def stand_ins(
    program: Program, *, duration_ns: Durations, usage: Usages | None = None
) -> tuple[int, ...]:
    """By rank: the first rank that is like it. `duration_ns(kind, nbytes, group)` tells groups
    apart.

    Classes of ranks, at first by program, are split by the durations and the classes of their
    groups until no split is left. Where several groups may contend, `usage` of a group tells its
    members apart, by what it takes of their links.
    """
    sizes: dict[str, set[tuple[str, int]]] = {}
    for ops in program.ranks:
        for op in ops.steady:
            if op.kind in COLLECTIVES:
                sizes.setdefault(op.group, set()).add((op.kind, op.nbytes))
    groups = {axis: program.mesh.groups(axis) for axis in sorted(sizes)}
    costs = {
        (axis, group): tuple(
            duration_ns(kind, nbytes, group) for kind, nbytes in sorted(sizes[axis])
        )
        for axis in groups
        for group in groups[axis]
    }
    classes, count = list(program.assignment), 0
    if usage is not None and len(groups) > 1:
        classes = _numbered(
            zip(classes, *(_used(members, usage) for members in groups.values()), strict=True)
        )
    while len(set(classes)) > count:
        count = len(set(classes))
        met = [
            _met(members, classes, [costs[axis, group] for group in members])
            for axis, members in groups.items()
        ]
        classes = _numbered(zip(classes, *met, strict=True))
    first: dict[int, int] = {}
    return tuple(first.setdefault(own, rank) for rank, own in enumerate(classes))


def _used(members: tuple[Group, ...], usage: Usages) -> list[int]:
    """By rank: a number for what its group takes of its links."""
    found: dict[int, Mapping[str, Fraction]] = {}
    nothing: dict[str, Fraction] = {}
    for group in members:
        found |= usage(group) or dict.fromkeys(group, nothing)
    # which are few: members of a node have one in common
    marks = {id(parts): tuple(sorted(parts.items())) for parts in found.values()}
    return _numbered(marks[id(found[rank])] for rank in range(len(found)))


def _met(members: tuple[Group, ...], classes: list[int], costs: list[tuple[int, ...]]) -> list[int]:
    """By rank: a number for what the group it is in costs and which classes meet there."""
    found = [0] * len(classes)
    numbers = _numbered(
        (cost, frozenset(classes[rank] for rank in group))
        for group, cost in zip(members, costs, strict=True)
    )
    for group, number in zip(members, numbers, strict=True):
        for rank in group:
            found[rank] = number
    return found


def _numbered(marks: Iterable[Hashable]) -> list[int]:
    """Equal marks get equal numbers, in the order in which they appear."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(mark, len(numbers)) for mark in marks]


class Meetings:
    """Which of the ranks that stand for others meet in groups of one name; `stand_ins` are those of
    every rank."""

    def __init__(self, program: Program, stand_ins: tuple[int, ...]) -> None:
        self.program, self.stand_ins = program, stand_ins

    def present(self, axis: str, rank: int) -> Group:
        """The simulated ranks that a simulated rank meets, itself among them, in order."""
        return tuple(
            sorted({self.stand_ins[member] for member in self.program.mesh.group(axis, rank)})
        )
