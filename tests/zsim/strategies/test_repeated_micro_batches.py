"""Micro-batches that are issued as one before: planned one by one, they have the same ops."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.scenario.plan import plan
from zsim.strategies.building.step_builder import StepBuilder

CASES: dict[str, dict[str, Any]] = {
    "fsdp1": {"dp_shard": 4},
    "fsdp1, all kept": {"dp_shard": 4, "sharding": "grad_op", "use_orig_params": True},
    "fsdp1, ahead": {"dp_shard": 4, "forward_prefetch": True, "limit_all_gathers": False},
    "fsdp2": {"dp_shard": 4},
    "fsdp2, parts kept": {"dp_shard": 4, "reshard_after_forward": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2, "all_reduce": "last"},
    "ddp": {},
    "ddp, views": {"gradient_as_bucket_view": True},
    "ddp, unused": {"find_unused_parameters": True},
    "zero_redundancy": {}, "single": {},
}


def scenario(case: str, sync: str) -> zsim.Scenario:
    alone = case == "single"
    return zsim.Scenario(
        model={"preset": "gpt-tiny"}, cluster={"preset": "dgx-h100", "ranks": 1 if alone else 4},
        batch={"micro_batch": 1, "accumulation": 5},
        strategy={"name": case.partition(",")[0], **({} if alone else {"sync": sync})}
        | CASES[case],
    )


@pytest.mark.parametrize("sync", ["every", "last"])
@pytest.mark.parametrize("case", CASES)
def test_a_micro_batch_issued_as_one_before_has_the_ops_that_planning_it_gives(
    case: str, sync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeated = plan(scenario(case, sync), device="cuda")
    monkeypatch.setattr(StepBuilder, "repeat", lambda *_: 0)
    assert plan(scenario(case, sync), device="cuda") == repeated


@pytest.mark.parametrize("case", CASES)
def test_a_micro_batch_between_others_like_it_is_not_planned(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = set[int]()
    issue = StepBuilder.issue

    def noted(*args: Any, **keywords: Any) -> int:
        planned.add(keywords.get("micro_batch", 0))
        return issue(*args, **keywords)

    monkeypatch.setattr(StepBuilder, "issue", noted)
    plan(scenario(case, "every"), device="cuda")
    assert {0, 1} <= planned <= {0, 1, 2, 4}
