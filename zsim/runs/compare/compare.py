"""Two Runs of one scenario, compared in order of rigour: collective order, bytes, memory, numerics,
time.

A check that one side cannot make is `unsupported`, with the reason; no events at all is a failure,
never a pass. It reads Runs and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from zsim.ir.host_ledger import OFFLOADED
from zsim.ir.order.waits import named_ranks
from zsim.ir.program import PHASES
from zsim.ir.run import (
    CollectiveRecord,
    PhaseRecord,
    RankRun,
    RunRecord,
    both_simulated,
    ranks_at_fault,
    sees,
)
from zsim.models import torch_versions
from zsim.runs.compare import memory_at_rest, memory_by_part
from zsim.runs.compare.agreement import FAULTS, PREFIX
from zsim.runs.compare.cache import compare_caches
from zsim.runs.compare.check import Check, Number
from zsim.runs.compare.numerics import numerics
from zsim.runs.compare.step_time import compare_time
from zsim.runs.compare.timeline import compare_timelines

CONTEXT = 3
MEMORY_BOUND = 0.05
"""Share of the measured peak by which one on gloo may differ."""
WIRE_SHARE = 0.01
"""Share by which bytes on the wire may differ: TCP repeats some of what a shaped link dropped."""
PREAMBLE = 48
"""Bytes before each of gloo's messages, of data or of readiness: six words of 64 bits
(transport/tcp/pair.h, Op)."""
ANNOUNCED = {"all_gather": 6, "reduce_scatter": 12, "all_reduce": 12, "broadcast": 3}
"""Messages with a preamble that a rank sends for each other rank. A ring goes round once to gather
and twice to reduce, in two halves. Each has data, its sender's readiness and its receiver's."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """A phase of a rank, predicted and measured."""

    rank: int
    phase: str
    predicted: PhaseRecord
    measured: PhaseRecord


def compare(predicted: RunRecord, measured: RunRecord) -> tuple[Check, ...]:
    """Every check, most rigorous first.

    Ranks are matched by number; a folded rank stands for those of its kind.
    """
    other = _other_experiment(predicted, measured)
    if other:
        return (Check(name="same experiment", status="failed", detail=other),)
    pairs = tuple(_pairs(predicted, measured))
    whole = (
        *_faults(predicted, measured), *_completeness(predicted, measured),
        *_coverage(predicted, measured),
    )
    if not pairs:
        return (
            *whole,
            Check(name="ranks", status="failed", detail="the two Runs have no rank in common"),
        )
    step_time = compare_time(predicted, measured)
    partners = _partners(predicted)
    ranks = [(partners[rank.rank], rank) for rank in measured.ranks if rank.rank in partners]
    return (
        *whole,
        _order(pairs, predicted.world_size),
        _bytes(pairs, predicted.world_size),
        *_wire_bytes(predicted, measured),
        _groups(predicted, measured),
        *_memory(pairs, predicted, measured),
        *compare_caches(
            predicted, measured, ranks, blind=_other_torch(predicted, measured)
        ),
        numerics(predicted, measured),
        step_time,
        *compare_timelines(predicted, measured, ranks, step_time=step_time),
    )


def _wire_bytes(predicted: RunRecord, measured: RunRecord) -> Iterator[Check]:
    """The bytes that each rank's host sent, where its interface counted them."""
    partners = _partners(predicted)
    counted = [rank for rank in measured.ranks if rank.bytes_sent and rank.rank in partners]
    if not counted or "testbed" not in measured.provenance:
        return
    expected = {
        rank.rank: partners[rank.rank].bytes_sent + _announced(rank) for rank in counted
    }
    errors = {rank.rank: expected[rank.rank] / rank.bytes_sent - 1 for rank in counted}
    rank = max(errors, key=lambda each: abs(errors[each]))
    largest = next(each for each in counted if each.rank == rank)
    yield Check(
        name="wire bytes", status="ok" if abs(errors[rank]) <= WIRE_SHARE else "failed",
        predicted=expected[rank], measured=largest.bytes_sent,
        relative_error=errors[rank],
        detail=f"{len(counted)} ranks by their interfaces' counters less headers, at most "
               f"{errors[rank]:+.2%} on rank {rank}, {WIRE_SHARE:.0%} allowed; with "
               f"{_announced(largest):,} B by which gloo announces messages",
    )


def _announced(rank: RankRun) -> int:
    """Bytes of the preambles of gloo's messages in a steady step of the rank."""
    steady = rank.phases.get("steady")
    return sum(
        PREAMBLE * ANNOUNCED.get(each.op, 0) * (each.group_size - 1)
        for each in (steady.collectives if steady else ())
    )


def _other_experiment(predicted: RunRecord, measured: RunRecord) -> str:
    """The first difference that shows the two Runs to be of different scenarios, or ""."""
    pairs = [
        ("ranks", predicted.world_size, measured.world_size),
        ("mesh", predicted.mesh, measured.mesh),
    ]
    for key in ("strategy", "fingerprint"):
        left, right = predicted.provenance.get(key), measured.provenance.get(key)
        pairs += [(key, left, right)] if left is not None and right is not None else []
    sides = ("predicted", "measured")
    if both_simulated(predicted, measured):
        sides = ("in the first", "in the second")
    return next(
        (
            f"{what}: {left} {sides[0]}, {right} {sides[1]}"
            for what, left, right in pairs
            if left != right
        ),
        "",
    )


def _faults(predicted: RunRecord, measured: RunRecord) -> Iterator[Check]:
    """The check of Runs of which one had faults: failed where the other had not the same."""
    told = [sorted(run.faults) for run in (predicted, measured)]
    if told[0] == told[1] != []:
        late = [
            f"held up by rank {run.late[0].rank} {word}"
            for run, word in ((predicted, "predicted"), (measured, "measured")) if run.late
        ]
        most = f"; most {', '.join(late)}" if late else ""
        detail = f"{PREFIX}both Runs had {'; '.join(told[0])}{most}; a clean step was not compared"
        yield Check(name=FAULTS, status="unsupported", detail=detail)
    elif told[0] != told[1]:
        texts = ("; ".join(faults) or "none" for faults in told)
        yield Check(
            name=FAULTS, status="failed", detail="{} predicted, {} measured".format(*texts)
        )


def _completeness(predicted: RunRecord, measured: RunRecord) -> Iterator[Check]:
    """The checks that both Runs are whole, or that their faults end them alike."""
    if predicted.faults and not (predicted.complete or measured.complete):
        yield _unended(predicted, measured)
        return
    for word, run in (("predicted", predicted), ("measured", measured)):
        if run.failure or not run.complete:
            why = f": {run.failure}" if run.failure else ""
            yield Check(name="complete", status="failed", detail=f"the {word} Run did not reach "
                                                                 f"its end{why}")
            continue
        told = run.provenance.get("phases", " ".join(PHASES)).split()  # a trace has one alone
        short = [
            (rank.rank, phase) for rank in run.ranks for phase in told if phase not in rank.phases
        ]
        if short:
            detail = (
                f"the {word} Run says it is complete, but rank {short[0][0]} has no {short[0][1]} "
                f"phase"
            )
            yield Check(name="complete", status="failed", detail=detail)


def _unended(predicted: RunRecord, measured: RunRecord) -> Check:
    """The check of two Runs that do not end: the same ranks are at fault in both. The Program names
    all of them, a real run the first to fail."""
    left, right = (ranks_at_fault(run) for run in (predicted, measured))
    alike = left == right or not set(left).isdisjoint(right)
    who = f"{_blamed(left)} predicted, {_blamed(right)} measured"
    return Check(
        name="complete", status="ok" if alike else "failed",
        detail=f"neither Run reaches its end; at fault {_blamed(right) if left == right else who}\n"
               f"predicted: {predicted.failure}\nmeasured: {measured.failure}",
    )


def _blamed(ranks: tuple[int, ...]) -> str:
    return named_ranks(ranks) if ranks else "no rank"


def _coverage(predicted: RunRecord, measured: RunRecord) -> Iterator[Check]:
    """Every rank was measured, or the Run says which; and every measured rank was predicted."""
    seen = {rank.rank for rank in measured.ranks}
    announced = " ".join(str(rank.rank) for rank in measured.ranks)
    if (
        not measured.representatives
        and len(seen) < measured.world_size
        and measured.provenance.get("ranks") != announced
    ):
        detail = (
            f"{len(seen)} of {measured.world_size} ranks were measured, and the Run does not say "
            f"that only they were asked for"
        )
        yield Check(name="ranks", status="failed", detail=detail)
    alone = sorted(seen - set(_partners(predicted)))
    if alone:
        detail = (
            f"{len(alone)} measured ranks were not predicted, rank {alone[0]} first; predict all "
            f"ranks"
        )
        yield Check(name="ranks", status="failed", detail=detail)


def _pairs(predicted: RunRecord, measured: RunRecord) -> Iterator[_Pair]:
    partners = _partners(predicted)
    for rank_run in measured.ranks:
        partner = partners.get(rank_run.rank)
        if partner is None:
            continue
        for phase in PHASES:
            if phase in partner.phases and phase in rank_run.phases:
                yield _Pair(rank_run.rank, phase, partner.phases[phase], rank_run.phases[phase])


def _partners(run: RunRecord) -> dict[int, RankRun]:
    """Each rank's own record, or that of the representative of its kind, by rank."""
    shown = {rank.rank: rank for rank in run.ranks}
    alike = {rank: shown[like] for rank, like in enumerate(run.representatives) if like in shown}
    return alike or shown


def _key(record: CollectiveRecord, world_size: int) -> tuple[str, str, int, int]:
    group = "world" if record.group_size == world_size else record.group.partition(":")[0]
    return (record.op, group, record.group_size, record.root)


def _nothing_seen(pairs: tuple[_Pair, ...], world_size: int) -> str:
    seen = any(pair.measured.collectives for pair in pairs)
    return "" if seen or world_size == 1 else "no collective was observed at all"


def _order(pairs: tuple[_Pair, ...], world_size: int) -> Check:
    predicted = sum(len(pair.predicted.collectives) for pair in pairs)
    measured = sum(len(pair.measured.collectives) for pair in pairs)
    first = _nothing_seen(pairs, world_size) or next(
        (text for pair in pairs if (text := _order_difference(pair, world_size))), ""
    )
    return Check(
        name="collective order",
        status="failed" if first else "ok",
        predicted=predicted,
        measured=measured,
        detail=first or f"exact    {measured} of {predicted}",
    )


def _order_difference(pair: _Pair, world_size: int) -> str:
    left = [_key(record, world_size) for record in pair.predicted.collectives]
    right = [_key(record, world_size) for record in pair.measured.collectives]
    if left == right:
        return ""
    length = min(len(left), len(right))
    return _context(pair, next((i for i in range(length) if left[i] != right[i]), length))


def _context(pair: _Pair, index: int) -> str:
    lines = [f"rank {pair.rank}, {pair.phase} phase, first difference at collective {index}:"]
    for i in range(max(0, index - CONTEXT), index + CONTEXT):
        left, right = _line(pair.predicted.collectives, i), _line(pair.measured.collectives, i)
        if left or right:
            lines.append(f"{'>' if i == index else ' '} {i:4} predicted {left or '-':44} measured "
                         f"{right or '-'}")
    return "\n".join(lines)


def _line(records: tuple[CollectiveRecord, ...], i: int) -> str:
    if i >= len(records):
        return ""
    record = records[i]
    root = f" from {record.root}" if record.op == "broadcast" else ""
    return f"{record.op} {record.nbytes:,} B {record.group}({record.group_size}){root}"


def _bytes(pairs: tuple[_Pair, ...], world_size: int) -> Check:
    left = sum(record.nbytes for pair in pairs for record in pair.predicted.collectives)
    right = sum(record.nbytes for pair in pairs for record in pair.measured.collectives)
    count = sum(len(pair.measured.collectives) for pair in pairs)
    first = _nothing_seen(pairs, world_size) or next(
        (text for pair in pairs if (text := _bytes_difference(pair))), ""
    )
    return Check(
        name="bytes",
        status="failed" if first else "ok",
        predicted=left,
        measured=right,
        relative_error=_relative(left, right),
        detail=first or f"exact    {count} of {count}, {right:,} B",
    )


def _bytes_difference(pair: _Pair) -> str:
    left = [record.nbytes for record in pair.predicted.collectives]
    right = [record.nbytes for record in pair.measured.collectives]
    if left == right:
        return ""
    length = min(len(left), len(right))
    return _context(pair, next((i for i in range(length) if left[i] != right[i]), length))


def _groups(predicted: RunRecord, measured: RunRecord) -> Check:
    """The ranks of each group that real ranks communicated in, against those of the mesh that the
    Program was planned for."""
    seen = [
        (rank.rank, name, ranks) for rank in measured.ranks for name, ranks in rank.groups.items()
    ]
    if not seen and measured.world_size > 1:
        detail = "unsupported: the measured Run does not tell the ranks of its groups"
        return Check(name="groups", status="unsupported", detail=detail)
    silent = next((text for text in map(_untold, measured.ranks) if text), "")
    if silent:
        return Check(name="groups", status="failed", detail=silent)
    for rank, name, ranks in seen:
        try:
            wanted = predicted.mesh.group(name, rank)
        except KeyError:
            wanted = ()
        if ranks != wanted:
            where = f"rank {rank}, {name}: predicted {_some(wanted)}, measured {_some(ranks)}"
            return Check(
                name="groups", status="failed", predicted=len(wanted), measured=len(ranks),
                detail=where,
            )
    sizes = dict.fromkeys(f"{name}({len(ranks)})" for _, name, ranks in seen)
    detail = (
        f"exact    {len(seen)} of {len(seen)}: {', '.join(sizes)}"
        if seen
        else "exact    one rank, no group"
    )
    return Check(name="groups", status="ok", predicted=len(seen), measured=len(seen), detail=detail)


def _untold(rank: RankRun) -> str:
    """A phrase about an axis over which `rank` communicates without telling its group, or ""."""
    told = {name.partition(":")[0] for name in rank.groups}
    axes = (
        record.group.partition(":")[0]
        for phase in rank.phases.values()
        for record in phase.collectives
    )
    missing = next((axis for axis in axes if axis not in told), "")
    return (
        f"rank {rank.rank} communicates over {missing} and does not tell with whom"
        if missing
        else ""
    )


def _some(ranks: tuple[int, ...]) -> str:
    return f"ranks {list(ranks[:8])}{' …' if len(ranks) > 8 else ''}"


def _relative(predicted: Number, measured: Number) -> float:
    if predicted == measured:
        return 0.0
    return (predicted - measured) / measured if measured else math.inf


def _memory(
    pairs: tuple[_Pair, ...], predicted: RunRecord, measured: RunRecord
) -> Iterator[Check]:
    for phase in PHASES:
        name, in_phase = f"peak memory, {phase}", [pair for pair in pairs if pair.phase == phase]
        if in_phase:
            yield _phase_memory(name, in_phase, _blind(predicted, measured, "memory"))
        elif not (predicted.complete and measured.complete):
            yield Check(
                name=name, status="unsupported", detail=f"{PREFIX}a Run did not reach its end"
            )
    yield _rest(pairs, predicted, measured)
    yield _parts(
        [pair for pair in pairs if pair.phase != "construction"], predicted, measured
    )
    blind = _blind(predicted, measured, "memory")
    if not blind and any(pair.measured.memory.held for pair in pairs):
        yield _memory_by_kind([pair for pair in pairs if pair.phase != "construction"])
    else:
        detail = blind or "unsupported: the measured Run does not tell what its ranks hold"
        yield Check(name="memory by kind", status="unsupported", detail=detail)


def _rest(pairs: tuple[_Pair, ...], predicted: RunRecord, measured: RunRecord) -> Check:
    """Construction's end, and both ends of both steps."""
    blind = _blind(predicted, measured, "memory")
    if blind:
        return Check(name=memory_at_rest.NAME, status="unsupported", detail=blind)
    return memory_at_rest.compare_rest(
        [
            memory_at_rest.PhaseMemory(
                rank=pair.rank, name=pair.phase, predicted=pair.predicted.memory,
                measured=pair.measured.memory,
            )
            for pair in pairs
        ]
    )


def _parts(pairs: list[_Pair], predicted: RunRecord, measured: RunRecord) -> Check:
    """Forward, backward, optimizer and zero_grad of both steps."""
    blind = _blind(predicted, measured, "memory")
    if blind or not pairs:
        return Check(
            name=memory_by_part.NAME, status="unsupported",
            detail=blind or "unsupported: no step was ended",
        )
    steps = [
        memory_by_part.StepMemory(
            rank=pair.rank, phase=pair.phase, predicted=pair.predicted.memory,
            measured=pair.measured.memory,
        )
        for pair in pairs
    ]
    return memory_by_part.compare_parts(
        steps, exact=measured.provenance.get("memory") == memory_by_part.EXACT,
        bound=MEMORY_BOUND,
    )


def _memory_by_kind(pairs: list[_Pair]) -> Check:
    """The check of the bytes that ranks hold from step to step, by kind, exact to the byte."""
    for pair in pairs:
        wanted_kinds, held = pair.predicted.memory.held, pair.measured.memory.held
        unseen = {OFFLOADED} - held.keys()  # torch's own offloading does not tell
        for kind in sorted({*wanted_kinds, *held} - unseen):
            nbytes, wanted = held.get(kind, 0), wanted_kinds.get(kind, 0)
            if nbytes != wanted:
                where = (
                    f"rank {pair.rank}, {pair.phase}: {kind}: predicted {wanted:,} B, measured "
                    f"{nbytes:,} B"
                )
                return Check(
                    name="memory by kind", status="failed", predicted=wanted, measured=nbytes,
                    detail=where,
                )
    seen = pairs[-1].measured.memory.held
    kinds = ", ".join(f"{kind} {nbytes:,} B" for kind, nbytes in seen.items())
    total = sum(seen.values())
    return Check(
        name="memory by kind", status="ok", predicted=total, measured=total,
        detail=f"exact    {kinds}",
    )


def _blind(predicted: RunRecord, measured: RunRecord, what: str) -> str:
    blind = [run.backend for run in (predicted, measured) if not sees(run, what)]
    if blind:
        return f"unsupported: {' and '.join(blind)} cannot see {what}"
    return _other_torch(predicted, measured) if what == "memory" else ""


def _other_torch(predicted: RunRecord, measured: RunRecord) -> str:
    """The reason that memory of torch's strategy cannot be compared, as for another torch; or "".

    `zsim validate` predicts for the torch that ran, a simulation alone for the newest.
    """
    if "torch" not in predicted.provenance or measured.interpreter != "observer":
        return ""
    planned, ran = (
        torch_versions.version_of(run.provenance.get("torch", "")) for run in (predicted, measured)
    )
    strategy = measured.provenance.get("strategy", "")
    apart = torch_versions.apart(planned, ran, strategy=strategy)
    return (
        f"unsupported: predicted for torch {planned}, measured with torch {ran}, which differ: "
        f"{'; '.join(each.meaning for each in apart)}"
        if apart else ""
    )


def _phase_memory(name: str, pairs: list[_Pair], blind: str) -> Check:
    if blind:
        return Check(name=name, status="unsupported", detail=blind)
    if any(pair.measured.memory.peak_bytes <= 0 for pair in pairs):
        return Check(name=name, status="failed", detail="no memory was observed at all")
    worst = max(pairs, key=lambda pair: (abs(_peak_error(pair)), -pair.rank))
    error = _peak_error(worst)
    left, right = worst.predicted.memory.peak_bytes, worst.measured.memory.peak_bytes
    return Check(
        name=name,
        status="ok" if abs(error) <= MEMORY_BOUND else "failed",
        predicted=left,
        measured=right,
        relative_error=error,
        detail=_memory_detail(worst, len({pair.rank for pair in pairs})),
    )


def _peak_error(pair: _Pair) -> float:
    return _relative(pair.predicted.memory.peak_bytes, pair.measured.memory.peak_bytes)


def _memory_detail(pair: _Pair, num_ranks: int) -> str:
    left, right = pair.predicted.memory, pair.measured.memory
    peak_at = f" ({right.peak_at or left.peak_at})" if right.peak_at or left.peak_at else ""
    if left.peak_bytes == right.peak_bytes:
        ranks = (
            f"on rank {pair.rank}"
            if num_ranks == 1
            else f"on rank {pair.rank}, exact on all {num_ranks} observed"
        )
        return f"exact    {right.peak_bytes:,} B {ranks}{peak_at}"
    word = "within" if abs(_peak_error(pair)) <= MEMORY_BOUND else "beyond"
    difference = left.peak_bytes - right.peak_bytes
    return (
        f"{word} {MEMORY_BOUND:.0%}: predicted {left.peak_bytes:,} B, measured "
        f"{right.peak_bytes:,} B on rank {pair.rank}, "
        f"{difference:+,} B, {_peak_error(pair):+.2%}{peak_at}"
    )
