"""Forty sweeps: more work never takes less time, and a better machine never takes more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import zsim
from zsim.cluster.cluster import ClusterSpec
from zsim.engine.costs.op_costs import Costs
from zsim.engine.simulate_step import simulate_step
from zsim.scenario.plan import plan

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"name": "ddp"}, "zero2": {"name": "zero2"}, "zero3": {"name": "zero3"},
    "fsdp1": {"name": "fsdp1"}, "fsdp2": {"name": "fsdp2"},
}
SIZES = {
    "num_layers": 4, "hidden_size": 2048, "num_heads": 16, "feed_forward": 8192,
    "vocabulary": 32_768,
}
MORE_WORK: dict[str, Callable[[int], dict[str, Any]]] = {
    "layers": lambda n: {"model": {"sizes": {**SIZES, "num_layers": 2 * n}}},
    "vocabulary": lambda n: {"model": {"sizes": {**SIZES, "vocabulary": 16_384 * n}}},
    "micro-batch": lambda n: {"batch": {"micro_batch": 4 * n}},
    "tokens": lambda n: {"batch": {"sequence_length": 1024 * n}},
    # on one node shards, and with them the optimizer's work, are twice those on two
    "nodes": lambda n: {"cluster": {"nodes": 2**n}},
}
BETTER: dict[str, Callable[[ClusterSpec, float], ClusterSpec]] = {
    "NICs": lambda cluster, more: replace(
        cluster, links=replace(cluster.links, rail=_faster(cluster.links.rail, more))
    ),
    "memory": lambda cluster, more: _device(
        cluster, memory_bandwidth=round(cluster.device.memory_bandwidth * more)
    ),
    "products": lambda cluster, more: _device(
        cluster, bfloat16=round(cluster.device.bfloat16 * more)
    ),
}


def _faster(link: Any, more: float) -> Any:
    return replace(link, bandwidth=round(link.bandwidth * more))


def _device(cluster: ClusterSpec, **changes: int) -> ClusterSpec:
    return replace(cluster, device=replace(cluster.device, **changes))


def _asked(strategy: str, more: dict[str, Any]) -> zsim.Scenario:
    tables: dict[str, dict[str, Any]] = {
        "model": {"family": "llama", "sizes": SIZES},
        "batch": {"micro_batch": 4, "sequence_length": 2048},
        "cluster": {"preset": "dgx-h100", "nodes": 2},
        "precision": {"parameters": "bf16", "reduce": "fp32"},
    }
    changed = {key: {**own, **more.get(key, {})} for key, own in tables.items()}
    return zsim.Scenario(strategy=STRATEGIES[strategy], **changed)


def _step_ns(asked: zsim.Scenario, cluster: ClusterSpec | None = None) -> int:
    program = plan(asked, device="cuda")
    costs = Costs(cluster=cluster or asked.cluster, execution=asked.executed)
    return simulate_step(program, costs=costs).step_time_ns


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", MORE_WORK)
def test_more_work_never_takes_less_time(what: str, strategy: str) -> None:
    times = [_step_ns(_asked(strategy, MORE_WORK[what](n))) for n in (1, 2, 3, 4)]
    assert times == sorted(times)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", BETTER)
def test_a_better_machine_never_takes_more_time(what: str, strategy: str) -> None:
    asked = _asked(strategy, {"batch": {"micro_batch": 2}})
    times = [
        _step_ns(asked, BETTER[what](asked.cluster, more)) for more in (0.5, 1.0, 1.5, 2.0)
    ]
    assert times == sorted(times, reverse=True)
