"""Records of fully_shard by the observer: every collective with its mesh axis, phase by phase, and
never silence."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.agreement import inexact
from zreal import torch_private
from zreal.meters.collectives import CollectiveRecorder
from zreal.meters.mesh_groups import MeshGroup, device_mesh
from zreal.observer.observer import observe
from zsim.errors import ZsimError
from zsim.ir.program import PHASES
from zsim.scenario.scenario import Scenario, parse


def scenario(*, ranks: int, strategy: str, accumulation: int = 1) -> Scenario:
    """The tiny mlp under `strategy`."""
    text = f"""
model = {{ preset = "mlp-tiny" }}
batch = {{ micro_batch = 2, accumulation = {accumulation} }}
cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}
strategy = {{ {strategy} }}
"""
    return parse(text.encode(), where="test.toml")


FSDP2 = 'name = "fsdp2", dp_shard = 4'


@pytest.mark.parametrize(("ranks", "strategy"), [
    (4, FSDP2), (4, f"{FSDP2}, reshard_after_forward = 2"),
    (8, f"{FSDP2.replace('fsdp2', 'hsdp')}, dp_replicate = 2"),
    (8, f"{FSDP2.replace('fsdp2', 'hsdp')}, dp_replicate = 2, reshard_after_forward = 2"),
])
def test_collectives_are_recorded_with_the_axis_and_the_size_of_their_group(
    ranks: int, strategy: str
) -> None:
    case = scenario(ranks=ranks, strategy=strategy)
    assert inexact(case, ranks=(ranks - 1,)) == []


def test_the_steady_step_is_the_last_of_at_least_three_and_each_step_has_a_loss() -> None:
    with torch_private.fake_group(rank=0, world_size=4):
        observation = observe(scenario(ranks=4, strategy=FSDP2, accumulation=2), rank=0)

    assert set(observation.run.phases) == set(PHASES)
    assert len(observation.losses) == 3
    assert observation.run.phases["construction"].collectives == ()


def test_a_rank_that_recorded_nothing_is_an_error_and_not_a_pass(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CollectiveRecorder, "take", lambda self: ())

    with (
        torch_private.fake_group(rank=2, world_size=4),
        pytest.raises(ZsimError, match="collectives in the steady step"),
    ):
        observe(scenario(ranks=4, strategy=FSDP2), rank=2)


def test_a_part_of_an_axis_is_named_after_the_axis_and_any_other_group_is_called_world() -> None:
    with torch_private.fake_group(rank=0, world_size=4):
        part, whole = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
        groups = {str(whole.group_name): MeshGroup("dp_shard", 3, (0, 1, 2))}
        with CollectiveRecorder(groups, world_size=4) as recorder:
            for group in (whole, part, dist.group.WORLD):
                dist.all_reduce(torch.ones(5), group=group)
        records = recorder.take()

    assert recorder.group_ranks == {
        "dp_shard": (0, 1, 2), "dp_shard:2": (0, 1), "world": (0, 1, 2, 3)
    }
    assert [(record.group, record.group_size, record.nbytes) for record in records] == [
        ("dp_shard", 3, 20), ("dp_shard", 2, 20), ("world", 4, 20),
    ]


def test_hsdp_has_a_two_dimensional_mesh_whose_axes_hold_this_rank() -> None:
    case = scenario(ranks=8, strategy=f"{FSDP2.replace('fsdp2', 'hsdp')}, dp_replicate = 2")
    with torch_private.fake_group(rank=6, world_size=8):
        _, groups = device_mesh(case, device="cpu")

    assert {group.axis: group.ranks for group in groups.values()} == {
        "dp_replicate": (2, 6), "dp_shard": (4, 5, 6, 7),
    }
