"""Measurements that no network could carry: rows whose links need longer for their bytes than was
measured.

Such a row is no measurement of what it says. Its time is of other units, or its links are others.
It is named with the bound, and averaged into nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from zsim.calibration.records import Collective, Impossible, Step
from zsim.cluster.capacity import LeastTime, least
from zsim.cluster.cluster import ClusterSpec
from zsim.io.units import format_bytes
from zsim.ir.ops import COLLECTIVES
from zsim.ir.program import Program

ROUNDED = 0.99
"""Share of the least time below which a row is impossible: published figures are rounded."""


def of_collective(row: Collective) -> Impossible | None:
    """The row as an impossible one; None where its links can carry it.

    Of a network that others use the row says what was left of it, not what it can carry.
    """
    if row.is_shared:
        return None
    ranks = tuple(range(row.cluster.num_ranks))
    bound = least(row.op, row.nbytes, cluster=row.cluster, ranks=ranks)
    label = f"{row.op} of {format_bytes(row.nbytes)} over {len(ranks)} ranks"
    return _impossible(row, label, row.seconds, bound)


def of_step(step: Step, programs: Sequence[Program]) -> Impossible | None:
    """The step as an impossible one; None where its links can carry what the collectives move of
    any of the `programs` that it may have run."""
    if step.seconds is None or step.is_shared:
        return None
    bounds = [
        _of_program(program, each.cluster)
        for program, each in zip(programs, step.readings, strict=True)
    ]
    return _impossible(step, "step", step.seconds, min(bounds, key=lambda bound: bound.ns))


def _of_program(program: Program, cluster: ClusterSpec) -> LeastTime:
    """The least time of all collectives of a step together."""
    device = network = 0
    moved = Counter(
        (op.kind, op.nbytes, op.group) for op in program.of_rank(0).steady
        if op.kind in COLLECTIVES and program.mesh.size(op.group) > 1
    )
    for (kind, nbytes, group), count in moved.items():
        bound = least(kind, nbytes, cluster=cluster, ranks=program.mesh.group(group, 0))
        device, network = device + count * bound.device, network + count * bound.network
    return LeastTime(device, network)


def _impossible(
    row: Collective | Step, label: str, seconds: float, bound: LeastTime
) -> Impossible | None:
    if seconds >= ROUNDED * bound.ns / 1e9:
        return None
    return Impossible(
        source=row.source, line=row.line, label=label, measured=seconds, least=bound.ns / 1e9,
        link=bound.link,
    )
