"""Arguments of torch's wrappers: each is an option of the scenario, or told where else it is."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest

pytest.importorskip("torch")

from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from zsim import Scenario, ScenarioError
from zsim.scenario.keys.foreign_keys import FOREIGN_KEYS, SHARED_MODELS
from zsim.strategies import STRATEGIES

NO_CHOICES = {
    "module", "self", "params", "optimizer_class", "defaults", "kwargs", "backward_prefetch",
}
"""Arguments that are the model or the optimizer, or an option by another value."""


def problems(strategy: str, keys: dict[str, Any], **tables: dict[str, Any]) -> dict[str, str]:
    """The refusal of each key that `strategy`, or another of the tables, does not have."""
    with pytest.raises(ScenarioError) as caught:
        Scenario(
            model={"preset": "mlp-tiny"}, batch={"micro_batch": 1},
            cluster={"preset": "cpu-gloo", "ranks": 2}, strategy={"name": strategy} | keys,
            **tables,
        )
    lines = [line.partition(": ")[2].partition(": ") for line in caught.value.problems]
    return {key.removeprefix("strategy."): text for key, _, text in lines}


@pytest.mark.parametrize(("strategy", "functions"), [
    ("ddp", (DistributedDataParallel.__init__,)),
    ("zero_redundancy", (ZeroRedundancyOptimizer.__init__, DistributedDataParallel.__init__)),
    ("fsdp1", (FullyShardedDataParallel.__init__,)),
    ("fsdp2", (fully_shard,)),
    ("hsdp", (fully_shard,)),
])
def test_every_argument_of_torch_is_an_option_or_told_where_else_it_is(
    strategy: str, functions: tuple[Any, ...]
) -> None:
    names = {name for each in functions for name in signature(each).parameters} - NO_CHOICES
    told = problems(strategy, dict.fromkeys(names, 3.5))
    assert not [line for line in told.values() if "unknown key" in line]


@pytest.mark.parametrize(("strategy", "key"), [
    ("ddp", "device_mesh"), ("zero_redundancy", "process_group"), ("fsdp1", "device_mesh"),
    ("fsdp2", "mesh"), ("hsdp", "mesh"),
])
def test_a_mesh_is_told_by_sizes_that_the_strategy_has(strategy: str, key: str) -> None:
    has_shards = "dp_shard" in STRATEGIES[strategy].axes
    assert ("dp_shard" in problems(strategy, {key: 2})[key]) is has_shards


def test_so_are_the_calls_that_change_how_fully_shard_trains() -> None:
    setters = [name for name in vars(FSDPModule) if name.startswith("set_")]
    told = problems("fsdp2", dict.fromkeys(setters, True))
    assert sorted(told) == sorted(setters)
    assert not [line for line in told.values() if "unknown key" in line]


@pytest.mark.parametrize("key", ["tp", "pp", "cp", "ep", "tensor_parallel", "loss_parallel"])
def test_ranks_that_share_a_model_are_refused_in_the_same_words(key: str) -> None:
    assert problems("fsdp2", {key: 2}) == {key: SHARED_MODELS}


@pytest.mark.parametrize(
    "key", [key for key in FOREIGN_KEYS if key.startswith(("optimizer.", "precision."))]
)
def test_arguments_of_optimizers_and_precisions_are_told_by_name(key: str) -> None:
    table, _, name = key.partition(".")
    assert problems("fsdp2", {}, **{table: {name: 1}}) == {key: FOREIGN_KEYS[key]}
