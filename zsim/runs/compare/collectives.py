"""Collectives of two Runs: their order, bytes and groups, exact; bytes on the wire, in a share."""

from __future__ import annotations

from collections.abc import Iterator

from zsim.ir.mesh import axis_of
from zsim.ir.run import CollectiveRecord, RankRun, RunRecord
from zsim.runs.compare.check import Check, unsupported
from zsim.runs.compare.phase_pairs import PhasePair, partners_of, relative

CONTEXT = 3
WIRE_SHARE = 0.01
"""Share by which bytes on the wire may differ: TCP repeats some of what a shaped link dropped."""
PREAMBLE = 48
"""Bytes before each of gloo's messages, of data or of readiness: six words of 64 bits
(transport/tcp/pair.h, Op)."""
ANNOUNCED = {"all_gather": 6, "reduce_scatter": 12, "all_reduce": 12, "broadcast": 3}
"""Messages with a preamble that a rank sends for each other rank. A ring goes round once to gather
and twice to reduce, in two halves. Each has data, its sender's readiness and its receiver's."""


def compare_order(pairs: tuple[PhasePair, ...], world_size: int) -> Check:
    """Operation, group and root of each collective, in the order of issue on each rank."""
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
        detail=first or _alone(measured, world_size) or f"exact    {measured} of {predicted}",
    )


def compare_bytes(pairs: tuple[PhasePair, ...], world_size: int) -> Check:
    """Bytes of each collective, in the order of issue on each rank."""
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
        relative_error=relative(left, right),
        detail=first or _alone(count, world_size)
        or f"exact    {count} of {count}, {right:,} B",
    )


def _alone(measured: int, world_size: int) -> str:
    """Words for a rank alone that communicates with none; "" for others."""
    return "" if measured or world_size > 1 else "exact    one rank, no collective"


def compare_wire_bytes(predicted: RunRecord, measured: RunRecord) -> Iterator[Check]:
    """The bytes that each rank's host sent, where its interface counted them."""
    partners = partners_of(predicted)
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


def compare_groups(predicted: RunRecord, measured: RunRecord) -> Check:
    """The ranks of each group that real ranks communicated in, against those of the mesh that the
    Program was planned for."""
    groups = [
        (rank.rank, name, ranks) for rank in measured.ranks for name, ranks in rank.groups.items()
    ]
    if not groups and measured.world_size > 1:
        return unsupported("groups", "the measured Run does not tell the ranks of its groups")
    silent = next((text for text in map(_untold, measured.ranks) if text), "")
    if silent:
        return Check(name="groups", status="failed", detail=silent)
    for rank, name, ranks in groups:
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
    sizes = dict.fromkeys(f"{name}({len(ranks)})" for _, name, ranks in groups)
    detail = (
        f"exact    {len(groups)} of {len(groups)}: {', '.join(sizes)}"
        if groups
        else "exact    one rank, no group"
    )
    count = len(groups)
    return Check(name="groups", status="ok", predicted=count, measured=count, detail=detail)


def _key(record: CollectiveRecord, world_size: int) -> tuple[str, str, int, int]:
    group = "world" if record.group_size == world_size else axis_of(record.group)
    return (record.op, group, record.group_size, record.root)


def _nothing_seen(pairs: tuple[PhasePair, ...], world_size: int) -> str:
    observed = any(pair.measured.collectives for pair in pairs)
    return "" if observed or world_size == 1 else "no collective was observed at all"


def _order_difference(pair: PhasePair, world_size: int) -> str:
    left = [_key(record, world_size) for record in pair.predicted.collectives]
    right = [_key(record, world_size) for record in pair.measured.collectives]
    if left == right:
        return ""
    length = min(len(left), len(right))
    return _context(pair, next((i for i in range(length) if left[i] != right[i]), length))


def _bytes_difference(pair: PhasePair) -> str:
    left = [record.nbytes for record in pair.predicted.collectives]
    right = [record.nbytes for record in pair.measured.collectives]
    if left == right:
        return ""
    length = min(len(left), len(right))
    return _context(pair, next((i for i in range(length) if left[i] != right[i]), length))


def _context(pair: PhasePair, index: int) -> str:
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


def _announced(rank: RankRun) -> int:
    """Bytes of the preambles of gloo's messages in a steady step of the rank."""
    steady = rank.phases.get("steady")
    return sum(
        PREAMBLE * ANNOUNCED.get(each.op, 0) * (each.group_size - 1)
        for each in (steady.collectives if steady else ())
    )


def _untold(rank: RankRun) -> str:
    """A phrase about an axis over which `rank` communicates without telling its group, or ""."""
    named = set(map(axis_of, rank.groups))
    axes = (
        axis_of(record.group)
        for phase in rank.phases.values()
        for record in phase.collectives
    )
    missing = next((axis for axis in axes if axis not in named), "")
    return (
        f"rank {rank.rank} communicates over {missing} and does not tell with whom"
        if missing
        else ""
    )


def _some(ranks: tuple[int, ...]) -> str:
    return f"ranks {list(ranks[:8])}{' …' if len(ranks) > 8 else ''}"
