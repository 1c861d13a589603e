"""Additions of gradients to those of earlier micro-batches, as autograd calls them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from tests.support.watched_calls import WatchedCalls
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


def test_the_second_micro_batch_adds_each_gradient_once_more_than_the_first() -> None:
    case = parse(TEXT.encode(), where="accumulation.toml")
    model = modules.build(case.model, seed=0)
    shapes = {parameter.shape for parameter in model.parameters()}
    counts: list[Counter[int]] = []

    def see(func: Any, args: Any, _kwargs: Any, _result: Any) -> None:
        added = [value for value in args if isinstance(value, torch.Tensor)]
        if "add" in str(func) and len(added) == 2 and {each.shape for each in added} <= shapes:
            counts[-1][added[0].numel()] += 1

    for x, targets in batches.micro_batches(case, rank=0, step=0, dtype="float32"):
        counts.append(Counter())
        with WatchedCalls(see):
            model(x, targets).backward()
    ours = Counter(
        k.flops for op in plan(case, device="cpu").ranks[0].steady for k in op.kernels
        if k.operator == ACCUMULATE
    )
    assert (
        counts[1] - counts[0]
        == ours
        == Counter(parameter.numel() for parameter in model.parameters())
    )
