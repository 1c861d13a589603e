"""Delays of ranks that are slow, late or jittery: additions to the times of their ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zsim.engine.faults.fault import Fault, Jitter, LateStart, SlowRank
from zsim.engine.timeline import CostModel, Delays, add
from zsim.ir.ops import COLLECTIVES, Kernel, Op
from zsim.ir.program import Program

OF_STEP = -1
"""Number that stands for a whole step in draws of jitter."""


def fault_delays(
    program: Program, faults: Sequence[Fault], *, costs: CostModel
) -> Iterator[Delays]:
    """Delays of each rank program of a faulty Program, in which each rank with a fault has its own.
    """
    delaying = [fault for fault in faults if isinstance(fault, SlowRank | LateStart | Jitter)]
    if not delaying:
        yield from (Delays() for _ in program.ranks)
        return
    of_kind = {kind: rank for rank, kind in reversed([*enumerate(program.assignment)])}
    computing = {id(ops): _computing(ops) for ops in program.steps}
    for kind, own in enumerate(program.ranks):
        yield _delays(computing[id(own.steady)], delaying, rank=of_kind[kind], costs=costs)


def _delays(
    computing: Mapping[int, tuple[Kernel, ...]],
    faults: Sequence[SlowRank | LateStart | Jitter], *, rank: int, costs: CostModel,
) -> Delays:
    from zsim.engine.faults.draws import draw_ns, draws_ns  # start-up: it loads OpenSSL

    longer: dict[int, int] = {}
    start = 0
    for fault in faults:
        match fault:
            case LateStart() if fault.rank == rank:
                start += fault.by_ns
            case Jitter(each="step"):
                start += draw_ns(fault, rank=rank, op=OF_STEP)
            case Jitter():
                drawn = draws_ns(fault, rank=rank, ops=computing)
                longer = add(longer, dict(zip(computing, drawn, strict=True)))
            case SlowRank() if fault.rank == rank:
                longer = add(longer, {
                    index: round(costs.compute_ns(kernels) * (fault.factor - 1))
                    for index, kernels in computing.items()
                })
    return Delays(longer=longer, start=start)


def _computing(ops: tuple[Op, ...]) -> dict[int, tuple[Kernel, ...]]:
    """The kernels that a rank runs by itself, by op."""
    return {op.index: op.kernels for op in ops if op.kernels and op.kind not in COLLECTIVES}
