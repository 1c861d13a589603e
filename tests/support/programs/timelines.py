"""Programs whose times a person can follow: equal blocks, a root that takes no time, and durations
of a few nanoseconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from zsim.autograd.lowered import Computation, LoweredModule
from zsim.autograd.lowering.lower_model import lower
from zsim.engine.simulate import simulate
from zsim.ir.mesh import Mesh
from zsim.ir.ops import MOVE_GRADIENT, Kernel, Op
from zsim.ir.program import Program
from zsim.models.families.mlp import MlpSizes, build
from zsim.models.spec import ROOT
from zsim.models.training_options import Batch, Precision
from zsim.strategies.building.training import Training

WIDTH = 64
BLOCK_NUMEL = 2 * WIDTH * WIDTH + 2 * WIDTH
"""Elements of a block: two linears with their biases."""

Row = tuple[str, int, int]
"""Name of a span, its start and its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """A block's `collectives` take what is given, by kind, those of the root nothing; a copy takes
    its `copies` share of a block's.

    `forward` and `backward` of a block take what its kernels say. `issue` is what the host takes
    for an op, nothing by default.
    """

    collectives: Mapping[str, int]
    copies: int = 0
    """Time to read and write all elements of a block once, in float32."""
    issue: Callable[[Op], int] = field(default=lambda op: 0)
    launch_queue: int = 0
    node_size: int = 8

    def usage(self, ranks: tuple[int, ...]) -> dict[int, dict[str, Fraction]]:
        """Each communicator has links of its own."""
        return {}

    def compute_ns(self, kernels: tuple[Kernel, ...]) -> int:
        """The time of blocks and of copies; nothing else takes any."""
        blocks = sum(kernel.flops for kernel in kernels if kernel.operator == "block")
        copied = sum(
            kernel.nbytes for kernel in kernels if kernel.operator in ("copy", MOVE_GRADIENT)
        )
        return blocks + self.copies * copied // (8 * BLOCK_NUMEL)

    def collective_ns(self, kind: str, nbytes: int, ranks: tuple[int, ...]) -> int:
        """The time of a collective of a block: those of the root are small."""
        return self.collectives[kind] if nbytes >= 2 * BLOCK_NUMEL else 0

    def issue_ns(self, op: Op) -> int:
        """The host's time."""
        return self.issue(op)


def training(blocks: int, *, forward: int, backward: int, accumulation: int = 1) -> Training:
    """`blocks` equal blocks, whose forward and backward take so many nanoseconds, and a head of the
    root's that takes none."""
    sizes = MlpSizes(dims=(WIDTH,) * (blocks + 1), hidden=WIDTH, num_classes=2)
    model = build(sizes, name="toy", sequence_length=1)
    batch = Batch(micro_batch=1, accumulation=accumulation)
    modules = lower(model, batch=batch, dtype="float32")
    timed = tuple([_timed(module, forward=forward, backward=backward) for module in modules])
    return Training(model=model, modules=timed, batch=batch, precision=Precision())


def _timed(module: LoweredModule, *, forward: int, backward: int) -> LoweredModule:
    def taking(computation: Computation, duration: int) -> Computation:
        kernels = (Kernel("block", duration, 0, "float32"),) if module.unit != ROOT else ()
        return replace(computation, kernels=kernels)

    return replace(
        module, forward=taking(module.forward, forward), backward=taking(module.backward, backward)
    )


def timeline(program: Program, toy: Toy) -> list[Row]:
    """Spans of rank 0's steady step, by start; equal starts in issue order."""
    times = simulate(program, costs=toy).ranks[0]
    rows = [
        (f"{op.kind} {op.unit.removeprefix('blocks.')}", times.starts[op.index],
         times.ends[op.index])
        for op in program.of_rank(0).steady
        if times.ends[op.index] > times.starts[op.index]
    ]
    return sorted(rows, key=lambda row: row[1])


def over(*, dp_shard: int = 1, dp_replicate: int = 1) -> Mesh:
    """A mesh."""
    return Mesh(dp_replicate=dp_replicate, dp_shard=dp_shard)
