"""The kernels around fully_shard's reductions, one by one, against the calls that torch makes:
additions, casts, divisions, copies in."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.cases.sampling import one_in
from zreal import torch_private
from zreal.modules.initial_values import DTYPES
from zreal.observer.observer import observe
from zsim.ir.ops import ACCUMULATE, Alloc, Op
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse

Calls = Counter[tuple[str, int]]
"""Number of calls by operator and bytes moved."""


class GradientCalls(TorchDispatchMode):
    """The calls of a step that touch gradients behind autograd: it is a plain MLP's, in which
    nothing else adds in place or divides.

    `casts`: the dtypes before and after each cast of gradients. `numels`: those of parameters; what
    is copied of one shard by itself is a parameter, and whole groups are gradients.
    """

    def __init__(self, casts: set[tuple[torch.dtype, torch.dtype]], numels: set[int]) -> None:
        super().__init__()
        self.casts, self.numels, self.counts = casts, numels, Calls()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = nbytes(args[:1])
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "add_" and isinstance(args[1], Tensor) and args[0].numel() > 1:
            self.counts["add", 2 * nbytes(args[0]) + nbytes(args[1])] += 1
        elif name == "div_" and args[0].numel() > 1:
            self.counts["divide", 2 * nbytes(args[0])] += 1
        elif name == "copy_" and args[0].numel() > 1 and args[0].numel() not in self.numels:
            self.counts["copy", nbytes(args[0]) + nbytes(args[1])] += 1
        elif name == "chunk_cat":
            self.counts["copy", before + nbytes(kwargs["out"])] += 1
        elif (
            name == "_to_copy"
            and (args[0].dtype, result.dtype) in self.casts
            and result.numel() > 1
        ):
            self.counts["copy", before + nbytes(result)] += 1
        return result


def nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(nbytes, value)) if isinstance(value, (list, tuple)) else 0


def scenario(axes: str, *, precision: tuple[str, str], sync: str) -> Scenario:
    text = f"""
model = {{ preset = "mlp-tiny" }}
batch = {{ micro_batch = 2, sequence_length = 1, accumulation = 3 }}
cluster = {{ preset = "cpu-gloo", ranks = 4 }}
strategy = {{ {axes}, sync = "{sync}" }}
precision = {{ parameters = "{precision[0]}", reduce = "{precision[1]}" }}
optimizer = {{ name = "adamw", implementation = "fused" }}
"""
    return parse(text.encode(), where="calls.toml")


def predicted(case: Scenario) -> Calls:
    """The kernels of a steady step that are said to do the like."""
    calls: Calls = Counter()
    for op in plan(case, device="cpu").of_rank(0).steady:
        for kernel in op.kernels:
            if kernel.operator == ACCUMULATE:
                calls["add", kernel.nbytes] += 1
            elif op.kind == "copy" and not gathers(op):
                calls[kernel.operator, kernel.nbytes] += 1
    return calls


def gathers(op: Op) -> bool:
    makes = any(
        isinstance(event, Alloc) and event.kind == "unsharded_parameters" for event in op.memory
    )
    return makes or op.stream in ("all_gather", "all_gather_copy_in")


PRECISIONS = (
    ("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp16"),
    ("fp32", "bf16"),
)
AXES = (
    'name = "hsdp", dp_shard = 1, dp_replicate = 4', 'name = "fsdp2", dp_shard = 4',
    'name = "hsdp", dp_shard = 2, dp_replicate = 2',
    'name = "hsdp", dp_shard = 2, dp_replicate = 2, all_reduce = "last"',
)


@pytest.mark.parametrize(
    ("axes", "precision", "sync"), one_in(1, itertools.product(AXES, PRECISIONS, ("every", "last")))
)
def test_each_kernel_is_a_call_of_torch_and_each_call_a_kernel(
    axes: str, precision: tuple[str, str], sync: str
) -> None:
    """Three micro-batches have one that is neither the first nor the last."""
    case = scenario(axes, precision=precision, sync=sync)
    parameters, reduce = DTYPES[case.precision.parameters], DTYPES[case.precision.reduce]
    with torch_private.fake_group(rank=0, world_size=case.world_size):
        observation = observe(case, rank=0)
        assert observation.plain_step is not None
        numels = {parameter.numel for parameter in case.model.parameters}
        with GradientCalls({(parameters, reduce), (reduce, torch.float32)}, numels) as calls:
            observation.plain_step()

    assert calls.counts == predicted(case)
