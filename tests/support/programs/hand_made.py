"""Programs made by hand, with costs whose times can be seen at a glance."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from zsim.engine.costs.interference import KernelLoss
from zsim.engine.execution import EAGER, Execution
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Kernel, Op, OpKind
from zsim.ir.program import Program, RankProgram

TWO, TWO_BY_TWO = Mesh(dp_shard=2), Mesh(dp_replicate=2, dp_shard=2)


@dataclass(frozen=True, kw_only=True)
class Plain:
    """A kernel takes as many nanoseconds as it has FLOPs, a collective as many as bytes. Issuing
    takes `issue` each, but for those that are `late`."""

    issue: int = 0
    late: Mapping[int, int] = field(default_factory=dict)
    share: float = 0.0
    """Share of the time beside a collective that kernels lose to it."""
    collective_interference: float = 0.0
    twice_beside: int = -1
    """The bytes of collectives beside which kernels lose twice as much."""
    to_waiting: float | None = None
    """Share that kernels lose to a collective that moves nothing, if not `share`."""
    one_link: bool = True
    """Each communicator takes the one link whole; else all have links of their own."""
    launch_queue: int = 0
    node_size: int = 8
    execution: Execution = EAGER

    def wake_ns(self, ops: tuple[Op, ...]) -> dict[int, int]:
        return {}

    def kernel_loss(
        self, kernels: tuple[Kernel, ...], kind: str, nbytes: int, ranks: tuple[int, ...]
    ) -> KernelLoss:
        moves = self.share * (2 if self.twice_beside == nbytes else 1)
        return KernelLoss(moves, moves if self.to_waiting is None else self.to_waiting)

    def compute_ns(self, kernels: tuple[Kernel, ...]) -> int:
        return sum(kernel.flops for kernel in kernels)

    def collective_ns(self, kind: str, nbytes: int, ranks: tuple[int, ...]) -> int:
        return nbytes

    def usage(self, ranks: tuple[int, ...]) -> Mapping[int, Mapping[str, Fraction]]:
        return {rank: {"link": Fraction(1)} for rank in ranks} if self.one_link else {}

    def host_usage(
        self, kernels: tuple[Kernel, ...], rank: int, *, in_step: bool
    ) -> Mapping[Hashable, Fraction]:
        return {}

    def issue_ns(self, op: Op) -> int:
        return self.late.get(op.index, self.issue)


def compute(
    index: int, unit: str, ns: int, *waits: int, kind: OpKind = "forward", micro_batch: int = 0
) -> Op:
    """Compute of one product."""
    return Op(
        index=index, kind=kind, unit=unit, stream="compute", waits=waits, micro_batch=micro_batch,
        kernels=(Kernel("linear", ns, 0, "float32"),),
    )


def gather(index: int, unit: str, ns: int, *waits: int) -> Op:
    """An all-gather over dp_shard."""
    return Op(
        index=index, kind="all_gather", unit=unit, stream="all_gather", group="dp_shard", nbytes=ns,
        waits=waits,
    )


def all_reduce(index: int, unit: str, ns: int, *waits: int) -> Op:
    """An all-reduce over dp_replicate."""
    return Op(
        index=index, kind="all_reduce", unit=unit, stream="all_reduce", group="dp_replicate",
        nbytes=ns, waits=waits,
    )


def program(*ops: Op, mesh: Mesh = TWO) -> Program:
    """The Program whose ranks all have these ops in a steady step."""
    ranks = (RankProgram(construction=(), first=(), steady=ops),)
    return Program(mesh=mesh, ranks=ranks, assignment=(0,) * mesh.world_size)
