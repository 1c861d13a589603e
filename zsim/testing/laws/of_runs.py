"""Laws of a Run with its scenario: bytes, memory from step to step, order, links, peak rates.

Laws of the record alone are `zsim.ir.laws.run_laws`', ZeRO's table is
`zsim.testing.laws.zero_table`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise

from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.collectives.nccl.placed import reached_bytes_per_s
from zsim.engine.costs.kernel_time import multiplied_in
from zsim.ir.laws import run_laws
from zsim.ir.ops import COLLECTIVES
from zsim.ir.run import CollectiveRecord, RankRun, Span
from zsim.runs.run import Run
from zsim.scenario.flops import hardware_flops, model_flops
from zsim.testing.laws.variants import program_of

ROUNDING_NS = 2
"""Most by which a collective's times are rounded, at its start and at its end."""
_Load = tuple[int, int, int, str]
"""Start and end of collectives in ns, ns in which a link moves their bytes, their names."""
GLOO_TIMES, RING_TIMES = {"reduce_scatter": 2, "all_reduce": 2}, {"all_reduce": 2}
"""Passes of an op over the bytes that other ranks lack, where it is not one. A ring's all-reduce
is two passes, and gloo's reduce-scatter is an all-reduce."""


def records_are_possible(run: Run) -> Iterator[str]:
    """The record obeys the laws that every record must obey, with a scenario or without one."""
    yield from run_laws.run_breaches(run.record)


def bytes_sent_are_received(run: Run) -> Iterator[str]:
    """All ranks together send what their collectives' algorithms need, and not a byte more.

    Ranks that are alike show the most that one of them sends, so their sum may be more, and never
    less.
    """
    sent = sum(rank.stands_for * rank.bytes_sent for rank in run.ranks)
    if not sent or sum(rank.stands_for for rank in run.ranks) < run.world_size:
        return  # a backend that sees no wire, or some ranks alone
    times = GLOO_TIMES if run.record.provenance.get("device") == "cpu" else RING_TIMES
    needed = Fraction(0)
    for rank in run.ranks:
        for record in rank.phases["steady"].collectives:
            lacked = Fraction(record.nbytes * (record.group_size - 1), record.group_size)
            needed += rank.stands_for * times.get(record.op, 1) * lacked
    is_exact = run.record.interpreter == "simulator" and not run.record.representatives
    if sent < needed or (is_exact and sent != needed):
        yield f"all ranks: {sent:,} B sent, of {needed.__ceil__():,} B that are to be received"


def steps_return_the_memory_they_take(run: Run) -> Iterator[str]:
    """A phase begins with the bytes that the one before left, and a steady step ends with as many
    as it began with."""
    for rank in run.ranks:
        memory = {name: phase.memory for name, phase in rank.phases.items()}
        steady = memory.get("steady")
        if steady and steady.start_bytes != steady.end_bytes:
            yield (
                f"rank {rank.rank}: a steady step begins with {steady.start_bytes:,} B and ends "
                f"with {steady.end_bytes:,} B"
            )
        if {"construction", "first"} <= memory.keys():
            built, first = memory["construction"].end_bytes, memory["first"].start_bytes
            if built != first:
                yield (
                    f"rank {rank.rank}: construction leaves {built:,} B, and the first step begins "
                    f"with {first:,} B"
                )


def members_issue_alike(run: Run) -> Iterator[str]:
    """The ranks of a group issue the same collectives over it in the same order, in each phase."""
    mesh = run.record.mesh
    for phase in ("construction", "first", "steady"):
        first: dict[tuple[str, tuple[int, ...]], tuple[RankRun, list[CollectiveRecord]]] = {}
        known: dict[int, dict[str, list[CollectiveRecord]]] = {}
        for rank in run.ranks:
            issued = rank.phases[phase].collectives if phase in rank.phases else ()
            for name, own in known.setdefault(id(issued), _by_group(issued)).items():
                key = name, mesh.group(name, rank.rank)
                other, theirs = first.setdefault(key, (rank, own))
                if theirs is not own and theirs != own:
                    yield _unlike(phase, name, (rank, own), (other, theirs))


def _by_group(issued: Sequence[CollectiveRecord]) -> dict[str, list[CollectiveRecord]]:
    groups: dict[str, list[CollectiveRecord]] = {}
    for record in issued:
        groups.setdefault(record.group, []).append(record)
    return groups


def _unlike(
    phase: str, group: str, mine: tuple[RankRun, list[CollectiveRecord]],
    other: tuple[RankRun, list[CollectiveRecord]],
) -> str:
    (rank, own), (member, theirs) = mine, other
    index = next(
        (at for at, pair in enumerate(zip(own, theirs, strict=False)) if pair[0] != pair[1]),
        min(len(own), len(theirs)),
    )
    return (
        f"rank {rank.rank}: {phase} collective {index} of {group} is {_named(own, index)}, and "
        f"{_named(theirs, index)} on rank {member.rank}"
    )


def _named(records: Sequence[CollectiveRecord], index: int) -> str:
    if index >= len(records):
        return "none"
    return f"{records[index].op} of {records[index].nbytes:,} B from root {records[index].root}"


def spans_are_what_was_issued(run: Run) -> Iterator[str]:
    """The step's collectives are those of its spans, and no op starts before the host has issued
    it."""
    for rank in _distinct(run):
        spans = [span for span in rank.spans if span.kind in COLLECTIVES]
        shown = Counter((span.kind, span.nbytes, span.group) for span in spans)
        issued = Counter(
            (record.op, record.nbytes, record.group)
            for record in rank.phases["steady"].collectives
        )
        for kind, nbytes, group in (shown - issued) + (issued - shown) if rank.spans else ():
            key = kind, nbytes, group
            yield (
                f"rank {rank.rank}: {shown[key]} spans of {kind} of {nbytes:,} B over {group}, of "
                f"{issued[key]} issued"
            )
        for span in rank.spans:
            if span.start_ns < span.issued_ns:
                yield (
                    f"rank {rank.rank}: {span.name} starts at {span.start_ns:,} ns, issued at "
                    f"{span.issued_ns:,} ns"
                )


def streams_keep_the_order_of_issue(run: Run) -> Iterator[str]:
    """Ops of one stream start in the order in which the simulated host issues them, and collectives
    of one communicator follow one another."""
    if run.record.interpreter != "simulator":
        return
    for rank in _distinct(run):
        queues: dict[str, list[Span]] = {}
        for span in rank.spans:
            for queue in ({span.stream, f"group {span.group}"} if span.group else {span.stream}):
                queues.setdefault(queue, []).append(span)
        queues.pop("host", None)
        for queue, spans in queues.items():
            for before, after in pairwise(spans):
                if after.start_ns < before.end_ns:
                    yield (
                        f"rank {rank.rank}: {after.name} starts at {after.start_ns:,} ns on "
                        f"{queue}, where {before.name} ends at {before.end_ns:,} ns"
                    )


def links_carry_no_more_than_they_can(run: Run) -> Iterator[str]:
    """Links carry at most their bandwidth while collectives of a rank run, alone or at once.

    The time is long enough for the bytes that each rank lacks at least, whatever the algorithm.
    With rings as steps, it is the time of all members: others move bytes for each as well.
    """
    cluster, mesh = run.scenario.cluster, run.record.mesh
    if run.record.interpreter != "simulator" or run.record.provenance["cluster"] != cluster.name:
        return
    meetings = _meetings(run) if run.record.provenance.get("detail") == "steps" else {}
    for rank in _distinct(run):
        loads: dict[str, list[_Load]] = {}
        needs: dict[tuple[str, int], dict[str, int]] = {}
        numbers = Counter[str]()
        for span in rank.spans:
            if span.kind in COLLECTIVES and span.group:
                key = span.group, span.nbytes
                meeting = span.group, mesh.group(span.group, rank.rank), numbers[span.group]
                start, end = meetings.get(meeting, (span.start_ns, span.end_ns))
                numbers[span.group] += 1
                if key not in needs:
                    needs[key] = _needed_ns(cluster, mesh.group(span.group, rank.rank), *key[1:])[
                        rank.rank
                    ]
                for link, work in needs[key].items():
                    loads.setdefault(link, []).append((start, end, work, span.name))
        for link, each in loads.items():
            for start, end, work, names in (*each, *_busy(each)):
                if work > end - start + ROUNDING_NS:
                    yield (
                        f"rank {rank.rank}: {names} in {end - start:,} ns from {start:,} ns, and "
                        f"the {link} link needs {work:,} ns for their bytes"
                    )


def _meetings(run: Run) -> dict[tuple[str, tuple[int, ...], int], tuple[int, int]]:
    """The first start and the last end of each collective, by group, its ranks and number."""
    times: dict[tuple[str, tuple[int, ...], int], tuple[int, int]] = {}
    for rank in run.ranks:
        numbers = Counter[str]()
        for span in rank.spans:
            if span.kind in COLLECTIVES and span.group:
                group = run.record.mesh.group(span.group, rank.rank)
                key = span.group, group, numbers[span.group]
                numbers[span.group] += 1
                start, end = times.get(key, (span.start_ns, span.end_ns))
                times[key] = min(start, span.start_ns), max(end, span.end_ns)
    return times


def _needed_ns(
    cluster: ClusterSpec, ranks: tuple[int, ...], nbytes: int
) -> dict[int, dict[str, int]]:
    """Nanoseconds in which links at full speed move the bytes that each of `ranks` lacks, by rank
    and kind of link."""
    bytes_per_s = reached_bytes_per_s(cluster, cluster.path(ranks))
    alone = Fraction(nbytes * (len(ranks) - 1) * 10**9, len(ranks)) / bytes_per_s
    return {
        rank: {link: int(share * alone) for link, share in shares.items()}
        for rank, shares in cluster.usage(ranks).items()
    }


def _busy(loads: Sequence[_Load]) -> Iterator[_Load]:
    """Intervals of time in which the link is never idle, with all that it carries."""
    begin = end = -1
    work, names = 0, list[str]()
    for start, stop, own, name in sorted(loads):
        if start >= end:
            if len(names) > 1:
                yield begin, end, work, ", ".join(names)
            begin, end, work, names = start, stop, 0, []
        end, work = max(end, stop), work + own
        names.append(name)
    if len(names) > 1:
        yield begin, end, work, ", ".join(names)


def steps_are_as_long_as_their_streams(run: Run) -> Iterator[str]:
    """A step takes as long as the ops of its busiest stream."""
    if run.record.interpreter != "simulator":
        return
    for rank in _distinct(run):
        busy = Counter[str]()
        for span in rank.spans:
            busy[span.stream] += span.end_ns - span.start_ns
        busy.pop("host", None)
        stream, most = max(busy.items(), key=lambda item: item[1], default=("", 0))
        if most > (run.record.step_time_ns or 0):
            yield (
                f"rank {rank.rank}: {most:,} ns of ops on {stream} in a step of "
                f"{run.record.step_time_ns:,} ns"
            )


def kernels_are_no_faster_than_the_peak(run: Run) -> Iterator[str]:
    """Kernels on a device take as long as their FLOPs at its peak."""
    scenario = run.scenario
    device, program = scenario.cluster.device, program_of(scenario)
    if run.record.provenance["cluster"] != scenario.cluster.name:
        return
    for rank in _distinct(run):
        for span, op in zip(rank.spans, program.of_rank(rank.rank).steady, strict=True):
            least = sum(
                kernel.flops * 10**9
                // device.peak_flops(multiplied_in(kernel, scenario.execution))
                for kernel in op.kernels if kernel.flops and kernel.location == "device"
            )
            if least > span.end_ns - span.start_ns:
                yield (
                    f"rank {rank.rank}: op {op.index} ({span.name}) takes "
                    f"{span.end_ns - span.start_ns:,} ns, and its FLOPs {least:,} ns at the peak"
                )


def utilization_has_its_bounds(run: Run) -> Iterator[str]:
    """HFU is at most 1. MFU is at most HFU, or twice HFU with fused causal attention: MFU counts
    all scores, and the kernel computes half."""
    if run.mfu is None or run.hfu is None or run.scenario.execution.float8:
        return
    if run.hfu > 1 and run.record.interpreter == "simulator":
        yield f"HFU {run.hfu:.6f}: more FLOPs are done than the peak allows"
    needed, done = model_flops(run.scenario), hardware_flops(run.scenario)
    halved = any(
        op.kind == "attention" and op.implementation != "explicit" and op.causal
        for module in run.scenario.model.modules for op in module.operators
    )
    if needed > done * (1 + halved):
        yield f"{needed:,} FLOPs are needed, and only {done:,} are done"


def _distinct(run: Run) -> list[RankRun]:
    """One rank of those with the same spans."""
    return list({id(rank.spans): rank for rank in reversed(run.ranks)}.values())
