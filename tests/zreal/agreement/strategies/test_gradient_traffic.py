"""Bytes that are said to move around reductions and the optimizer, against the operands of the
calls that our engine makes.

Each op of a steady step is carried out under a mode that sees every call. Copies are compared by
all bytes, the optimizer's step by those of its casts. Backward is compared by the zeros that it
begins flat gradients with.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.cases.sampling import one_in
from zreal import torch_private
from zreal.executor.executor import execute
from zreal.executor.flat_rank import FlatRank
from zreal.executor.replicated_rank import ReplicatedRank
from zsim.ir.ops import MOVE_GRADIENT, Op
from zsim.models.spec import ROOT
from zsim.scenario.plan import plan
from zsim.scenario.scenario import parse

COPIES = ("copy_", "_to_copy", "_foreach_copy_", "clone", "mul", "div_")
"""Calls that read their source once and write their result once."""
ZEROS = ("zero_", "zeros_like")


class Traffic(TorchDispatchMode):
    """The bytes that calls read and write while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "add_":
            self.moved += nbytes(args[1]) + 2 * nbytes(args[0])
        elif name in COPIES:
            target = args[0] if name == "_foreach_copy_" else result
            self.moved += nbytes(target) + nbytes(
                args[1] if name in ("copy_", "_foreach_copy_") else args[0]
            )
        elif name in ZEROS:
            self.moved += nbytes(result)
        return result


def nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    # numbers move nothing
    return sum(map(nbytes, value)) if isinstance(value, (list, tuple)) else 0


class Watched:
    """Both kinds of rank, with what each op moves written down by the op."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_op: dict[int, int] = defaultdict(int)
        self.filled = 0
        for kind in (FlatRank, ReplicatedRank):
            self._watch(kind, monkeypatch)

    def _watch(
        self, kind: type[FlatRank] | type[ReplicatedRank], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        perform, enter = kind.perform, kind.enter

        def performing(rank: Any, op: Op) -> None:
            if (op.kind, op.unit) == ("optimizer", ROOT):
                self._stepping(rank, op, perform)
                return
            with Traffic() as traffic:
                perform(rank, op)
            self.by_op[op.index] = traffic.moved

        def entering(rank: Any, module: Any, *, backward: bool) -> None:
            with Traffic() as traffic:
                enter(rank, module, backward=backward)
            self.filled += traffic.moved

        monkeypatch.setattr(kind, "perform", performing)
        monkeypatch.setattr(kind, "enter", entering)

    def _stepping(self, rank: Any, op: Op, perform: Any) -> None:
        """The optimizer's own calls are told from the casts around them: it is watched by a mode of
        its own, which is not asked."""
        with Traffic() as around:
            if rank.optimizer.torch_optimizer is None:
                perform(rank, op)
                return
            optimizer = rank.optimizer.torch_optimizer
            step = optimizer.step

            def unwatched() -> None:
                before = around.moved
                step()
                around.moved = before

            optimizer.step = unwatched
            perform(rank, op)
            optimizer.step = step
        self.by_op[op.index] = around.moved

    def clear(self) -> None:
        self.by_op.clear()
        self.filled = 0


STRATEGIES = (
    'name = "ddp"', 'name = "ddp", bucket_cap_mb = 0.02', 'name = "zero1"',
    'name = "zero1", form = "all_reduce"', 'name = "zero2"', 'name = "zero3"',
)
PRECISIONS = (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "bf16"))
CASES = one_in(1, product(STRATEGIES, PRECISIONS, ("every", "last"), ("fused", "for-loop")))


@pytest.mark.parametrize(("strategy", "precision", "sync", "optimizer"), CASES)
def test_an_op_moves_what_its_calls_read_and_write(
    strategy: str, precision: tuple[str, str], sync: str, optimizer: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = f"""
model = {{ preset = "mlp-uneven" }}
batch = {{ micro_batch = 2, sequence_length = 1, accumulation = 2 }}
cluster = {{ preset = "cpu-gloo", ranks = 2 }}
strategy = {{ {strategy}, sync = "{sync}" }}
precision = {{ parameters = "{precision[0]}", reduce = "{precision[1]}" }}
optimizer = {{ name = "adamw", implementation = "{optimizer}" }}
"""
    case = parse(text.encode(), where="traffic.toml")
    program, watched = plan(case, device="cpu"), Watched(monkeypatch)
    with torch_private.fake_group(rank=0, world_size=2):
        execution = execute(case, program, rank=0, steps=2)
        watched.clear()
        execution.plain_step()

    steady = program.of_rank(0).steady
    copies = [op for op in steady if op.kind == "copy"]
    assert copies or precision[0] == precision[1]
    for op in copies:
        assert watched.by_op[op.index] == sum(kernel.nbytes for kernel in op.kernels), (
            f"op {op.index}: {op.kind} {op.unit} on {op.stream}"
        )
    fills = [
        kernel.nbytes for op in steady if op.kind == "backward" for kernel in op.kernels
        if kernel.operator == "fill"
    ]
    assert watched.filled == sum(fills)
    (stepped,) = (op for op in steady if (op.kind, op.unit) == ("optimizer", ROOT))
    assert watched.by_op[stepped.index] == sum(
        kernel.nbytes for kernel in stepped.kernels if kernel.operator in (MOVE_GRADIENT, "copy")
    )
