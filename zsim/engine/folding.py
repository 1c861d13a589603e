"""Folding: ranks that are alike do the same at the same time, so one of them represents all.

Ranks are alike when they run the same program and their groups are alike. Groups are alike when
their collectives take equally long and as much of their links, and when they join ranks that are
alike in turn. So a group inside a node is not like one that crosses nodes. Where ranks of several
programs share the host of their node, whole nodes are alike, rank by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from fractions import Fraction

from zsim.ir.ops import COLLECTIVES, leaves_device
from zsim.ir.program import Program

GroupRanks = tuple[int, ...]
CollectiveTime = Callable[[str, int, GroupRanks], int]
LinkUsage = Callable[[GroupRanks], Mapping[int, Mapping[str, Fraction]]]


def representatives(
    program: Program, *, duration_ns: CollectiveTime, usage: LinkUsage | None = None,
    node_size: int = 0,
) -> tuple[int, ...]:
    """The representative of each rank, by rank: the first rank that is like it.

    Classes of ranks, at first by program, are split by the durations and the classes of their
    groups until no split is left. The function `duration_ns(kind, nbytes, group)` tells groups
    apart. Where several groups may contend, `usage` tells members apart by the links they use.
    With a `node_size` no rank stands for another of its node, but a node for others like it.
    """
    sizes: dict[str, set[tuple[str, int]]] = {}
    for ops in program.steps:
        for op in ops:
            if op.kind in COLLECTIVES:
                sizes.setdefault(op.group, set()).add((op.kind, op.nbytes))
    groups = {axis: program.mesh.groups(axis) for axis in sorted(sizes)}
    classes, count = list(program.assignment), 0
    if usage is not None and len(groups) > 1:
        classes = _numbered(
            zip(classes, *(_used(members, usage) for members in groups.values()), strict=True)
        )
    if node_size:
        classes = _by_node(classes, node_size)
    # a group of all ranks tells none apart
    groups = {axis: members for axis, members in groups.items() if len(members) > 1}
    costs = {
        (axis, group): tuple(
            duration_ns(kind, nbytes, group) for kind, nbytes in sorted(sizes[axis])
        )
        for axis in groups
        for group in groups[axis]
    }
    while groups and len(set(classes)) > count:
        count = len(set(classes))
        met = [
            _met(members, classes, [costs[axis, group] for group in members])
            for axis, members in groups.items()
        ]
        classes = _numbered(zip(classes, *met, strict=True))
        if node_size:
            classes = _by_node(classes, node_size)
    first: dict[int, int] = {}
    return tuple(map(first.setdefault, classes, range(len(classes))))


def in_step_off_device(program: Program) -> bool:
    """False where ranks of several programs work off the device. They share their node's memory and
    links, and none of them stands for another of its node."""
    return len(program.ranks) == 1 or not any(
        leaves_device(op) for ops in program.steps for op in ops if op.kernels
    )


def _by_node(classes: list[int], node_size: int) -> list[int]:
    """A number for the place of each rank in its node and the classes of the node's ranks."""
    nodes = [
        tuple(classes[begin : begin + node_size]) for begin in range(0, len(classes), node_size)
    ]
    return _numbered(
        (nodes[rank // node_size], rank % node_size) for rank in range(len(classes))
    )


def _used(members: tuple[GroupRanks, ...], usage: LinkUsage) -> list[int]:
    """A number for the link shares that each rank's group takes, by rank."""
    parts_by_rank: dict[int, Mapping[str, Fraction]] = {}
    nothing: dict[str, Fraction] = {}
    for group in members:
        parts_by_rank |= usage(group) or dict.fromkeys(group, nothing)
    # members of a node share one mapping, so few are sorted
    marks = {id(parts): tuple(sorted(parts.items())) for parts in parts_by_rank.values()}
    return _numbered(marks[id(parts_by_rank[rank])] for rank in range(len(parts_by_rank)))


def _met(
    members: tuple[GroupRanks, ...], classes: list[int], costs: list[tuple[int, ...]]
) -> list[int]:
    """A number for the cost of each rank's group and the classes that meet there, by rank."""
    met = [0] * len(classes)
    numbers = _numbered(
        (cost, frozenset(classes[rank] for rank in group))
        for group, cost in zip(members, costs, strict=True)
    )
    for group, number in zip(members, numbers, strict=True):
        for rank in group:
            met[rank] = number
    return met


def _numbered(marks: Iterable[Hashable]) -> list[int]:
    """A number for each mark: equal marks have equal numbers, in the order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(mark, len(numbers)) for mark in marks]


class Meetings:
    """Members of each simulated communicator after folding."""

    def __init__(self, program: Program, representatives: tuple[int, ...]) -> None:
        """`representatives`, by rank, as of the function of that name."""
        self.program, self.representatives = program, representatives
        self._known: dict[tuple[str, int], GroupRanks] = {}

    def present(self, axis: str, rank: int) -> GroupRanks:
        """The simulated ranks that a simulated rank meets, itself among them, in order."""
        group = self.program.mesh.group(axis, rank)
        known = self._known.get((axis, group[0]))
        if known is None:
            present = {self.representatives[member] for member in group}
            known = self._known[axis, group[0]] = tuple(sorted(present))
        return known
