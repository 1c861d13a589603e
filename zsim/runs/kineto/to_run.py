"""Traces of torch's profiler, one of each rank, made a Run: its last whole step.

A Run of a trace has collectives, spans and times. Memory, numerics and the phases before are not in
it. Kernels get units where FSDP's own annotations tell them, and the scenario's names for them
where a scenario is given.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from re import compile as pattern
from statistics import median_low

from zsim.ir.mesh import AXES, Mesh
from zsim.ir.ops import COLLECTIVES, Op
from zsim.ir.run import CollectiveRecord, MemoryRecord, PhaseRecord, RankRun, RunRecord, Span
from zsim.models.spec import ROOT
from zsim.models.training_options import Device
from zsim.runs.kineto import moves
from zsim.runs.kineto.moves import Moved
from zsim.runs.kineto.trace_file import KinetoError, KinetoTrace, TraceEvent
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario

STEP = pattern(r"ProfilerStep#\d+")
FSDP = pattern(r"FSDP::(\w+)(?: \((.*)\))?")
ENTERS, LEAVES = ("pre_forward", "pre_backward"), ("post_forward", "post_backward_accumulate")
BACKWARD = "autograd::engine::evaluate_function"
OPTIMIZER = "Optimizer.step#"
WRAPPERS = ("autograd", "c10d", "torch", "record_param_comms")
"""Namespaces of operators that call others, whose own time is theirs."""
Interval = tuple[int, int]


def to_run(traces: Sequence[KinetoTrace], *, name: str, scenario: Scenario | None) -> RunRecord:
    """The Run of the traces; KinetoError where they are not of one run, or of another world than
    the scenario's."""
    first = traces[0]
    worlds, ranks = {trace.world_size for trace in traces}, [trace.rank for trace in traces]
    if len(worlds) > 1 or len(set(ranks)) < len(ranks):
        raise KinetoError(
            where=str(first.path), expected="one trace of each rank, all of one world",
            found=f"ranks {sorted(ranks)[:12]} of worlds of {sorted(worlds)[:4]}",
        )
    if scenario is not None and scenario.world_size != first.world_size:
        raise KinetoError(
            where=scenario.name, expected=f"{scenario.world_size} ranks",
            found=f"a trace of {first.world_size}",
        )
    mesh = scenario.mesh if scenario else Mesh(dp_shard=first.world_size)
    kind: Device = "cpu" if first.device == "cpu" else "cuda"
    runs = [
        _rank(trace, mesh, plan(scenario, device=kind).of_rank(trace.rank).steady
              if scenario else ())
        for trace in sorted(traces, key=lambda trace: trace.rank)
    ]
    about = {
        "sees": "order", "phases": "steady", "timed": "the steps of a trace of torch's profiler",
        "device": first.device,
    }
    if scenario is not None:
        about |= {"strategy": scenario.strategy, "fingerprint": scenario.fingerprint}
    if len(runs) < first.world_size:
        about["ranks"] = " ".join(str(run.rank) for run in runs)
    return RunRecord(
        scenario=name, backend="kineto", interpreter="profiler", world_size=first.world_size,
        ranks=tuple(runs), mesh=mesh, provenance=about,
        step_time_ns=max(run.step_time_ns or 0 for run in runs),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """An operator or kernel on the compute stream, and the thread and time of its launch."""

    start_ns: int
    end_ns: int
    thread: str
    launched_ns: int


def _rank(trace: KinetoTrace, mesh: Mesh, planned: Sequence[Op]) -> RankRun:
    steps = [event for event in trace.of("user_annotation") if STEP.fullmatch(event.name)]
    if not steps:
        raise KinetoError(
            where=str(trace.path), expected="annotations ProfilerStep#N", found="none",
            remedy="call profiler.step() after each training step",
        )
    last = steps[-1]
    kernels = list(_launched(trace))
    if kernels:
        inside = [pair for pair in kernels if last.start_ns <= pair[1].start_ns < last.end_ns]
        starts = [
            min((kernel.start_ns for kernel, launch in kernels
                 if step.start_ns <= launch.start_ns < step.end_ns), default=step.start_ns)
            for step in steps
        ]
        moved = list(moves.on_gpu(trace, [p for p in inside if moves.is_nccl(p[0])]))
        works = [_Work(start_ns=k.start_ns, end_ns=k.end_ns, thread=launch.thread,
                       launched_ns=launch.start_ns)
                 for k, launch in inside if not moves.is_nccl(k)]
        end = max((kernel.end_ns for kernel, _ in inside), default=last.end_ns)
    else:
        starts, end = [step.start_ns for step in steps], last.end_ns
        moved = list(moves.on_cpu(trace, last.start_ns, last.end_ns))
        works = list(_operators(trace, last))
    base = starts[-1]
    times = [after - before for before, after in zip(starts, [*starts[1:], end], strict=True)]
    labels = _Labels(trace, planned)
    spans = [
        *_collective_spans(moved, labels, mesh, trace.rank, planned),
        *_compute_spans(works, labels, moved),
    ]
    step_ns = max(1, times[-1])
    records = tuple(
        CollectiveRecord(
            op=each.kind, nbytes=each.nbytes, group=_axis(each, mesh, trace.rank),
            group_size=len(each.ranks),
        )
        for each in moved
    )
    steady = PhaseRecord(
        collectives=records, memory=MemoryRecord(start_bytes=0, peak_bytes=0, end_bytes=0)
    )
    return RankRun(
        rank=trace.rank, phases={"steady": steady},
        spans=tuple(_within(spans, base, step_ns)),
        groups={_axis(each, mesh, trace.rank): each.ranks for each in moved},
        step_time_ns=max(1, median_low(times)), step_times_ns=tuple(times),
        recorded_step_ns=step_ns,
    )


def _launched(trace: KinetoTrace) -> Iterator[tuple[TraceEvent, TraceEvent]]:
    """Each kernel, copy and fill of the device with the call that launched it."""
    launches = {
        event.args.get("correlation"): event for event in trace.of("cuda_runtime", "cuda_driver")
    }
    for kernel in trace.of("kernel", "gpu_memcpy", "gpu_memset"):
        launch = launches.get(kernel.args.get("correlation"))
        if launch is not None:
            yield kernel, launch


def _operators(trace: KinetoTrace, step: TraceEvent) -> Iterator[_Work]:
    """The outermost operators of a CPU's step that compute."""
    end = step.start_ns
    for event in trace.of("cpu_op"):
        space, colons, _ = event.name.partition("::")
        computes = bool(colons) and space not in WRAPPERS and event.thread == step.thread
        if computes and event.start_ns >= end and event.end_ns <= step.end_ns:
            end = event.end_ns
            yield _Work(start_ns=event.start_ns, end_ns=end, thread=event.thread,
                        launched_ns=event.start_ns)


def _axis(moved: Moved, mesh: Mesh, rank: int) -> str:
    """The mesh's name of a collective's group, "world" for none of its axes."""
    return next((axis for axis in AXES if mesh.group(axis, rank) == moved.ranks), "world")


def _collective_spans(
    moved: Sequence[Moved], labels: _Labels, mesh: Mesh, rank: int, planned: Sequence[Op]
) -> Iterator[Span]:
    """The collectives under the scenario's names, or those of FSDP's annotations, or a number."""
    ops = [op for op in planned if op.kind in COLLECTIVES]
    alike = [op.kind for op in ops] == [each.kind for each in moved]
    for number, each in enumerate(moved):
        unit = ops[number].unit if alike else labels.around(each.issued_ns) or f"#{number}"
        yield Span(
            name=f"{each.kind} {unit}", kind=each.kind, unit=unit,
            stream=ops[number].stream if alike else each.kind, start_ns=each.start_ns,
            end_ns=each.end_ns, nbytes=each.nbytes, issued_ns=each.issued_ns,
            group=_axis(each, mesh, rank),
        )


def _compute_spans(
    works: Sequence[_Work], labels: _Labels, moved: Sequence[Moved]
) -> Iterator[Span]:
    """Works by kind and unit; neighbours that are alike are one span where no collective runs
    between them."""
    busy = sorted((each.start_ns, each.end_ns) for each in moved)
    last: Span | None = None
    for work in sorted(works, key=lambda work: work.start_ns):
        kind, unit = labels.of(work)
        start = max(work.start_ns, last.end_ns) if last else work.start_ns
        end = max(start, work.end_ns)
        if last and (last.kind, last.unit) == (kind, unit) and not any(
            begin < start and until > last.end_ns for begin, until in busy
        ):
            last = replace(last, end_ns=end)
            continue
        if last:
            yield last
        last = Span(
            name=f"{kind} {unit}".strip(), kind=kind, unit=unit, stream="compute", start_ns=start,
            end_ns=end, issued_ns=work.launched_ns,
        )
    if last:
        yield last


class _Labels:
    """Kind and unit of a work, by what its launch lies in."""

    def __init__(self, trace: KinetoTrace, planned: Sequence[Op]) -> None:
        events = trace.of("user_annotation", "cpu_op")
        self._steps = _outermost(e for e in events if e.name.startswith(OPTIMIZER))
        self._backwards = _outermost(e for e in events if e.name.startswith(BACKWARD))
        labels = [(e, match) for e in events if (match := FSDP.fullmatch(e.name))]
        self._wrappers = _outermost(event for event, _ in labels)
        own = dict.fromkeys(m[2] for _, m in labels if m[1] == "pre_forward" and m[2])
        units = dict.fromkeys(
            op.unit for op in planned if op.kind == "forward" and op.unit != ROOT
        )
        names = dict(zip(own, units, strict=True)) if len(own) == len(units) else {}
        self._annotated = [(e.start_ns, e.end_ns, names.get(m[2], m[2]) or ROOT) for e, m in labels]
        changes = sorted(
            (e.end_ns, names.get(m[2], m[2]) or ROOT) if m[1] in ENTERS else (e.start_ns, ROOT)
            for e, m in labels if m[1] in (*ENTERS, *LEAVES)
        )
        self._times, self._units = [at for at, _ in changes], [unit for _, unit in changes]

    def around(self, at: int) -> str:
        """The unit of the last of FSDP's annotations that a moment lies in; "" for none."""
        return next(
            (unit for start, end, unit in reversed(self._annotated) if start <= at < end), ""
        )

    def of(self, work: _Work) -> tuple[str, str]:
        """The kind of a work, and its unit, "" where the trace tells none."""
        at, thread = work.launched_ns, work.thread
        if _lies_in(self._steps, thread, at):
            return "optimizer", ROOT
        latest = bisect_right(self._times, at) - 1
        unit = (self._units[latest] if latest >= 0 else ROOT) if self._units else ""
        if _lies_in(self._wrappers, thread, at):
            return "copy", unit
        return ("backward" if _lies_in(self._backwards, thread, at) else "forward"), unit


def _outermost(events: Iterator[TraceEvent]) -> dict[str, list[Interval]]:
    """Disjoint intervals of events by thread, in order; those inside others are left out."""
    by_thread: dict[str, list[Interval]] = {}
    for event in events:
        intervals = by_thread.setdefault(event.thread, [])
        if not intervals or event.start_ns >= intervals[-1][1]:
            intervals.append((event.start_ns, event.end_ns))
    return by_thread


def _lies_in(intervals: dict[str, list[Interval]], thread: str, at: int) -> bool:
    own = intervals.get(thread, [])
    latest = bisect_right(own, (at, 2**63)) - 1
    return latest >= 0 and at < own[latest][1]


def _within(spans: Sequence[Span], base: int, step_ns: int) -> Iterator[Span]:
    """Spans since the step's start, none after its end, and one at a time on each stream."""
    free: dict[str, int] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns)):
        start = min(step_ns, max(0, span.start_ns - base, free.get(span.stream, 0)))
        end = min(step_ns, max(start, span.end_ns - base))
        free[span.stream] = end
        yield replace(
            span, start_ns=start, end_ns=end,
            issued_ns=min(start, max(0, span.issued_ns - base)),
        )


