"""Why a step takes as long as it does: why each exposed collective is, the critical path, and what
would hide the communication.

An op starts when the last thing that it waits for is over; walking back from the end of the step
along these last things gives the critical path.

A collective is exposed for as long as it runs while the compute stream is idle. Those nanoseconds
have these reasons, the first that holds, and together they are all of them:

1. It began late: it was held while the compute stream worked, and would have been hidden there.
What can hold it are its dependencies,
   the host that had not issued it, the other ranks, and what is ahead of it on its stream or in its
   communicator's queue. From its
   start back to the end of the thing before the last, the last alone held it; from there back to
   the one before that, that one; and
   so on. As much as compute ran in such a stretch it lost to that reason, provided that its
   communicator was free: what another
   collective of it is hidden under, or has been said to have lost already, is not there twice. What
   is ahead of it counts where
   nothing held it longer; of a queue it is all compute that ran meanwhile, as a communicator of its
   own would have hidden. Of
   this, shared links have as much as those ahead in the queue took longer than alone, one after
   another: it would have been over so much
   earlier. The host counts where it issued the op after all of its dependencies were over: one that
   is issued while they run would begin
   no earlier with a faster host.
2. It shared its links: by so much it took longer than it takes alone.
3. It is longer than the compute over it: alone on its links, and begun as early as can be, it would
not have been hidden either.

Whatever its reason, what is exposed at an end of the step has nothing there to hide it: before the
first of forward, and after the last of each micro-batch's backward in what could not begin earlier.
What only comes that late since others were ahead of it, longer compute would hide.

Everything is read from a simulated timeline, and what would help is simulated again, never recited.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from zsim.analysis.exposure import at_ends, compute_ops, idle_stretches, shares_of
from zsim.analysis.free_compute import FreeCompute
from zsim.engine.rank_schedule import awaited_by_host
from zsim.engine.timeline import Timeline, Times
from zsim.io.units import format_time
from zsim.ir.ops import COLLECTIVES, Op
from zsim.ir.program import Program

Reason = Literal[
    "a dependency",
    "the host",
    "its communicator's queue",
    "its stream",
    "another rank",
    "a shared link",
    "longer than the compute over it",
]
SHARED: Reason = "a shared link"
LONGER: Reason = "longer than the compute over it"
Kind = Literal["wait", "queue", "stream", "issued", "peer"]
Waited = Literal["", "the host", "another rank"]
WAITED: Mapping[Kind, Waited] = {"issued": "the host", "peer": "another rank"}
HELD: dict[Kind, Reason] = {
    "wait": "a dependency",
    "queue": "its communicator's queue",
    "stream": "its stream",
    "issued": "the host",
    "peer": "another rank",
}
"""What an op can wait for; of those that end at once the first counts as the last."""
AHEAD: tuple[Kind, ...] = ("queue", "stream")
"""What was issued before it to the same place, and needed the time for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """A collective during which the compute stream is idle for `exposed_ns`, and why: `parts` are
    those nanoseconds by reason, largest first. `waited_for` is the op that the first of them is
    about, or else the one that it began after ("" for none). Of those nanoseconds `before_ns` are
    before the first of forward, and `after_ns` follow the last of a backward, on which the
    collective depends."""

    op: Op
    start_ns: int
    duration_ns: int
    exposed_ns: int
    parts: tuple[tuple[Reason, int], ...]
    waited_for: str
    before_ns: int = 0
    after_ns: int = 0

    @property
    def reason(self) -> Reason:
        """That of most of its exposed time."""
        return self.parts[0][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """An op on the critical path, how long it takes there, and why the one after it could not start
    earlier.

    Where no op of the path ran for `waited_ns` before it, it waited for `waited_for`: the host, or
    another rank.
    """

    op: Op
    start_ns: int
    end_ns: int
    then: str
    waited_ns: int = 0
    waited_for: Waited = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """Of one rank's steady step: the exposed collectives, largest first, the critical path, and by
    reason the exposed time."""

    rank: int
    step_ns: int
    exposed: tuple[Exposed, ...]
    critical_path: tuple[Link, ...]
    host_bound_ns: int

    def __repr__(self) -> str:
        exposed = f"{format_time(self.exposed_ns)} of {format_time(self.step_ns)} exposed"
        reasons = ", ".join(f"{format_time(ns)} {why}" for why, ns in self.by_reason.items())
        return f"<Why of rank {self.rank}: {exposed}{': ' if reasons else ''}{reasons[:100]}>"

    @property
    def exposed_ns(self) -> int:
        """Exposed nanoseconds of all collectives."""
        return sum(one.exposed_ns for one in self.exposed)

    @property
    def before_ns(self) -> int:
        """Those before the first of forward."""
        return sum(one.before_ns for one in self.exposed)

    @property
    def after_ns(self) -> int:
        """Those after the last of a backward that nothing could hide."""
        return sum(one.after_ns for one in self.exposed)

    @property
    def at_ends_ns(self) -> int:
        """Those at either end, which no compute could hide."""
        return self.before_ns + self.after_ns

    @property
    def by_reason(self) -> dict[str, int]:
        """Exposed nanoseconds by reason, largest first."""
        found: dict[str, int] = {}
        for one in self.exposed:
            for reason, ns in one.parts:
                found[reason] = found.get(reason, 0) + ns
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def host_bound(self) -> bool:
        """Whether the device waits for the host in more than a tenth of the step."""
        return self.host_bound_ns * 10 > self.step_ns


def name(op: Op) -> str:
    """The op as people say it: "all_gather blocks.3"."""
    return f"{op.kind} {op.unit}"


def explain(
    program: Program, timeline: Timeline, *, rank: int | None = None, launch_queue: int = 0
) -> Why:
    """Why the steady step takes what it takes on `rank`, by default the one that ends last;
    `launch_queue` as the costs have it."""
    chosen = (
        max(timeline.ranks, key=lambda r: (max(timeline.ranks[r].ends, default=0), -r))
        if rank is None
        else timeline.representatives[rank]
    )
    ops, times = program.of_rank(chosen).steady, timeline.ranks[chosen]
    befores = _befores(ops)
    idle = list(idle_stretches(ops, times))
    shares = {op.index: ns for op, ns in shares_of(ops, times, idle) if ns}
    exposed = list(_each_exposed(shares, ops, times, befores))
    before, after = at_ends(ops, times, idle, later_than=[one.values() for one in befores])
    exposed = [
        replace(one, before_ns=before.get(one.op.index, 0), after_ns=after.get(one.op.index, 0))
        for one in exposed
    ]
    return Why(
        rank=chosen,
        step_ns=timeline.step_time_ns,
        exposed=tuple(sorted(exposed, key=lambda one: (-one.exposed_ns, one.op.index))),
        critical_path=tuple(_path(ops, times, befores, _blockers(ops, times, launch_queue))),
        host_bound_ns=_waits_for_host(ops, times),
    )


def _waits_for_host(ops: Sequence[Op], times: Times) -> int:
    """Idle time of the compute stream that ends at the moment when the host issues its next op."""
    at = found = 0
    for op in compute_ops(ops, times):
        start = times.starts[op.index]
        if start > at and start == times.issued[op.index]:
            found += start - at
        at = max(at, times.ends[op.index])
    return found


def _befores(ops: Sequence[Op]) -> list[dict[Kind, int]]:
    """By op the index of the op before it on its stream and, for a collective, on its communicator.
    """
    streams: dict[str, int] = {}
    groups: dict[str, int] = {}
    found = []
    for op in ops:
        before: dict[Kind, int] = {}
        if op.stream in streams and op.stream != "host":
            before["stream"] = streams[op.stream]
        streams[op.stream] = op.index
        if op.kind in COLLECTIVES:
            if op.group in groups:
                before["queue"] = groups[op.group]
            groups[op.group] = op.index
        found.append(before)
    return found


class _Held(NamedTuple):
    """Until when an op could not start, of what kind the reason is, and which op it is, if one."""

    until: int
    kind: Kind
    by: int | None


def _held(
    op: Op, ops: Sequence[Op], times: Times, befores: Sequence[dict[Kind, int]]
) -> list[_Held]:
    """All that kept `op` from starting, the last first; never empty."""
    found = [_Held(times.issued[op.index], "issued", None)]
    found += [_Held(times.ends[wait], "wait", wait) for wait in op.waits]
    found += [_Held(times.ends[index], kind, index) for kind, index in befores[op.index].items()]
    order = list(HELD)
    found.sort(key=lambda one: (-one.until, order.index(one.kind)))
    start = times.starts[op.index]
    return (
        [_Held(start, "peer", None), *found]
        if found[0].until < start and op.kind in COLLECTIVES
        else found
    )


def _room(ops: Sequence[Op], times: Times, group: str) -> FreeCompute:
    """The room of the communicator over `group`."""
    spans = [
        (times.starts[op.index], times.ends[op.index])
        for op in ops
        if op.kind in COLLECTIVES and op.group == group
    ]
    return FreeCompute(
        [(times.starts[op.index], times.ends[op.index]) for op in compute_ops(ops, times)],
        taken=spans,
    )


def _each_exposed(
    shares: Mapping[int, int], ops: Sequence[Op], times: Times, befores: Sequence[dict[Kind, int]]
) -> Iterator[Exposed]:
    """Why each collective that has one of the `shares` is exposed, by its start; with how much its
    queue lost to shared links so far.

    Such a loss is handed on as far as the queue alone held the next one: what came later than that
    would have held it as well. What is exposed for it has held up compute too, and is not lost
    again by those that come after.
    """
    rooms = {group: _room(ops, times, group) for group in {ops[index].group for index in shares}}
    lags = dict(times.shared)
    collectives = (op.index for op in ops if op.kind in COLLECTIVES)
    for index in sorted(
        collectives if lags else shares, key=lambda index: (times.starts[index], index)
    ):
        held = _held(ops[index], ops, times, befores)
        last, lag = held[0], 0
        if last.kind == "queue" and last.by is not None:
            lag = min(
                lags.get(last.by, 0),
                last.until - next(one.until for one in held if one.kind not in AHEAD),
            )
        found = (
            _exposed(ops[index], ops, times, held, rooms[ops[index].group], lag, shares[index])
            if index in shares
            else None
        )
        if found:
            yield found
        if lag or lags.get(index):
            lags[index] = max(
                0, lags.get(index, 0) + lag - (dict(found.parts).get(SHARED, 0) if found else 0)
            )


def _late(
    held: Sequence[_Held], room: FreeCompute, lag: int, ns: int
) -> Iterator[tuple[Reason, int, int | None]]:
    """By what held a collective: of its `ns` exposed nanoseconds those that compute was there for,
    and which op it was."""
    waits = [one for one in held if one.kind not in AHEAD]
    if waits[0].kind != "issued":
        waits = [one for one in waits if one.kind != "issued"]
    counted = [held[0], *waits] if held[0].kind in AHEAD else waits
    for one, before in zip(counted, [*counted[1:], _Held(0, "issued", None)], strict=True):
        since, until = before.until, one.until
        part = (
            min(ns, room.work(since, until)) if one.kind == "queue" else room.take(since, until, ns)
        )
        ns -= part
        if one.kind == "queue":
            lost = min(part, lag)
            part -= lost
            yield SHARED, lost, one.by
        yield HELD[one.kind], part, one.by


def _exposed(
    op: Op, ops: Sequence[Op], times: Times, held: Sequence[_Held], room: FreeCompute, lag: int,
    ns: int,
) -> Exposed:
    """`lag`: by how much the queue that `held` it would have been over earlier if none ahead of it
    had shared its links."""
    found = list(_late(held, room, lag, ns))
    rest = ns - sum(part for _, part, _ in found)
    shared = min(rest, times.shared.get(op.index, 0))
    found += [(SHARED, shared, held[0].by), (LONGER, rest - shared, held[0].by)]
    parts: dict[Reason, int] = {}
    about: dict[Reason, int | None] = {}
    for reason, part, index in found:
        if part:
            parts[reason] = parts.get(reason, 0) + part
            about.setdefault(reason, index)
    ordered = tuple(sorted(parts.items(), key=lambda item: -item[1]))
    of = about[ordered[0][0]]
    return Exposed(
        op=op,
        start_ns=times.starts[op.index],
        duration_ns=times.ends[op.index] - times.starts[op.index],
        exposed_ns=ns,
        parts=ordered,
        waited_for="" if of is None else name(ops[of]),
    )


def _blockers(ops: Sequence[Op], times: Times, launch_queue: int) -> list[int | None]:
    """By op: the last one whose end the host has awaited, and been held up by, before it issued
    this one."""
    found: list[int | None] = []
    last, before = None, 0
    for op, awaited in zip(ops, awaited_by_host(ops, launch_queue), strict=True):
        ended = max(awaited, key=lambda index: (times.ends[index], index), default=None)
        if ended is not None and times.ends[ended] > before:
            last = ended
        found.append(last)
        before = times.issued[op.index]
    return found


def _path(
    ops: Sequence[Op], times: Times, befores: Sequence[dict[Kind, int]],
    blockers: Sequence[int | None],
) -> list[Link]:
    """From the first op to the last that ends; through the host where that was held up by the
    device."""
    if not ops:
        return []
    at: int | None = max(range(len(ops)), key=lambda index: (times.ends[index], index))
    then, found = "the step is over", []
    while at is not None:
        op = ops[at]
        _, kind, before = _held(op, ops, times, befores)[0]
        link = Link(op=op, start_ns=times.starts[at], end_ns=times.ends[at], then=then)
        then = f"{name(op)} waits for " + {
            "issued": "the host, which awaited it", "peer": "another rank"
        }.get(kind, "it")
        at = blockers[at] if kind == "issued" else before
        waited = link.start_ns - (0 if at is None else times.ends[at])
        found.append(
            replace(link, waited_ns=waited, waited_for=WAITED.get(kind, "")) if waited else link
        )
    return found[::-1]
