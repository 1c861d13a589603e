"""Records of simulated ranks in a Run: phases with memory and collectives, spans, bytes sent.

They are made of a Program and of the times that the engine stamped on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from operator import eq

from zsim.engine.costs.op_costs import Costs
from zsim.engine.timeline import Timeline
from zsim.ir.host_ledger import OFFLOADED, SAVED, replay_host
from zsim.ir.ledger_replay import replay_each
from zsim.ir.mesh import Mesh
from zsim.ir.ops import COLLECTIVES, Op, resource_of
from zsim.ir.program import PHASES, PhaseName, Program, RankProgram
from zsim.ir.run import (
    CollectiveRecord,
    MemoryRecord,
    OffDevice,
    PhaseRecord,
    RankRun,
    RunRecord,
    Span,
)
from zsim.runs.figures.off_device import off_device

MOST_SENDERS = 512
"""Ranks of a kind, from the first and from the last, whose sent bytes are computed; ring neighbours
differ by a byte."""

MOST_TIMELINES = 64
"""Ranks up to which a Run keeps the bytes after each op."""

Phases = Mapping[str, PhaseRecord]
Payload = tuple[str, int, str, int]
"""The kind, size, group and root of a collective."""
_Stamps = tuple[tuple[Op, int, int, int], ...]
"""Ops, each with its start, end and issue in ns."""


def ranks_of(
    program: Program, shown: dict[int, int], *, costs: Costs, timeline: Timeline
) -> tuple[RankRun, ...]:
    """The records of `shown` ranks, each with the number of ranks that it stands for."""
    with_timeline = len(shown) <= MOST_TIMELINES
    alike_to = {rank: [rank] for rank in shown}
    if set(shown) == set(timeline.representatives):
        for rank, like in enumerate(timeline.representatives):
            alike_to[like].append(rank)
    kinds = {id(rank): rank for rank in map(program.of_rank, shown)}  # faults make kinds alike
    phases = dict(zip(
        kinds, _phases([*kinds.values()], program.mesh, with_timeline=with_timeline), strict=True
    ))
    spans: dict[int, tuple[Span, ...]] = {}
    hosted: dict[int, OffDevice | None] = {}
    leaves = {id(ops): any(map(resource_of, ops)) for ops in program.steps}
    alike: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[Span, ...]] = {}
    before: tuple[_Stamps, tuple[Span, ...]] = (), ()
    payloads = {id(ops): _payloads(ops) for ops in program.steps}
    for rank in shown:
        kind = program.assignment[rank]
        times = timeline.ranks[timeline.representatives[rank]]
        key = (kind, tuple(times.starts), tuple(times.ends))
        if key not in alike:
            stamps = tuple(zip(
                program.ranks[kind].steady, times.starts, times.ends, times.issued, strict=True
            ))
            alike[key] = _spans(stamps, *before)
            before = stamps, alike[key]
            ops = program.ranks[kind].steady
            hosted[id(alike[key])] = (
                off_device(ops, times.starts, times.ends) if leaves[id(ops)] else None
            )
        spans[rank] = alike[key]
    return tuple(
        RankRun(
            rank=rank,
            stands_for=count,
            phases=phases[id(program.of_rank(rank))],
            spans=spans[rank],
            off_device=hosted[id(spans[rank])],
            bytes_sent=_bytes_sent(
                payloads[id(program.of_rank(rank).steady)], program.mesh, costs,
                ranks={*alike_to[rank][:MOST_SENDERS], *alike_to[rank][-MOST_SENDERS:]},
            ),
        )
        for rank, count in shown.items()
    )


def until_the_step(
    begun: RunRecord, program: Program, *, ranks: Sequence[int] | None
) -> RunRecord:
    """The Run with the phases before the steady step, of `ranks` or of the first rank of each kind.
    """
    firsts = {kind: rank for rank, kind in reversed([*enumerate(program.assignment)])}
    alike = tuple(firsts[kind] for kind in program.assignment)
    shown = Counter(alike) if ranks is None else dict.fromkeys(sorted(ranks), 1)
    kinds = sorted({program.assignment[rank] for rank in shown})
    whole = _phases(
        [program.ranks[kind] for kind in kinds], program.mesh,
        with_timeline=len(shown) <= MOST_TIMELINES,
    )
    phases: dict[int, Phases] = {
        kind: {phase: own[phase] for phase in ("construction", "first")}
        for kind, own in zip(kinds, whole, strict=True)
    }
    return replace(
        begun, representatives=alike if ranks is None else (),
        ranks=tuple(
            RankRun(rank=rank, stands_for=count, phases=phases[program.assignment[rank]])
            for rank, count in sorted(shown.items())
        ),
    )


def _phases(
    programs: Sequence[RankProgram], mesh: Mesh, *, with_timeline: bool
) -> Iterator[Phases]:
    """The phases of each program; passes that several have are followed once."""
    replayed = replay_each(programs, timeline=with_timeline)
    for program, memory in zip(programs, replayed, strict=True):
        records = _with_host(memory, program)
        yield {
            phase: PhaseRecord(
                collectives=tuple(_collectives(program.phase(phase), mesh)),
                memory=records[phase],
            )
            for phase in PHASES
        }


def _with_host(
    memory: Mapping[PhaseName, MemoryRecord], program: RankProgram
) -> Mapping[PhaseName, MemoryRecord]:
    """The records of steps with the bytes of host memory at their ends, and the most bytes of saved
    tensors there, where there are any."""
    offloads = any(op.host for op in program.construction)
    if not offloads and not any(op.host for op in program.steady):
        return memory
    records, changed = replay_host(program), dict(memory)
    for phase, record in memory.items():
        if record.held:
            host = records[phase]
            host_bytes = {OFFLOADED: host.end_bytes} if offloads else {}
            host_bytes |= {SAVED: host.saved_bytes} if host.saved_bytes else {}
            changed[phase] = replace(record, held={**record.held, **host_bytes})
    return changed


def _collectives(ops: Iterable[Op], mesh: Mesh) -> Iterator[CollectiveRecord]:
    """Records of the collectives among `ops`; equal ones are one object."""
    known: dict[tuple[str, int, str, int], CollectiveRecord] = {}
    for op in ops:
        if op.kind in COLLECTIVES:
            key = op.kind, op.nbytes, op.group, op.root
            if key not in known:
                known[key] = CollectiveRecord(
                    op=op.kind, nbytes=op.nbytes, group=op.group,
                    group_size=mesh.size(op.group), root=op.root,
                )
            yield known[key]


def _spans(stamps: _Stamps, others: _Stamps, known: tuple[Span, ...]) -> tuple[Span, ...]:
    """The spans of `stamps`. Those with which `others` begin too are `known`."""
    num_known = len(list(takewhile(bool, map(eq, stamps, others))))
    return known[:num_known] + tuple([
        Span(
            name=f"{op.kind} {op.unit}", kind=op.kind, unit=op.unit, stream=op.stream,
            start_ns=start, end_ns=end, nbytes=op.nbytes, issued_ns=issued, group=op.group,
        )
        for op, start, end, issued in stamps[num_known:]
    ])


def _payloads(ops: tuple[Op, ...]) -> Counter[Payload]:
    """Counts of the collectives issued, by kind, size, group and root."""
    return Counter((op.kind, op.nbytes, op.group, op.root) for op in ops if op.kind in COLLECTIVES)


def _bytes_sent(
    payloads: Counter[Payload], mesh: Mesh, costs: Costs, *, ranks: Collection[int]
) -> int:
    """The most bytes that any of `ranks` sends. All members of a group send as many of a message in
    equal chunks, but for a broadcast."""
    sizes = {group: mesh.size(group) for _, _, group, _ in payloads}
    unequal = {
        (kind, nbytes, group, root) for kind, nbytes, group, root in payloads
        if kind == "broadcast" or nbytes % sizes[group]
    }

    def sent(rank: int, messages: Iterable[Payload]) -> int:
        positions = {group: mesh.position(group, rank) for group in sizes}
        return sum([
            payloads[kind, nbytes, group, root] * costs.bytes_sent(
                kind, nbytes, group_size=sizes[group], rank=positions[group], root=root
            )
            for kind, nbytes, group, root in messages
        ])

    equal = sent(min(ranks), payloads.keys() - unequal)
    return equal + (max(sent(rank, unequal) for rank in ranks) if unequal else 0)
