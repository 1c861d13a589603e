"""Delays of ranks that are slow, late or jittery: additions to the times of their ops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zsim.engine.faults.fault import Fault, Jitter, LateStart, SlowRank
from zsim.engine.timeline import CostModel, Delays
from zsim.ir.ops import COLLECTIVES, Op
from zsim.ir.program import Program

OF_STEP = -1
"""Number that stands for a whole step in draws of jitter."""


def fault_delays(
    program: Program, faults: Sequence[Fault], *, costs: CostModel
) -> tuple[Delays, ...]:
    """Delays by rank program of a faulty Program, in which each rank with a fault has its own; ()
    where no fault delays anything."""
    delaying = [fault for fault in faults if isinstance(fault, SlowRank | LateStart | Jitter)]
    if not delaying:
        return ()
    of_kind = {kind: rank for rank, kind in reversed([*enumerate(program.assignment)])}
    return tuple(
        _delays(program.ranks[kind].steady, delaying, rank=of_kind[kind], costs=costs)
        for kind in range(len(program.ranks))
    )


def _delays(
    ops: tuple[Op, ...], faults: Sequence[SlowRank | LateStart | Jitter], *, rank: int,
    costs: CostModel,
) -> Delays:
    from zsim.engine.faults.draws import draw_ns  # start-up: it loads OpenSSL

    longer: dict[int, int] = {}
    later = 0
    for fault in faults:
        match fault:
            case LateStart() if fault.rank == rank:
                later += fault.by_ns
            case Jitter(each="step"):
                later += draw_ns(fault, rank=rank, op=OF_STEP)
            case Jitter():
                for op in _computing(ops):
                    longer[op.index] = longer.get(op.index, 0) + draw_ns(
                        fault, rank=rank, op=op.index
                    )
            case SlowRank() if fault.rank == rank:
                for op in _computing(ops):
                    alone = costs.compute_ns(op.kernels)
                    longer[op.index] = longer.get(op.index, 0) + round(alone * (fault.factor - 1))
    return Delays(longer=longer, start=later)


def _computing(ops: tuple[Op, ...]) -> Iterator[Op]:
    """The ops whose kernels a rank runs by itself."""
    return (op for op in ops if op.kernels and op.kind not in COLLECTIVES)
