"""What the rows of one series must hold together: a wrong unit is wrong in all rows, of which most
look possible one by one.

A latency in the wrong unit hides in messages too small for their links to matter, and a size of one
rank's part in any of them. What one run of a benchmark measured over its sizes shows it: where some
rows are impossible, as time grows with bytes, and by what large messages come to. Rows that fail
are skipped by name, all of their series.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from zsim.calibration.nccl_tests.checks import FACTORS, SLOWEST, Rows, Skipped
from zsim.calibration.nccl_tests.rows import NcclRow, mapped
from zsim.cluster.collectives.nccl.curves import LARGE

FEWEST_REFUSED, SHARE_REFUSED = 2, 0.2
"""Of a series, by themselves impossible, from which on the rest is not believed either: one row
alone may be a slip."""
SPAN, CLEARLY = 16, 3.0
"""Of sizes and times between which a slope is more than noise: small messages take about as long
whatever their size, within a factor of two."""
LEAST_SHARE = 0.4
"""Of the ring's bandwidth inside a node, what the best large message over NVLink comes to at least.
Of 47 published series inside nodes two reach 0.69, through torch on a shared cluster, and the
others 0.82 to 1.34; no single message from 64 MiB on has less than 0.56. Elements of four bytes are
a quarter of 1.34 at most, 0.335, and a part of one rank in eight is less. Half, as elements of two
bytes would be, could be a slow machine."""
SLOPE_FROM = 16 * 2**20
"""Bytes of the largest message from which the slope over the largest ones says what messages from
64 MiB on would: by published series it is 0.52 of the ring's bandwidth at least there, and half of
that at 8 MiB."""
NEAR = 4
"""Times by which a slope's larger message is larger at least."""
_SLOWED = re.compile(
    r"\bNCCL_(?:ALGO|PROTO|NTHREADS|BUFFSIZE|P2P_\w+|SHM_\w+|\w*CHANNELS\w*|\w*NRINGS|\w*CTAS?)\s*[=:]\s*(?!\^?(?:default|auto|any|none)\b)"
    r"|\b(?:channels?|CTAs?|P2P|SHM|shared[ -]memory|LL(?:128)?|MIG|protocols?|throttl\w+)\b",
    re.IGNORECASE,
)
"""What makes a collective slower than its links, or may."""
Check = Callable[[Sequence[NcclRow]], str]


def held(found: Rows) -> Rows:
    """What a reader found without the rows of series that are no measurements in bytes and
    microseconds, which are skipped with why."""
    series: defaultdict[tuple[object, ...], list[NcclRow]] = defaultdict(list)
    for row in found.rows:
        series[_of(row)].append(row)
    impossible: defaultdict[tuple[object, ...], list[str]] = defaultdict(list)
    for skip in found.skipped:
        if skip.impossible is not None:
            impossible[_of(skip.impossible)].append(skip.reason)
    reasons = {
        key: _as_others(impossible[key], rows) or _slope(rows) or _large(rows)
        for key, rows in series.items()
    }
    skipped = [
        Skipped(source=row.source, line=row.line, reason=why)
        for row in found.rows
        if (why := reasons[_of(row)])
    ]
    return Rows(
        rows=tuple(row for row in found.rows if not reasons[_of(row)]),
        skipped=tuple(sorted((*found.skipped, *skipped), key=lambda skip: skip.line)),
    )


def _of(row: NcclRow) -> tuple[object, ...]:
    """What rows of one series have in common."""
    return (
        row.source, row.collective, row.gpu, row.n_ranks, row.n_nodes, row.intra_node,
        row.inter_node, row.tool, row.notes,
    )


def _as_others(refused: Sequence[str], rows: Sequence[NcclRow]) -> str:
    """Why the rest of a series is refused of which some rows are impossible; "" where those are
    few."""
    whole = len(refused) + len(rows)
    if len(refused) < FEWEST_REFUSED or len(refused) < SHARE_REFUSED * whole:
        return ""
    (reason, _), *_ = Counter(refused).most_common(1)
    return f"as {len(refused)} of the {whole} rows of its series, {reason}"


def _is_confirmed(rows: Sequence[NcclRow]) -> bool:
    return any(row.bandwidth_agrees for row in rows)


def _slope(rows: Sequence[NcclRow]) -> str:
    """Why a series is refused that is slower than any link as it grows, "" for others and where a
    bandwidth confirms it."""
    small, large = (_fastest(rows, edge(row.size_bytes for row in rows)) for edge in (min, max))
    if (
        _is_confirmed(rows)
        or large.size_bytes < SPAN * small.size_bytes
        or _us(large) < CLEARLY * _us(small)
    ):
        return ""
    found, carried = _bus_gb_s(large, small), mapped(large).communicator.bus_gb_s
    if found >= SLOWEST * carried:
        return ""
    said = (
        f"from {small.size_bytes:,} to {large.size_bytes:,} bytes its series takes "
        f"{_us(large) - _us(small):.4g} us more"
    )
    return (
        f"{said}, {found:.2g} GB/s where its links carry {carried:.0f}: a time in another unit, or "
        f"a size in another than bytes"
    )


def _large(rows: Sequence[NcclRow]) -> str:
    """Why a series inside a node is refused whose large messages come to a fraction of NVLink, ""
    for others and where words say why."""
    communicator = mapped(rows[0]).communicator
    words = f"{rows[0].notes} {rows[0].tool} {rows[0].intra_node}"
    if (
        communicator.num_nodes > 1
        or communicator.links != "nvlink"
        or _is_confirmed(rows)
        or _SLOWED.search(words)
    ):
        return ""
    best = _best_gb_s(rows)
    if best is None or best >= LEAST_SHARE * communicator.bus_gb_s:
        return ""
    said = (
        f"its series comes to {best:.3g} GB/s of bus bandwidth at most, where rings over its links "
        f"reach {communicator.bus_gb_s:.0f}"
    )
    likely = "a size of one rank's part, of elements, or a time in another unit"
    return f"{said}: {likely}; if the link is that slow, give busbw or algbw too"


def _best_gb_s(rows: Sequence[NcclRow]) -> float | None:
    """The best bus bandwidth of large messages, or where there are none by the slope over the
    largest; None where neither says it."""
    large = [row for row in rows if row.size_bytes >= LARGE]
    if large:
        return max(_bus_gb_s(row) for row in large)
    most = _fastest(rows, max(row.size_bytes for row in rows))
    below = [row.size_bytes for row in rows if row.size_bytes * NEAR <= most.size_bytes]
    if most.size_bytes < SLOPE_FROM or not below:
        return None
    other = _fastest(rows, max(below))
    return _bus_gb_s(most, other) if _us(most) > _us(other) else None


def _fastest(rows: Sequence[NcclRow], nbytes: int) -> NcclRow:
    """Of the rows of one size the one that nothing held up."""
    return min((row for row in rows if row.size_bytes == nbytes), key=_us)


def _us(row: NcclRow) -> float:
    return row.microseconds or 0.0


def _bus_gb_s(row: NcclRow, less: NcclRow | None = None) -> float:
    """Bus bandwidth of a row, or of what it has more than another."""
    nbytes, taken = (
        (row.size_bytes, _us(row))
        if less is None
        else (row.size_bytes - less.size_bytes, _us(row) - _us(less))
    )
    return FACTORS[row.collective](row.n_ranks) * nbytes / taken / 1000
