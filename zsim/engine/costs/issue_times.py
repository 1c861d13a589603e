"""Time that the host takes to issue ops, and to run again where a collective's threads wake.

A launch, an operator of a model, a collective and a hook each have a constant of the cluster. It
knows no device and no duration of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from zsim.cluster.cluster import ClusterSpec
from zsim.engine.costs import kernel_time
from zsim.engine.execution import Execution
from zsim.ir.ops import ACCUMULATE, COLLECTIVES, LOSS_STEP, NORM_STEP, Alloc, Kernel, Op

HOOKED = frozenset({"all_gather", "reduce_scatter"})
"""Kinds of collectives that FSDP's hooks issue, one per param group and pass. An all-reduce over
replicas is issued with the reduce-scatter before it."""
OF_MODELS = frozenset({"forward", "recompute", "backward"})
"""Kinds of ops whose kernels are operators of a model."""
SINGLE_CALLS = frozenset({ACCUMULATE, NORM_STEP, LOSS_STEP})
"""Operators of a Program that are one call of torch each."""
CALLS = 1.92
"""Calls of torch with a kernel in another operator, on average. A trace of Llama 3.2 1B has 1,437
for 748 operators, and its host was measured."""

SOON_NS, TICK_NS = 1_000_000, 4_000_000
"""Longest compute before a collective without a wait beyond its time alone, and the shortest with
the longest wait. A tick of Linux at 250 Hz: threads that wake beside one that computes wait for
the next."""


@dataclass(frozen=True, slots=True)
class Launched:
    """Launches by the host for the kernels of an op, and operators of a model among them.

    One kernel of a Program may stand for several launches. Single calls are launches alone.
    """

    launches: int
    operators: int

    @classmethod
    def of(cls, kernels: Iterable[Kernel], execution: Execution) -> Launched:
        """The launches for `kernels`, each of which does its own work."""
        each = tuple(kernels)
        return cls(
            launches=sum(1 + kernel_time.more_kernels(kernel, execution) for kernel in each),
            operators=sum(kernel.operator not in SINGLE_CALLS for kernel in each),
        )


def issue_ns(op: Op, launched: Launched, cluster: ClusterSpec, execution: Execution) -> int:
    """The host's time to issue `op`, without calls of the driver."""
    overheads = cluster.overheads
    hook = round(overheads.issue_hook * execution.hooks)
    if op.kind in COLLECTIVES:
        return overheads.issue_collective + (hook if op.kind in HOOKED else 0)
    if op.kind == "optimizer" and execution.dtensors:
        return (overheads.issue_kernel + overheads.step_dtensor) * len(op.kernels)
    own = execution.issue_kernel_ns
    issued = (overheads.issue_kernel if own is None else own) * launched.launches
    eager = own is None and op.kind in OF_MODELS and not execution.compile
    if eager and overheads.issue_operator:
        calls = CALLS if execution.by_call else 1.0
        more = round(overheads.issue_operator / calls) - overheads.issue_kernel
        issued += max(0, more) * launched.operators
    if cluster.num_ranks == 1 and _stands_for_hooked(op):
        issued += hook
    return issued


def wake_ns(
    ops: Iterable[Op], *, longest: int, computed_ns: Callable[[Op], int]
) -> dict[int, int]:
    """Waits of a rank's collectives for a core, by op.

    They are in proportion to the compute since the collective before, beyond `SOON_NS`, and at most
    `longest`.
    """
    waits: dict[int, int] = {}
    computed = 0
    for op in ops if longest else ():
        if op.kind in COLLECTIVES:
            beyond = max(0, min(computed, TICK_NS) - SOON_NS)
            waits[op.index] = longest * beyond // (TICK_NS - SOON_NS)
            computed = 0
        else:
            computed += computed_ns(op)
    return waits


def _stands_for_hooked(op: Op) -> bool:
    """True for the copy that a rank alone makes in a hook, where others gather or reduce."""
    gathers = any(
        type(event) is Alloc and event.kind == "unsharded_parameters" for event in op.memory
    )
    reduces = op.stream == "reduce_scatter" and any(
        kernel.operator == "copy" for kernel in op.kernels
    )
    return op.kind == "copy" and (gathers or reduces)
