"""Spans of a recorded step, under the units and streams of the Program that was planned for it.

Several steps are recorded after those whose time is reported. The one of median length gives the
spans, and all lengths are kept, so that what recording costs can be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from zreal.meters.clocks import StepClock, clock_of
from zreal.meters.timeline import Describe, Mark, MarkedCall, StepMarks, TimelineRecorder
from zsim.ir.ops import COLLECTIVES, Op
from zsim.ir.run import Span
from zsim.models.spec import ModelSpec
from zsim.runs.figures.intervals import TimeInterval, union_of

MOST_RECORDED = 9
"""Steps that are recorded at most; fewer where fewer were timed."""
COMPUTE = "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Spans of one step, how long that step was, and how long every recorded one was, in ns."""

    spans: tuple[Span, ...] = ()
    step_ns: int | None = None
    at_ns: int | None = None
    """Beginning of that step by the machine's clock; None by a device's own."""
    times_ns: tuple[int, ...] = ()


def units_of(module: nn.Module, spec: ModelSpec) -> dict[str, list[nn.Module]]:
    """The modules of each unit but the root's, before any of them is wrapped."""
    return {
        unit.fqn: [module.get_submodule(fqn) for fqn in unit.modules or (unit.fqn,)]
        for unit in spec.inside_out
    }


def record(
    step: Callable[[], object], *, device: str, root: nn.Module,
    units: Mapping[str, Sequence[nn.Module]], describe: Describe, planned: Sequence[Op],
    number: int,
) -> Recording:
    """Record up to `number` steps; the spans are of the one whose slowest rank is the median.

    `planned`: the ops of the Program's steady step, whose names and streams collectives get.
    """
    clock = clock_of(device)
    recorder = TimelineRecorder(root=root, units=units, describe=describe, clock=clock)
    with recorder.active():
        recorder.recorded(step)
        steps, begun = [], []
        for _ in range(min(MOST_RECORDED, number)):
            steps.append(spans_of_step(recorder.recorded(step), clock, planned))
            begun.append(clock.base_ns)
    slowest = torch.tensor([ns for ns, _ in steps], dtype=torch.int64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    chosen = int(slowest.argsort()[(len(steps) - 1) // 2])
    return Recording(
        spans=steps[chosen][1], step_ns=steps[chosen][0], at_ns=begun[chosen],
        times_ns=tuple(ns for ns, _ in steps),
    )


def spans_of_step(
    step: StepMarks, clock: StepClock, planned: Sequence[Op]
) -> tuple[int, tuple[Span, ...]]:
    """The length of a recorded step, and its spans by the time at which they began."""
    waits = union_of((clock.ns(start), clock.ns(end)) for start, end in step.waits)
    spans = [
        *_collectives(step.calls, clock, planned, step.step_ns),
        *_compute(step.marks, waits, clock, step.step_ns),
    ]
    return step.step_ns, tuple(sorted(spans, key=lambda span: (span.start_ns, span.end_ns)))


def _collectives(
    calls: Sequence[MarkedCall], clock: StepClock, planned: Sequence[Op], end_ns: int
) -> Iterator[Span]:
    """Each collective from its issue, or the end of the one before it in its group, to its end.

    No backend tells when it took a collective from its queue.
    """
    ops = [op for op in planned if op.kind in COLLECTIVES]
    alike = [op.kind for op in ops] == [call.record.op for call in calls]
    free: dict[tuple[str, str], int] = {}
    for number, call in enumerate(calls):
        record = call.record
        unit = ops[number].unit if alike else f"#{number}"
        stream = ops[number].stream if alike else record.op
        queues = [("group", record.group), ("stream", stream)]
        start = max(clock.ns(call.begun), *(free.get(queue, 0) for queue in queues))
        end = end_ns if call.ended is None else clock.ns(call.ended)
        start, end = min(start, end_ns), min(max(start, end), end_ns)
        free.update(dict.fromkeys(queues, end))
        yield Span(
            name=f"{record.op} {unit}", kind=record.op, unit=unit, stream=stream, start_ns=start,
            end_ns=end, nbytes=record.nbytes, issued_ns=min(call.issued_ns, start),
            group=record.group,
        )


def _compute(
    marks: Sequence[Mark], waits: Sequence[TimeInterval], clock: StepClock, end_ns: int
) -> Iterator[Span]:
    """Intervals of the compute stream by unit, less those in which it waits for collectives."""
    moments = [*(clock.ns(mark.moment) for mark in marks), end_ns]
    last: Span | None = None
    for mark, start, end in zip(marks, moments, moments[1:], strict=False):
        if not mark.kind:
            continue
        for begin, until in without((start, min(end, end_ns)), waits):
            span = Span(
                name=f"{mark.kind} {mark.unit}", kind=mark.kind, unit=mark.unit, stream=COMPUTE,
                start_ns=begin, end_ns=until, issued_ns=min(mark.issued_ns, begin),
            )
            if last and (last.name, last.end_ns) == (span.name, begin):
                last = replace(last, end_ns=until)
                continue
            if last:
                yield last
            last = span
    if last:
        yield last


def without(interval: TimeInterval, others: Sequence[TimeInterval]) -> Iterator[TimeInterval]:
    """Parts of `interval` that lie in none of the `others`, which are disjoint and in order."""
    start, end = interval
    for begin, until in others:
        if until <= start:
            continue
        if begin >= end:
            break
        if begin > start:
            yield start, begin
        start = max(start, until)
    if start < end:
        yield start, end

