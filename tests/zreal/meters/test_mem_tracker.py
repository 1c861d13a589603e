"""A third oracle: PyTorch's own FSDPMemTracker, which runs the model's code under a FakeTensorMode,
predicts the same peak.

The module is built in that mode and wrapped outside of it. fully_shard makes a DeviceMesh where it
has a number of ranks to reshard to. The mesh reads its map of ranks as it is made, and a fake
tensor has no values to read.

The map (4 B per rank in host memory, held by the mesh) is then older than the tracker. The tracker
counts sharded parameters, optimizer states and what operators make inside it, so its peak lacks
those bytes. The meter on the fake process group, which watches the wrapping too, counts them, and
so do we.
"""

from __future__ import annotations

import sys
import time

import pytest
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

from tests.support.installed_torch import TORCH
from zreal import torch_private
from zreal.meters.mesh_groups import device_mesh
from zreal.modules import modules
from zreal.modules.initial_values import made
from zreal.modules.numerics import batches
from zreal.observer.subjects.table import SUBJECTS
from zsim.ir.ledger_replay import replay
from zsim.ir.ops import Alloc
from zsim.ir.program import RankProgram
from zsim.runs.backend import RunOptions
from zsim.runs.registry import find
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse

QUICK = [
    ("mlp-tiny", "bf16", 'name = "fsdp2"', "foreach"),
    ("mlp-uneven", "fp32", 'name = "fsdp2"', "for-loop"),
]
SLOW = [
    (model, precision, strategy, implementation)
    for model in ("mlp-small", "gpt-tiny", "llama-tiny")
    for precision in ("fp32", "bf16")
    for strategy, implementation in (
        ('name = "fsdp2", reshard_after_forward = true', "foreach"),
        ('name = "fsdp2", reshard_after_forward = false', "for-loop"),
        ('name = "fsdp2", reshard_after_forward = 2', "foreach"),
    )
]
"""Slow scenarios: 18, and 20 with QUICK."""

RANK_MAP = "mesh.rank_map"
"""The buffer of the DeviceMesh's map of ranks in a Program."""


def scenario(
    model: str, precision: str, strategy: str, implementation: str, *, ranks: int = 4
) -> Scenario:
    text = f"""
model = {{ preset = "{model}" }}
batch = {{ micro_batch = 2, sequence_length = {1 if "mlp" in model else 32} }}
cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}
strategy = {{ {strategy} }}
precision = {{ parameters = "{precision}", reduce = "fp32" }}
optimizer = {{ name = "adamw", implementation = "{implementation}" }}
"""
    return parse(text.encode(), where="tracked.toml")


def tracked_peak(case: Scenario) -> int:
    """The tracker's peak of the second iteration on rank 0, less the batch, which it counts too."""
    with torch_private.fake_group(rank=0, world_size=case.world_size):
        mesh, _ = device_mesh(case, device="cpu")
        fake = torch_private.fake_mode()
        with fake:
            model = modules.build(case.model, seed=case.seed)
        subject = SUBJECTS[case.strategy](case, model, mesh, made)
        with fake:
            ((x, targets),) = batches.micro_batches(case, rank=0, step=0, dtype=subject.dtype)
            tracker = FSDPMemTracker(subject.module, subject.optimizer)
            tracker.track_inputs((x, targets))
            with tracker:
                for _ in range(2):
                    # the first iteration counts tensors of global shape, which DTensor's
                    # sharding propagation makes in the mode and which never exist
                    tracker._peak_mem.clear()
                    tracker._peak_mem_snap.clear()
                    tracker.reset_mod_stats()
                    with subject.micro_batch(True):
                        loss = subject.module(x, targets)
                        loss.backward()
                        del loss
                    subject.optimizer.step()
                    subject.optimizer.zero_grad(set_to_none=True)
            (peak,) = tracker.get_tracker_snapshot("peak").values()
    return int(peak["Total"]) - x.nbytes - targets.nbytes


def older_than_the_tracker(rank: RankProgram) -> int:
    """Bytes of the map of ranks that the mesh of an int reshard_after_forward holds from
    construction on; 0 where there is none."""
    events = (event for op in rank.construction for event in op.memory)
    return sum(
        event.nbytes for event in events if isinstance(event, Alloc) and event.buffer == RANK_MAP
    )


pytestmark = pytest.mark.skipif(
    TORCH == "2.11", reason="the tracker of torch 2.11 counts tensors that never exist"
)


@pytest.mark.parametrize(
    ("model", "precision", "strategy", "implementation"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_the_peak_of_a_steady_step_is_the_trackers(
    model: str, precision: str, strategy: str, implementation: str
) -> None:
    case = scenario(model, precision, strategy, implementation)
    begin = time.perf_counter()
    rank = plan(case, device="cpu", torch=TORCH).of_rank(0)
    predicted = replay(rank)["steady"].peak_bytes
    between = time.perf_counter()
    tracked = tracked_peak(case)
    took = time.perf_counter() - between
    sys.stdout.write(f"{predicted:,} B in {between - begin:.3f} s, the tracker's {tracked:,} B in "
                     f"{took:.1f} s\n")
    assert predicted - older_than_the_tracker(rank) == tracked


def test_a_mesh_made_for_an_int_reshard_holds_its_map_of_ranks_where_the_meter_sees_it_and_the_tracker_cannot() -> (  # noqa: E501
    None
):
    case = scenario("mlp-tiny", "fp32", 'name = "fsdp2", reshard_after_forward = 2', "foreach")
    rank = plan(case, device="cpu", torch=TORCH).of_rank(0)
    (measured,) = find("fake").run(case, options=RunOptions(ranks=(0,))).ranks
    assert older_than_the_tracker(rank) == 4 * case.world_size
    assert (
        measured.phases["steady"].memory.peak_bytes
        == replay(rank)["steady"].peak_bytes
        == tracked_peak(case) + 16
    )


def test_a_mesh_cannot_be_made_of_tensors_without_values() -> None:
    case = scenario("mlp-tiny", "fp32", 'name = "fsdp2", reshard_after_forward = 2', "foreach")
    with torch_private.fake_group(rank=0, world_size=case.world_size):
        mesh, _ = device_mesh(case, device="cpu")
        with torch_private.fake_mode(), pytest.raises(RuntimeError, match="_local_scalar_dense"):
            SUBJECTS[case.strategy](case, modules.build(case.model, seed=case.seed), mesh, made)
