"""Bytes of torch's caching allocator for CUDA, predicted against measured.

Bytes that a steady step asks for above its start are compared exactly. Inputs, buffers and
workspaces live at the start already, and cancel. Where blocks were freed that another stream still
used, their bytes count as asked for, and allocated blocks are compared in their place. Reserved
bytes have a band. The least are live blocks alone; the most are the replay's, with a share for
blocks that other streams keep. What earlier runs left in the process is added. Active bytes are
shown. A Run of a CPU has none of this and gets no check.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zsim.ir.run import CacheRecord, RankRun, RunRecord
from zsim.runs.compare.check import Check, unsupported

ALLOCATED, RESERVED = "allocated memory, CUDA", "reserved memory, CUDA"
MORE_RESERVED = 0.03
"""Share of the replay by which reserved bytes may exceed it. The replay returns each block when the
host frees it. Blocks that another stream uses come back later, so that others are taken meanwhile.
"""

UNROUNDED = 16 * 512
"""Bytes by which allocated blocks may differ: inputs, buffers of the module and workspaces are not
rounded up to 512 in a prediction. A few such tensors."""

Pair = tuple[RankRun, RankRun]
"""A rank, predicted and measured."""


def compare_caches(
    predicted: RunRecord, measured: RunRecord, ranks: Sequence[Pair], *, blind: str = ""
) -> Iterator[Check]:
    """The checks of allocated and of reserved bytes; none where the measured ranks have no GPU.

    `blind`: why they cannot be compared, or "".
    """
    caches = [(left, right, right.cache) for left, right in ranks if right.cache is not None]
    if blind or not caches:
        if caches or _on_cuda(measured):
            reason = blind or "the measured Run has no statistics of CUDA's allocator"
            for name in (ALLOCATED, RESERVED):
                yield unsupported(name, reason)
        return
    yield _allocated([each for each in caches if "steady" in each[0].phases])
    yield _reserved([(left, right, cache) for left, right, cache in caches if left.cache])


def _on_cuda(measured: RunRecord) -> bool:
    device = measured.provenance.get("device", "cuda" if measured.backend == "nccl" else "cpu")
    return measured.interpreter in ("executor", "observer") and device != "cpu"


def _allocated(caches: Sequence[tuple[RankRun, RankRun, CacheRecord]]) -> Check:
    growths = []
    for left, right, cache in caches:
        memory = left.phases["steady"].memory
        growths.append(
            (memory.peak_bytes - memory.start_bytes, cache.peak_bytes - cache.start_bytes,
             right.rank, cache)
        )
    if not growths:
        return unsupported(ALLOCATED, "the predicted Run has no steady step")
    wanted, taken, rank, cache = max(growths, key=lambda each: (abs(each[0] - each[1]), -each[2]))
    rounded = f"{cache.allocated_bytes:,} B at the peak after rounding"
    late = False
    if wanted == taken:
        where = f"rank {rank}" if len(growths) == 1 else f"all {len(growths)} ranks"
        detail = f"exact    a step takes {taken:,} B more than it starts with on {where}, {rounded}"
    elif late := all(_only_late(*each) for each in caches):
        detail = (
            f"within {UNROUNDED:,} B: {rounded}; other streams still used blocks that were freed, "
            f"so that bytes asked for are {taken - wanted:+,} B"
        )
    else:
        detail = (
            f"rank {rank}: a step takes {wanted:,} B more than it starts with predicted, "
            f"{taken:,} B measured, {wanted - taken:+,} B; {rounded}"
        )
    return Check(
        name=ALLOCATED, status="ok" if wanted == taken or late else "failed", predicted=wanted,
        measured=taken, relative_error=(wanted - taken) / taken if taken else None, detail=detail,
    )


def _only_late(predicted: RankRun, _: RankRun, measured: CacheRecord) -> bool:
    """True where blocks came back late, and those that were allocated are the predicted ones."""
    cache = predicted.cache
    if cache is None or measured.active_bytes <= measured.allocated_bytes:
        return False
    allocated = measured.allocated_bytes - _besides(predicted, measured)
    return abs(allocated - cache.allocated_bytes) <= UNROUNDED


def _reserved(caches: Sequence[tuple[RankRun, RankRun, CacheRecord]]) -> Check:
    if not caches:
        remedy = "zsim run --save predicts them on the scenario's GPUs"
        return unsupported(RESERVED, f"the predicted Run has no reserved bytes; {remedy}")
    outside = [
        (left, right, cache) for left, right, cache in caches
        if not _band(left, cache)[0] <= cache.reserved_bytes <= _band(left, cache)[1]
    ]
    left, right, cache = max(
        outside or caches, key=lambda each: (each[2].reserved_bytes, -each[1].rank)
    )
    low, high = _band(left, cache)
    expected = left.cache.reserved_bytes if left.cache else 0
    detail = (
        f"{'outside of' if outside else 'within'} {low:,} B to {high:,} B: "
        f"{cache.reserved_bytes:,} B on rank {right.rank}, {cache.active_bytes:,} B of "
        f"them active, in {cache.segments} segments, {cache.largest_free_bytes:,} B the "
        f"largest free block"
    )
    if besides := _besides(left, cache):
        detail += f", {besides:,} B of earlier runs in the process"
    if cache.releases:
        detail += f", {cache.releases} times full"
    return Check(
        name=RESERVED, status="failed" if outside else "ok", predicted=expected,
        measured=cache.reserved_bytes, detail=detail,
        relative_error=expected / cache.reserved_bytes - 1 if cache.reserved_bytes else None,
    )


def _band(predicted: RankRun, measured: CacheRecord) -> tuple[int, int]:
    """The least and the most that may be reserved."""
    cache = predicted.cache
    return (0, 0) if cache is None else (
        cache.active_bytes,
        int(cache.reserved_bytes * (1 + MORE_RESERVED)) + _besides(predicted, measured),
    )


def _besides(predicted: RankRun, measured: CacheRecord) -> int:
    """Bytes that live at the step's start and are not the scenario's."""
    start = predicted.cache.start_bytes if predicted.cache else 0
    return max(0, measured.start_bytes - start)
