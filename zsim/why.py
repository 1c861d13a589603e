"""Why a step takes as long as it does: what each exposed collective waited for, the critical path, and what would hide the communication.

An op starts when the last thing that it waits for is over; walking back from the end of the step along these last things gives the
critical path, and the last thing before an exposed collective is its reason. Everything is read from a simulated timeline, and what would
help is simulated again, never recited.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from zsim.engine import Timeline, Times
from zsim.ops import COLLECTIVES, Op
from zsim.program import Program

Reason = Literal["a dependency", "the host", "its communicator's queue", "its stream", "another rank", "longer than the compute over it"]
LONGER: Reason = "longer than the compute over it"
COMPUTE_STREAM = "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """A collective during which the compute stream is idle for `exposed_ns`, why, and the op that it waited for ("" for none)."""

    op: Op
    start_ns: int
    duration_ns: int
    exposed_ns: int
    reason: Reason
    waited_for: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """An op on the critical path, how long it takes there, and why the one after it could not start earlier."""

    op: Op
    start_ns: int
    end_ns: int
    then: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """Of one rank's steady step: the exposed collectives, largest first, the critical path, and by reason the exposed time."""

    rank: int
    step_ns: int
    exposed: tuple[Exposed, ...]
    critical_path: tuple[Link, ...]
    host_bound_ns: int

    @property
    def by_reason(self) -> dict[str, int]:
        """Exposed nanoseconds by reason, largest first."""
        found: dict[str, int] = {}
        for one in self.exposed:
            found[one.reason] = found.get(one.reason, 0) + one.exposed_ns
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def host_bound(self) -> bool:
        """Whether the device waits for the host in more than a tenth of the step."""
        return self.host_bound_ns * 10 > self.step_ns


def name(op: Op) -> str:
    """The op as people say it: "all_gather blocks.3"."""
    return f"{op.kind} {op.unit}"


def explain(program: Program, timeline: Timeline, *, rank: int | None = None) -> Why:
    """Why the steady step takes what it takes on `rank`, by default the one that ends last."""
    chosen = max(timeline.ranks, key=lambda r: (max(timeline.ranks[r].ends, default=0), -r)) if rank is None else timeline.stand_ins[rank]
    ops, times = program.of_rank(chosen).steady, timeline.ranks[chosen]
    befores = _befores(ops)
    idle = list(_idle(ops, times))
    exposed = [_exposed(op, ops, times, befores, ns) for op, ns in _shares(ops, times, idle) if ns]
    return Why(
        rank=chosen,
        step_ns=timeline.step_time_ns,
        exposed=tuple(sorted(exposed, key=lambda one: (-one.exposed_ns, one.op.index))),
        critical_path=tuple(_path(ops, times, befores)),
        host_bound_ns=_waits_for_host(ops, times),
    )


def _compute(ops: Sequence[Op]) -> list[Op]:
    return [op for op in ops if op.stream == COMPUTE_STREAM and op.kind not in COLLECTIVES]


def _waits_for_host(ops: Sequence[Op], times: Times) -> int:
    """Idle time of the compute stream that ends at the moment when the host issues its next op."""
    at = found = 0
    for op in _compute(ops):
        start = times.starts[op.index]
        if start > at and start == times.issued[op.index] and op.kernels:
            found += start - at
        at = max(at, times.ends[op.index])
    return found


def _befores(ops: Sequence[Op]) -> list[dict[str, int]]:
    """By op the index of the op before it on its stream and, for a collective, on its communicator."""
    streams: dict[str, int] = {}
    groups: dict[str, int] = {}
    found = []
    for op in ops:
        before = {}
        if op.stream in streams and op.stream != "host":
            before["stream"] = streams[op.stream]
        streams[op.stream] = op.index
        if op.kind in COLLECTIVES:
            if op.group in groups:
                before["queue"] = groups[op.group]
            groups[op.group] = op.index
        found.append(before)
    return found


def _idle(ops: Sequence[Op], times: Times) -> Iterator[tuple[int, int]]:
    """Stretches from 0 to the end of the step in which the compute stream does nothing."""
    at = 0
    for op in _compute(ops):
        start, end = times.starts[op.index], times.ends[op.index]
        if start > at and end > start:
            yield at, start
        at = max(at, end)
    last = max(times.ends, default=0)
    if last > at:
        yield at, last


def _shares(ops: Sequence[Op], times: Times, idle: Sequence[tuple[int, int]]) -> Iterator[tuple[Op, int]]:
    """Each collective with the idle time that it covers; where several run at once the one that ends last has it."""
    coming = deque(sorted((times.starts[op.index], times.ends[op.index], op.index) for op in ops if op.kind in COLLECTIVES))
    near: list[tuple[int, int, int]] = []
    found: dict[int, int] = {}
    for start, end in idle:
        while coming and coming[0][0] < end:
            near.append(coming.popleft())
        near = [span for span in near if span[1] > start]
        edges = sorted({start, end, *(t for span in near for t in span[:2] if start < t < end)})
        for left, right in pairwise(edges):
            running = [(until, index) for since, until, index in near if since <= left and until >= right]
            if running:
                last = max(running)[1]
                found[last] = found.get(last, 0) + right - left
    for index, ns in found.items():
        yield ops[index], ns


def _last_thing(op: Op, ops: Sequence[Op], times: Times, befores: Sequence[dict[str, int]]) -> tuple[str, int | None]:
    """What was over last before `op` could start: "wait", "stream", "queue", "issued" or "peer", and the op that it was."""
    start = times.starts[op.index]
    ends: list[tuple[int, int, str, int | None]] = [(times.issued[op.index], 0, "issued", None)]
    ends += [(times.ends[wait], 3, "wait", wait) for wait in op.waits]
    ends += [(times.ends[index], 1 if kind == "stream" else 2, kind, index) for kind, index in befores[op.index].items()]
    end, _, kind, index = max(ends, key=lambda item: item[:2])
    return ("peer", None) if end < start and op.kind in COLLECTIVES else (kind, index)


def _exposed(op: Op, ops: Sequence[Op], times: Times, befores: Sequence[dict[str, int]], ns: int) -> Exposed:
    kind, index = _last_thing(op, ops, times, befores)
    duration = times.ends[op.index] - times.starts[op.index]
    words: dict[str, Reason] = {
        "wait": "a dependency",
        "stream": "its stream",
        "queue": "its communicator's queue",
        "issued": "the host",
        "peer": "another rank",
    }
    reason = words[kind]
    if ns < duration and kind != "queue":  # it began beside compute as early as it could, and outlasted that
        reason = LONGER
    return Exposed(
        op=op,
        start_ns=times.starts[op.index],
        duration_ns=duration,
        exposed_ns=ns,
        reason=reason,
        waited_for="" if index is None else name(ops[index]),
    )


def _path(ops: Sequence[Op], times: Times, befores: Sequence[dict[str, int]]) -> list[Link]:
    """From the first op to the last that ends."""
    if not ops:
        return []
    at: int | None = max(range(len(ops)), key=lambda index: (times.ends[index], index))
    then, found = "the step is over", []
    while at is not None:
        op = ops[at]
        kind, before = _last_thing(op, ops, times, befores)
        found.append(Link(op=op, start_ns=times.starts[at], end_ns=times.ends[at], then=then))
        then = f"{name(op)} waits for " + {"issued": "the host", "peer": "another rank"}.get(kind, "it")
        at = before
    return found[::-1]
