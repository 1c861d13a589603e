"""zero1, zero2 and zero3 trained for real with states in host memory.

Order, bytes, and memory of device and host are as simulated; parameters are as one process trains
them.
"""

from __future__ import annotations

import pytest

import zsim
from zsim.runs.compare.agreement import Agreement

CPU = {"optimizer": "cpu"}
BOTH = {"optimizer": "cpu", "parameters": "cpu"}
CHECKED = ("order", "bytes", "memory", "numerics")


def scenario(
    strategy: str, offload: dict[str, object], *, precision: str = "fp32", accumulation: int = 1,
    ranks: int = 2, optimizer: dict[str, object] | None = None, sync: str = "every",
    **options: int,
) -> zsim.Scenario:
    return zsim.Scenario(
        model={"preset": "gpt-tiny"},
        batch={"micro_batch": 1, "sequence_length": 16, "accumulation": accumulation},
        cluster={"preset": "cpu-gloo", "ranks": ranks},
        strategy={"name": strategy, "sync": sync, **options},
        precision={"parameters": precision, "reduce": "fp32"},
        optimizer=optimizer or {"implementation": "fused"}, offload=offload,
    )


def verdict(case: zsim.Scenario) -> Agreement:
    """The verdict of `zsim validate`; every check but that of time was made, and none failed."""
    comparison = zsim.validate(case, against="gloo")
    assert comparison.ok, str(comparison)
    kinds = next(check for check in comparison.checks if check.name == "memory by kind")
    assert "offloaded" in kinds.detail
    return comparison.agreement


@pytest.mark.parametrize("case", [
    scenario("zero1", CPU, optimizer={"implementation": "foreach"}),
    scenario("zero2", CPU, precision="bf16", accumulation=2, sync="last"),
    scenario("zero3", CPU, optimizer={"implementation": "for-loop", "clip_norm": 0.5}),
    scenario("zero3", BOTH, precision="bf16", accumulation=2),
    scenario("zero1", CPU, ranks=1),
    scenario(
        "zero3", BOTH, precision="bf16", accumulation=2, persistence_threshold=1000,
        zero2_threshold=30_000,
    ),
    scenario("zero3", {**BOTH, "adam": "deepspeed", "pin_memory": False}, ranks=3),
], ids=lambda case: f"{case.strategy}-{case.world_size}")
def test_offloaded_ranks_do_what_their_program_says_and_train_as_one_process(
    case: zsim.Scenario
) -> None:
    assert set(CHECKED) <= set(verdict(case).checked)
