"""DeepSpeed's trace of modules where their order depends on data: gathers of the real engine, as
the table in zsim/strategies/README.md has them."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.support.watched_calls import WatchedCalls
from zreal.observer.subjects import deepspeed_engine
from zreal.processes import launch
from zreal.processes.rank_settings import settle
from zreal.processes.rendezvous import rendezvous

WIDTH = 8
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 3, "stage3_prefetch_bucket_size": 100, "stage3_param_persistence_threshold": 0,
        "reduce_bucket_size": 1000,
    },
}


class Routed(nn.Module):
    """Linears that are called in an order which the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=False) for name in "abcd"})

    def forward(self, x: Tensor, order: str) -> Tensor:
        """The sum of what the last one makes."""
        for name in order:
            x = self.linears[name](x)
        return x.sum()


def routed_rank(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int, **_: Any
) -> list[list[int]]:
    """All-gathers and broadcasts of forward and backward, step by step."""
    settle()
    store = rendezvous(rank=rank, world_size=world_size, port=port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    deepspeed = deepspeed_engine._deepspeed("cpu")
    model = Routed()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=CONFIG,
        dist_init_required=False,
    )
    steps = []
    for order in arguments["orders"]:
        counts = Counter[str]()

        def see(func: Any, args: Any, *_: Any, counts: Counter[str] = counts) -> None:
            """Counts collectives by name, without those of empty tensors."""
            sent = any(each.numel() for each in tree_leaves(args) if isinstance(each, Tensor))
            if func.namespace == "c10d" and sent:
                counts[func.name().partition("::")[2].partition(".")[0]] += 1

        with WatchedCalls(see):
            engine.backward(engine(torch.ones(1, WIDTH), order))
        steps.append([
            sum(counts[name] for name in counts if "allgather" in name), counts["broadcast_"]
        ])
        engine.step()
    return steps


needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed: zsim[real,deepspeed]"
)


def stepped(orders: list[str]) -> list[list[int]]:
    """All-gathers and broadcasts of steps with these orders."""
    first_rank, _ = launch.launch(
        f"{__name__}:routed_rank", {"orders": orders}, world_size=2, timeout_s=300
    )
    return first_rank


@needs_deepspeed
@pytest.mark.gloo
@pytest.mark.parametrize(("broken", "gathers"), [("abdc", 6), ("abcda", 4), ("abc", 2)])
def test_a_broken_trace_costs_the_gathers_ahead_of_its_step_and_of_the_next(
    broken: str, gathers: int
) -> None:
    followed, recorded = [[2, 6], [2, 0]], [8, 1]
    steps = stepped(["abcd"] * 4 + [broken] + ["abcd"] * 3)
    assert steps == [recorded, *followed, [2, 0], [gathers, 0], recorded, *followed]


@needs_deepspeed
@pytest.mark.gloo
@pytest.mark.parametrize(("orders", "gathers"), [
    (["abcd", "abdc"] * 3, 6), (["abcd", "bacd", "abdc", "cdab", "dcba", "abcd"], 9),
])
def test_an_order_that_changes_in_every_step_is_recorded_in_every_other_one(
    orders: list[str], gathers: int
) -> None:
    assert stepped(orders) == [[8, 1], [gathers, 6]] * 3
