"""Causes of a step's duration: the reasons why each collective is exposed, and the critical path.

An op starts when the last thing that it waits for is over. The walk back from the end of the step
along these last things gives the critical path.

A collective is exposed for as long as it runs while the compute stream is idle. Each of those
nanoseconds has the first of these reasons that holds:

1. It began late: something held it while the compute stream worked, which would have hidden it. The
   cause can be a dependency, the host that had not issued it, or another rank. It can be an op
   ahead of it on its stream or in its communicator's queue. The last thing to end alone held it
   from the end of the one before that to its own end, and so on backwards. Each such interval
   accounts for as much as compute ran in it while the communicator was free. Compute counts once:
   not where it hides another collective of the communicator, or is counted as lost to one. An op
   ahead of it counts only where nothing else held it longer. A queue accounts for all compute that
   ran meanwhile, as a communicator of its own would have hidden that much. Of this, shared links
   account for the time by which those ahead in the queue took longer than alone, in sum. The host
   counts where it issued the op after all dependencies were over. Where they were not, a faster
   host would not start the op earlier.
2. It shared its links: it took longer by so much than alone.
3. It is longer than the compute over it: it would be exposed even alone on its links and begun as
   early as can be.

Exposed time at an end of the step has no compute there to hide it, whatever its reason. One end
is before the first op of forward. The others are after the last op of each micro-batch's backward,
for collectives that could not begin earlier. A collective that begins so late only for
others ahead of it is not at an end: longer compute would hide it.

Everything is read from a simulated timeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from zsim.analysis.causes.exposure import at_ends, compute_ops, idle_intervals, shares_of
from zsim.analysis.causes.free_compute import FreeCompute
from zsim.analysis.causes.why import LONGER, SHARED, CriticalOp, Exposed, Reason, Waited, Why, name
from zsim.engine.events.rank_schedule import awaited_by_host
from zsim.engine.timeline import Timeline, Times
from zsim.ir.ops import COLLECTIVES, Op
from zsim.ir.program import Program

Kind = Literal["wait", "queue", "stream", "issued", "peer"]
WAITED: Mapping[Kind, Waited] = {"issued": "the host", "peer": "another rank"}
HELD: dict[Kind, Reason] = {
    "wait": "a dependency",
    "queue": "its communicator's queue",
    "stream": "its stream",
    "issued": "the host",
    "peer": "another rank",
}
"""Reason by kind of cause; of causes that end together the first in this order counts as the last.
"""
AHEAD: tuple[Kind, ...] = ("queue", "stream")
"""Kinds of earlier ops on the same stream or communicator, which needed the time themselves."""


def explain(
    program: Program, timeline: Timeline, *, rank: int | None = None, launch_queue: int = 0
) -> Why:
    """Exposed collectives and critical path of the steady step on `rank`, by default the rank that
    ends last; `launch_queue` as Costs has it."""
    chosen = (
        max(timeline.ranks, key=lambda r: (max(timeline.ranks[r].ends, default=0), -r))
        if rank is None
        else timeline.representatives[rank]
    )
    ops, times = program.of_rank(chosen).steady, timeline.ranks[chosen]
    befores = _befores(ops)
    idle = list(idle_intervals(ops, times))
    shares = {op.index: ns for op, ns in shares_of(ops, times, idle) if ns}
    exposed = list(_each_exposed(shares, ops, times, befores))
    before, after = at_ends(ops, times, idle, later_than=[each.values() for each in befores])
    exposed = [
        replace(each, before_ns=before.get(each.op.index, 0), after_ns=after.get(each.op.index, 0))
        for each in exposed
    ]
    return Why(
        rank=chosen,
        step_ns=timeline.step_time_ns,
        exposed=tuple(sorted(exposed, key=lambda each: (-each.exposed_ns, each.op.index))),
        critical_path=tuple(_path(ops, times, befores, _blockers(ops, times, launch_queue))),
        host_bound_ns=_waits_for_host(ops, times),
    )


def _waits_for_host(ops: Sequence[Op], times: Times) -> int:
    """Idle time of the compute stream that ends at the moment when the host issues its next op."""
    at = waited = 0
    for op in compute_ops(ops, times):
        start = times.starts[op.index]
        if start > at and start == times.issued[op.index]:
            waited += start - at
        at = max(at, times.ends[op.index])
    return waited


def _befores(ops: Sequence[Op]) -> list[dict[Kind, int]]:
    """Index of the op before each op on its stream and, for a collective, on its communicator."""
    streams: dict[str, int] = {}
    groups: dict[str, int] = {}
    befores = []
    for op in ops:
        before: dict[Kind, int] = {}
        if op.stream in streams and op.stream != "host":
            before["stream"] = streams[op.stream]
        streams[op.stream] = op.index
        if op.kind in COLLECTIVES:
            if op.group in groups:
                before["queue"] = groups[op.group]
            groups[op.group] = op.index
        befores.append(before)
    return befores


class HoldingCause(NamedTuple):
    """Cause that kept an op from starting: its end in ns, its kind, and the op behind it, if
    any."""

    until: int
    kind: Kind
    by: int | None


def _held(
    op: Op, ops: Sequence[Op], times: Times, befores: Sequence[dict[Kind, int]]
) -> list[HoldingCause]:
    """All that kept `op` from starting, the last first; never empty."""
    held = [HoldingCause(times.issued[op.index], "issued", None)]
    held += [HoldingCause(times.ends[wait], "wait", wait) for wait in op.waits]
    held += [
        HoldingCause(times.ends[index], kind, index) for kind, index in befores[op.index].items()
    ]
    order = list(HELD)
    held.sort(key=lambda cause: (-cause.until, order.index(cause.kind)))
    start = times.starts[op.index]
    return (
        [HoldingCause(start, "peer", None), *held]
        if held[0].until < start and op.kind in COLLECTIVES
        else held
    )


def holding_causes(ops: Sequence[Op], times: Times) -> list[HoldingCause]:
    """The last cause to end of all that kept each op from starting."""
    befores = _befores(ops)
    return [_held(op, ops, times, befores)[0] for op in ops]


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
    """Reasons of each collective that has one of the `shares`, in the order of starts.

    A queue's loss to shared links passes to the next collective as far as the queue alone held it.
    A later cause would have held it as well. The exposed part of the loss has held up compute too,
    and does not pass on.
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
                last.until - next(cause.until for cause in held if cause.kind not in AHEAD),
            )
        exposed = (
            _exposed(ops[index], ops, times, held, rooms[ops[index].group], lag, shares[index])
            if index in shares
            else None
        )
        if exposed:
            yield exposed
        if lag or lags.get(index):
            lags[index] = max(
                0, lags.get(index, 0) + lag - (dict(exposed.parts).get(SHARED, 0) if exposed else 0)
            )


def _late(
    held: Sequence[HoldingCause], room: FreeCompute, lag: int, ns: int
) -> Iterator[tuple[Reason, int, int | None]]:
    """Exposed nanoseconds, of `ns`, that compute would have hidden without each cause that held the
    collective: (reason, nanoseconds, the cause's op)."""
    waits = [cause for cause in held if cause.kind not in AHEAD]
    if waits[0].kind != "issued":
        waits = [cause for cause in waits if cause.kind != "issued"]
    counted = [held[0], *waits] if held[0].kind in AHEAD else waits
    first = HoldingCause(0, "issued", None)
    for cause, before in zip(counted, [*counted[1:], first], strict=True):
        since, until = before.until, cause.until
        part = (
            min(ns, room.work(since, until))
            if cause.kind == "queue"
            else room.take(since, until, ns)
        )
        ns -= part
        if cause.kind == "queue":
            lost = min(part, lag)
            part -= lost
            yield SHARED, lost, cause.by
        yield HELD[cause.kind], part, cause.by


def _exposed(
    op: Op, ops: Sequence[Op], times: Times, held: Sequence[HoldingCause], room: FreeCompute,
    lag: int, ns: int,
) -> Exposed:
    """`lag`: by how much the queue that `held` it would have been over earlier if none ahead of it
    had shared its links."""
    reasons = list(_late(held, room, lag, ns))
    rest = ns - sum(part for _, part, _ in reasons)
    shared = min(rest, times.shared.get(op.index, 0))
    reasons += [(SHARED, shared, held[0].by), (LONGER, rest - shared, held[0].by)]
    parts: dict[Reason, int] = {}
    about: dict[Reason, int | None] = {}
    for reason, part, index in reasons:
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
    """Last op whose end held up the host before it issued each op; None where there is none."""
    blockers: list[int | None] = []
    last, before = None, 0
    for op, awaited in zip(ops, awaited_by_host(ops, launch_queue), strict=True):
        ended = max(awaited, key=lambda index: (times.ends[index], index), default=None)
        if ended is not None and times.ends[ended] > before:
            last = ended
        blockers.append(last)
        before = times.issued[op.index]
    return blockers


def host_waits(ops: Sequence[Op], times: Times, launch_queue: int) -> dict[int, int]:
    """The op that the host awaited before it issued another, by the other's number: the next op
    with a duration on the device."""
    waits: dict[int, int] = {}
    awaited: int | None = None
    before: int | None = None
    for op, blocker in zip(ops, _blockers(ops, times, launch_queue), strict=True):
        if blocker is not None and blocker != before:
            of_host = ops[blocker].stream == "host"
            among = ops[blocker].waits if of_host else (blocker,)
            awaited, before = max(among, key=times.ends.__getitem__, default=None), blocker
        is_long = times.ends[op.index] > times.starts[op.index]
        if awaited is not None and is_long and op.stream != "host":
            waits[op.index], awaited = awaited, None
    return waits


def _path(
    ops: Sequence[Op], times: Times, befores: Sequence[dict[Kind, int]],
    blockers: Sequence[int | None],
) -> list[CriticalOp]:
    """The path from the first op to the last to end; through the host where the device held it up.
    """
    if not ops:
        return []
    at: int | None = max(range(len(ops)), key=lambda index: (times.ends[index], index))
    then, links = "the step is over", []
    while at is not None:
        op = ops[at]
        _, kind, before = _held(op, ops, times, befores)[0]
        link = CriticalOp(op=op, start_ns=times.starts[at], end_ns=times.ends[at], then=then)
        then = f"{name(op)} waits for " + {
            "issued": "the host, which awaited it", "peer": "another rank"
        }.get(kind, "it")
        at = blockers[at] if kind == "issued" else before
        waited = link.start_ns - (0 if at is None else times.ends[at])
        links.append(
            replace(link, waited_ns=waited, waited_for=WAITED.get(kind, "")) if waited else link
        )
    return links[::-1]
