"""Groups that ranks use in another order than other ranks: the rings that their orders close.

A NCCL rank enqueues and goes on, so its dump has both collectives; a rank of gloo waits in the
first. Either is told by the first collective of each group that hangs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from zsim.analysis.flight_recorder.dump_file import DumpEntry
from zsim.analysis.flight_recorder.finding import Calls, DumpFinding, at, awaited, newest
from zsim.ir.order.waits import named_ranks

Orders = dict[str, dict[str, set[int]]]
"""Groups after each group, with the ranks that use them one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The first collective of a group that hangs, as its ranks have entered it."""

    called: str
    seq: int
    entries: Mapping[int, DumpEntry]
    absent: frozenset[int]

    def __str__(self) -> str:
        op = next(iter(self.entries.values())).op
        return f"{op} #{self.seq} of {self.called}"


def head(called: str, calls: Calls, members: Sequence[int]) -> Head | None:
    """The first collective of a group that a rank is in and none has completed; None without one.
    """
    inside: dict[int, dict[int, DumpEntry]] = defaultdict(dict)
    completed = -1
    for rank, own in calls.items():
        for seq, entries in own.items():
            if any(entry.completed for entry in entries):
                completed = max(completed, seq)
            if waiting := [entry for entry in entries if not entry.ended]:
                inside[seq][rank] = waiting[0]
    hanging = [seq for seq in inside if seq > completed]
    if not hanging:
        return None
    seq = min(hanging)
    absent = frozenset(awaited(calls, members, seq, newest(calls)))
    return Head(called=called, seq=seq, entries=inside[seq], absent=absent)


def opposite(heads: Mapping[str, Head]) -> Iterator[tuple[DumpFinding, list[str]]]:
    """The rings of groups that ranks use in another order, each with its groups."""
    orders = _orders(heads)
    while (ring := _ring(orders)):
        steps = list(_steps(ring, orders))
        ranks = sorted({min(ranks) for _, _, ranks in steps})
        texts = "; ".join(_told(heads[first], heads[then], ranks) for first, then, ranks in steps)
        yield DumpFinding(
            kind="opposite order", group=heads[ring[0]].called, seq=heads[ring[0]].seq,
            ranks=tuple(ranks), text=f"groups are used in another order by other ranks: {texts}",
        ), ring
        for group in ring:
            orders.pop(group, None)


def _orders(heads: Mapping[str, Head]) -> Orders:
    """Each rank's groups in the order in which it enqueued them, and after them those that it has
    not entered."""
    own: dict[int, list[str]] = defaultdict(list)
    absent: dict[int, list[str]] = defaultdict(list)
    for group, of in heads.items():
        for rank in of.entries:
            own[rank].append(group)
        for rank in of.absent:
            absent[rank].append(group)
    orders: Orders = defaultdict(lambda: defaultdict(set))
    for rank, groups in own.items():
        groups.sort(key=lambda group: heads[group].entries[rank].created_ns)
        pairs = [*pairwise(groups)]
        pairs += [(groups[-1], group) for group in absent[rank]]
        for first, then in pairs:
            orders[first][then].add(rank)
    return orders


def _ring(orders: Orders) -> list[str]:
    """A short ring of groups each of which a rank uses before the next; [] where none closes."""
    num_before: dict[str, int] = defaultdict(int)
    for after in orders.values():
        for group in after:
            num_before[group] += 1
    free = [group for group in orders if not num_before[group]]
    contested = dict.fromkeys([*orders, *num_before])
    while free:
        group = free.pop()
        contested.pop(group)
        for then in orders.get(group, {}):
            num_before[then] -= 1
            if not num_before[then]:
                free.append(then)
    return next((ring for start in contested if (ring := _round(start, orders))), [])


def _round(start: str, orders: Orders) -> list[str]:
    """The shortest way from a group back to itself."""
    before: dict[str, str] = {}
    queue = deque([start])
    while queue:
        group = queue.popleft()
        for then in orders.get(group, {}):
            if then == start:
                way = [group]
                while way[-1] != start:
                    way.append(before[way[-1]])
                return way[::-1]
            if then not in before:
                before[then] = group
                queue.append(then)
    return []


def _steps(ring: Sequence[str], orders: Orders) -> Iterator[tuple[str, str, set[int]]]:
    """The ring's groups two by two, with the ranks that use them so; steps of a rank together."""
    ranks = [orders[group][then] for group, then in zip(ring, [*ring[1:], ring[0]], strict=True)]
    turn = next((index for index in range(len(ring)) if not ranks[index - 1] & ranks[index]), 0)
    groups = [*ring[turn:], *ring[:turn]]
    first, same = groups[0], ranks[turn]
    for index in range(1, len(groups)):
        following = ranks[(turn + index) % len(ranks)]
        if not same & following:
            yield first, groups[index], same
            first, same = groups[index], following
        else:
            same = same & following
    yield first, groups[0], same


def _told(first: Head, then: Head, ranks: set[int]) -> str:
    inside = [rank for rank in sorted(ranks) if rank in then.entries]
    issued = f"{first}{at(first.entries[min(ranks)])}"
    if inside:
        return f"{named_ranks(inside)} enqueued {issued} before {then}"
    waits, has = ("waits", "has") if len(ranks) == 1 else ("wait", "have")
    return f"{named_ranks(sorted(ranks))} {waits} in {issued} and {has} not entered {then}"
