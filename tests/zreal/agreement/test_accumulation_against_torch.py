"""Additions of gradients to those of earlier micro-batches, as autograd calls them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zreal.modules import modules
from zreal.modules.numerics import batches
from zsim.ir.ops import ACCUMULATE
from zsim.scenario.plan import plan
from zsim.scenario.scenario import parse

TEXT = """
model = { family = "gpt", sizes = { num_layers = 2, hidden_size = 8, num_heads = 2, vocabulary = 13, tied = true } }
batch = { micro_batch = 2, sequence_length = 4, accumulation = 2 }
cluster = { preset = "cpu-gloo", ranks = 1 }
strategy = { name = "ddp", sync = "last" }
"""  # noqa: E501


class Additions(TorchDispatchMode):
    """Counts calls that add two tensors of one of these shapes, by number of elements."""

    def __init__(self, shapes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes, self.counts = shapes, Counter[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        added = [value for value in args if isinstance(value, torch.Tensor)]
        if (
            "add" in str(func)
            and len(added) == 2
            and all(tuple(value.shape) in self.shapes for value in added)
        ):
            self.counts[added[0].numel()] += 1
        return func(*args, **(kwargs or {}))


def test_the_second_micro_batch_adds_each_gradient_once_more_than_the_first() -> None:
    case = parse(TEXT.encode(), where="accumulation.toml")
    model = modules.build(case.model, seed=0)
    counts = []
    for x, targets in batches.micro_batches(case, rank=0, step=0, dtype="float32"):
        with Additions({tuple(parameter.shape) for parameter in model.parameters()}) as additions:
            model(x, targets).backward()
        counts.append(additions.counts)
    ours = Counter(
        k.flops for op in plan(case, device="cpu").ranks[0].steady for k in op.kernels
        if k.operator == ACCUMULATE
    )
    assert (
        counts[1] - counts[0]
        == ours
        == Counter(parameter.numel() for parameter in model.parameters())
    )
