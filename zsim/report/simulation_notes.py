"""Notes for the trace of a simulated Run: why each op waited, what carries a collective, memory by
kind, and rates of links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from zsim.analysis.causes.critical_path import HELD, holding_causes, host_waits
from zsim.analysis.simulated_step import explain_step, simulated_step
from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.collectives.nccl.durations import factor
from zsim.cluster.ring_hops import Hop, hops
from zsim.cluster.routes import device_name
from zsim.engine.costs.op_costs import Costs
from zsim.engine.timeline import Times
from zsim.ir.ops import COLLECTIVES, Op
from zsim.ir.program import Program
from zsim.ir.run import RunRecord
from zsim.report.memory_walk import walk
from zsim.runs.pictures.trace_notes import RankNotes, SpanNote, TraceNotes
from zsim.scenario.scenario import Scenario

Shares = dict[tuple[str, str], float]
"""Bytes on a link for each byte that a collective's group sends, by group and link."""
MOST_KERNELS = 20_000
"""Kernels of a rank that a trace has."""
Rings = dict[tuple[int, ...], tuple[Hop, ...]]
"""Hops of rings by their members, which many ranks share."""


def trace_notes(scenario: Scenario, record: RunRecord) -> TraceNotes:
    """Notes on the shown ranks of `record`, which the simulator made of `scenario`."""
    program, timeline = simulated_step(scenario)
    costs = Costs(cluster=scenario.cluster, execution=scenario.executed)
    known: dict[tuple[int, int], RankNotes] = {}
    notes: dict[int, RankNotes] = {}
    rings: Rings = {}
    for rank in (each.rank for each in record.ranks):
        like = timeline.representatives[rank]
        key = like, program.assignment[rank]
        ops, times = program.of_rank(rank).steady, timeline.ranks[like]
        if key not in known:
            why = explain_step(scenario, program, timeline, rank=rank)
            exposed = {each.op.index: (each.exposed_ns, each.reason) for each in why.exposed}
            known[key] = RankNotes(
                spans=dict(_spans(program, ops, times, rank, costs, exposed)),
                memory=_memory(program, rank, times), kernels=_kernels(ops, times, costs),
            )
        rates = _rates(program, ops, times, rank, costs, rings)
        notes[rank] = replace(known[key], rates=rates)
    return notes


def _spans(
    program: Program, ops: Sequence[Op], times: Times, rank: int, costs: Costs,
    exposed: Mapping[int, tuple[int, str]],
) -> Iterator[tuple[int, SpanNote]]:
    """A note on each op that takes time."""
    by_host = host_waits(ops, times, costs.launch_queue)
    for op, cause in zip(ops, holding_causes(ops, times), strict=True):
        start, end = times.starts[op.index], times.ends[op.index]
        if end == start:
            continue
        arguments: dict[str, str | int | float] = {}
        if op.kind in COLLECTIVES:
            members = program.mesh.group(op.group, rank)
            arguments = {"group": op.group, "group_size": len(members)}
            if len(members) > 1:
                arguments["algorithm"] = costs.algorithm(op.kind, op.nbytes, members)
                arguments["bus_bandwidth_GB_s"] = round(
                    factor(op.kind, len(members)) * op.nbytes / (end - start), 3
                )
        elif op.flops:
            arguments = {"flops": op.flops, "kernels": len(op.kernels)}
        if op.index in exposed:
            arguments["exposed_ns"], arguments["exposed_by"] = exposed[op.index]
        by = cause.by if start > times.issued[op.index] else by_host.get(op.index)
        if start > times.issued[op.index] or by is not None:
            arguments["waited_for"] = HELD[cause.kind]
        apart = by is not None and ops[by].stream != op.stream and times.ends[by] > times.starts[by]
        yield op.index, SpanNote(
            arguments=arguments, cause=by if apart else None, reason=HELD[cause.kind]
        )


def _kernels(
    ops: Sequence[Op], times: Times, costs: Costs
) -> dict[int, list[tuple[str, int]]]:
    """Kernels of each computation with their times; none above `MOST_KERNELS`."""
    busy = [
        op for op in ops
        if op.kind not in COLLECTIVES and times.ends[op.index] > times.starts[op.index]
    ]
    if sum(len(op.kernels) for op in busy) > MOST_KERNELS:
        return {}
    return {
        op.index: [
            (kernel.operator, ns) for kernel in op.kernels if (ns := costs.kernel_ns(kernel))
        ]
        for op in busy if len(op.kernels) > 1
    }


def _memory(program: Program, rank: int, times: Times) -> list[tuple[int, dict[str, int]]]:
    """Bytes by kind at the moments of issue; what an op holds for a moment comes 1 ns before."""
    walked = walk(program.of_rank(rank))
    points = []
    moments = [0, *(times.issued[p.op.index] + (not p.inside) for p in walked.points)]
    for moment, state in zip(moments, walked.states(), strict=True):
        by_kind: Counter[str] = Counter()
        for (kind, _), nbytes in state.items():
            by_kind[kind] += nbytes
        points.append((moment, dict(by_kind)))
    return points


def _rates(
    program: Program, ops: Sequence[Op], times: Times, rank: int, costs: Costs, rings: Rings
) -> dict[str, list[tuple[int, int]]]:
    """Bytes/s that leave the rank on its link to the fabric and on its NICs' rails, as they change.

    A collective's bytes are spread evenly over its time.
    """
    changes: dict[str, Counter[int]] = {}
    shares = _shares(program, costs.cluster, ops, rank, rings)
    for op in ops:
        start, end = times.starts[op.index], times.ends[op.index]
        if op.kind not in COLLECTIVES or end == start:
            continue
        size, position = program.mesh.size(op.group), program.mesh.position(op.group, rank)
        sent = costs.bytes_sent(
            op.kind, op.nbytes, group_size=size, rank=position, root=op.root
        )
        for (group, link), share in shares.items():
            if group == op.group:
                rate = round(sent * share * 1e9 / (end - start))
                changes.setdefault(link, Counter()).update({start: rate, end: -rate})
    return {link: _sums(each) for link, each in changes.items()}


def _sums(changes: Counter[int]) -> list[tuple[int, int]]:
    rate, points = 0, [(0, 0)]
    for moment, change in sorted(changes.items()):
        rate += change
        points.append((moment, rate))
    return points


def _shares(
    program: Program, cluster: ClusterSpec, ops: Sequence[Op], rank: int, rings: Rings
) -> Shares:
    """Bytes that leave the rank's device and its NICs, for each byte that a member sends.

    A ring's other nodes are alike, so that it is laid over those next to the rank's alone.
    """
    node, own = cluster.node_of(rank), device_name(cluster, rank)
    nics = {f"node{node}.nic{nic}" for nic in cluster.nics_of(rank)}
    shares: Shares = {}
    for group in dict.fromkeys(op.group for op in ops if op.kind in COLLECTIVES):
        near = tuple(
            member for member in program.mesh.group(group, rank)
            if abs(cluster.node_of(member) - node) <= 1
        )
        if near not in rings:
            rings[near] = hops(cluster, near) if len(near) > 1 else ()
        for hop in rings[near]:
            for use in hop.uses:
                source, target = use.link
                into = target.endswith(".switch") or cluster.shares_pcie
                link = "fabric" if source == own and into else target if source in nics else ""
                if link.startswith(("fabric", "rail")):
                    shares[group, link] = shares.get((group, link), 0.0) + float(use.part)
    return shares
