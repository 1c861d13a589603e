"""Records of fully_shard by the observer: every collective with its mesh axis, phase by phase, and
never silence."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.installed_torch import TORCH
from zreal import torch_private
from zreal.meters.collectives import CollectiveRecorder
from zreal.meters.mesh_groups import MeshGroup, device_mesh
from zreal.observer.observer import observe
from zsim.errors import ZsimError
from zsim.ir.ledger_replay import replay
from zsim.ir.ops import COLLECTIVES
from zsim.ir.program import PHASES, RankProgram
from zsim.ir.run import CollectiveRecord, RankRun
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse


def scenario(
    *, ranks: int, strategy: str, optimizer: str = 'name = "adamw"', accumulation: int = 1
) -> Scenario:
    """The tiny mlp under `strategy`."""
    text = f"""
model = {{ preset = "mlp-tiny" }}
batch = {{ micro_batch = 2, accumulation = {accumulation} }}
cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}
strategy = {{ {strategy} }}
optimizer = {{ {optimizer} }}
"""
    return parse(text.encode(), where="test.toml")


FSDP2 = 'name = "fsdp2", dp_shard = 4'


def measured(case: Scenario, *, rank: int) -> RankRun:
    """Run of torch on `rank`."""
    with torch_private.fake_group(rank=rank, world_size=case.world_size):
        return observe(case, rank=rank).run


def planned(case: Scenario, program: RankProgram) -> dict[str, tuple[CollectiveRecord, ...]]:
    """The Program's collectives by phase, as records; "dp_shard:2" is two ranks of the axis
    dp_shard."""
    by_phase = {}
    for phase in PHASES:
        records = []
        for op in program.phase(phase):
            if op.kind in COLLECTIVES:
                axis, _, part = op.group.partition(":")
                size = int(part) if part else case.mesh.size(axis)
                records.append(
                    CollectiveRecord(op=op.kind, nbytes=op.nbytes, group=axis, group_size=size)
                )
        by_phase[phase] = tuple(records)
    return by_phase


@pytest.mark.parametrize(("ranks", "strategy"), [
    (4, FSDP2), (4, f"{FSDP2}, reshard_after_forward = 2"),
    (8, f"{FSDP2.replace('fsdp2', 'hsdp')}, dp_replicate = 2"),
    (8, f"{FSDP2.replace('fsdp2', 'hsdp')}, dp_replicate = 2, reshard_after_forward = 2"),
])
def test_collectives_are_recorded_with_the_axis_and_the_size_of_their_group(
    ranks: int, strategy: str
) -> None:
    case = scenario(ranks=ranks, strategy=strategy)
    run = measured(case, rank=ranks - 1)

    assert {phase: record.collectives for phase, record in run.phases.items()} == planned(
        case, plan(case, device="cpu", torch=TORCH).of_rank(ranks - 1)
    )


@pytest.mark.parametrize("implementation", ["foreach", "for-loop"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_memory_with_sgd_is_exact_at_the_start_peak_and_end_of_each_step(
    implementation: str, momentum: float
) -> None:
    optimizer = f'name = "sgd", implementation = "{implementation}", momentum = {momentum}'
    case = scenario(ranks=4, strategy=FSDP2, optimizer=optimizer)
    predicted = memory_of(plan(case, device="cpu", torch=TORCH).of_rank(1))
    run = measured(case, rank=1)

    assert {
        phase: (record.memory.start_bytes, record.memory.peak_bytes, record.memory.end_bytes)
        for phase, record in run.phases.items()
        if phase != "construction"
    } == predicted


def memory_of(program: RankProgram) -> dict[str, tuple[int, int, int]]:
    """Start, peak and end bytes of the first and the steady step."""
    records = replay(program)
    return {
        p: (records[p].start_bytes, records[p].peak_bytes, records[p].end_bytes)
        for p in ("first", "steady")
    }


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
