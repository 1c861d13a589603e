"""Walk through the live bytes of a step, by owner: a kind of memory and the unit that made it.

A walk is a start and points, each a change. Inside an op with temporaries it has a point at the
op's highest, so that no peak is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from zsim.ir.buffers import STEP, parameter_and_state
from zsim.ir.ledger import label
from zsim.ir.ops import Alloc, Op
from zsim.ir.program import RankProgram
from zsim.memory.holdings import until_end
from zsim.models.spec import ROOT

Owner = tuple[str, str]
"""A kind of memory, and the unit whose op allocated it."""
Change = tuple[Owner, int]


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """A moment of the step, inside the `op` issued or after it, and the changes of each owner's
    bytes since the point before."""

    op: Op
    inside: bool
    changes: dict[Owner, int]

    @property
    def label(self) -> str:
        """The op as people say it, with where in it."""
        return f"{'in' if self.inside else 'after'} {label(self.op)}"


@dataclass(frozen=True, slots=True)
class MemoryWalk:
    """Bytes by owner when the steady step begins, and the points of the step."""

    start: dict[Owner, int]
    points: list[MemoryPoint]

    def states(self) -> Iterator[dict[Owner, int]]:
        """Bytes by owner at the start and at each point."""
        held = Counter(self.start)
        yield {owner: nbytes for owner, nbytes in held.items() if nbytes}
        for point in self.points:
            held.update(point.changes)
            yield {owner: nbytes for owner, nbytes in held.items() if nbytes}


@dataclass(slots=True)
class _Live:
    """Live buffers with their owners."""

    counts: Callable[[str], bool]
    owners: dict[str, tuple[Owner, int]] = field(default_factory=dict)

    def apply(self, op: Op) -> list[Change]:
        """The changes of `op`, in order, of the kinds that count."""
        changes: list[Change] = []
        units = _units_of_states(op, self.owners) if op.kind == "optimizer" else {}
        for event in op.memory:
            if type(event) is Alloc:
                owner: Owner = event.kind, units.get(event.buffer, op.unit)
                self.owners[event.buffer] = owner, event.nbytes
                if self.counts(event.kind):
                    changes.append((owner, event.nbytes))
            else:
                owner, nbytes = self.owners.pop(event.buffer)
                if self.counts(owner[0]):
                    changes.append((owner, -nbytes))
        return changes


def _units_of_states(op: Op, live: Mapping[str, tuple[Owner, int]]) -> dict[str, str]:
    """Units of the optimizer states that `op` makes, by buffer.

    The optimizer counts its parameters in the order in which they were made, or the root's first.
    Where numbers or sizes say otherwise, the states belong to `OPTIMIZER`.
    """
    made = [event for event in op.memory if type(event) is Alloc]
    states = [event for event in made if event.kind == "optimizer_states"]
    sizes: dict[int, int] = {}
    for event in states:
        if (state := parameter_and_state(event.buffer)) and state[1] != STEP:
            sizes[state[0]] = event.nbytes
    parameters = [(own[1], size) for own, size in live.values() if own[0] == "parameters" and size]
    numbers = sorted(sizes)
    for order in (parameters, sorted(parameters, key=lambda each: each[0] != ROOT)):
        if len(numbers) == len(order) and _is_even(
            [sizes[number] / size for number, (_, size) in zip(numbers, order, strict=True)]
        ):
            units = {number: unit for number, (unit, _) in zip(numbers, order, strict=True)}
            return {
                event.buffer: units.get(state[0], OPTIMIZER)
                for event in states if (state := parameter_and_state(event.buffer))
            }
    return {event.buffer: OPTIMIZER for event in states}


def _is_even(ratios: Sequence[float]) -> bool:
    """True where most ratios are near the largest: a padded shard has less of states."""
    return sum(ratio > 0.9 * max(ratios) for ratio in ratios) > 0.7 * len(ratios)


OPTIMIZER = "optimizer"
"""Unit of states that are of several units at once."""


def walk(
    program: RankProgram, *, counts: Callable[[str], bool] = lambda kind: True, inside: bool = True
) -> MemoryWalk:
    """The steady step of `program`, of the kinds that `counts` is true of.

    Without `inside` only moments after ops are points.
    """
    live, start = _Live(counts), Counter[Owner]()
    points: list[MemoryPoint] = []
    for op, in_step in until_end(program, "steady"):
        changes = live.apply(op)
        if in_step:
            points += _points(op, changes, inside=inside)
        else:
            _add(start, changes)
    return MemoryWalk(dict(start), points)


def _points(op: Op, changes: Sequence[Change], *, inside: bool) -> Iterator[MemoryPoint]:
    total = highest = 0
    at = 0
    for number, (_, nbytes) in enumerate(changes, 1):
        total += nbytes
        if total > highest:
            highest, at = total, number
    if inside and highest > max(0, total):
        yield MemoryPoint(op, True, _sum(changes[:at]))
        changes = changes[at:]
    if rest := _sum(changes):
        yield MemoryPoint(op, False, rest)


def _add(counter: Counter[Owner], changes: Sequence[Change]) -> None:
    for owner, nbytes in changes:
        counter[owner] += nbytes


def _sum(changes: Sequence[Change]) -> dict[Owner, int]:
    total = Counter[Owner]()
    _add(total, changes)
    return {owner: nbytes for owner, nbytes in total.items() if nbytes}


def thinned(walked: MemoryWalk, most: int) -> MemoryWalk:
    """The walk with at most about `most` points: of neighbours the highest and the last."""
    size = -(-2 * len(walked.points) // most)
    if size <= 2:
        return walked
    totals, now = [], 0
    for point in walked.points:
        now += sum(point.changes.values())
        totals.append(now)
    kept: set[int] = set()
    for first in range(0, len(totals), size):
        group = range(first, min(first + size, len(totals)))
        kept |= {max(group, key=totals.__getitem__), group[-1]}
    points: list[MemoryPoint] = []
    pending = Counter[Owner]()
    for number, point in enumerate(walked.points):
        pending.update(point.changes)
        if number in kept:
            changes = {owner: nbytes for owner, nbytes in pending.items() if nbytes}
            points.append(MemoryPoint(point.op, point.inside, changes))
            pending.clear()
    return MemoryWalk(walked.start, points)
