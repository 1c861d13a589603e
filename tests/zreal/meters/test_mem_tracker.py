"""A third oracle: PyTorch's own FSDPMemTracker, which runs the model's code under a FakeTensorMode,
predicts the same peak.

The module is built in that mode and wrapped outside of it. fully_shard makes a DeviceMesh where it
has a number of ranks to reshard to. The mesh reads its map of ranks as it is made, and a fake
tensor has no values to read.
"""

from __future__ import annotations

import sys
import time

import pytest

from zreal import torch_private
from zreal.meters.mesh_groups import device_mesh
from zreal.modules import batches, modules
from zreal.modules.initial_values import made
from zreal.observer.subjects.table import SUBJECTS
from zsim.ir.ledger_replay import replay
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
            tracker = torch_private.FSDPMemTracker(subject.module, subject.optimizer)
            tracker.track_inputs((x, targets))
            with tracker:
                for _ in range(2):
                    torch_private.forget_peak(tracker)
                    tracker.reset_mod_stats()
                    with subject.micro_batch(True):
                        loss = subject.module(x, targets)
                        loss.backward()
                        del loss
                    subject.optimizer.step()
                    subject.optimizer.zero_grad(set_to_none=True)
            (peak,) = tracker.get_tracker_snapshot("peak").values()
    return int(peak["Total"]) - x.nbytes - targets.nbytes


@pytest.mark.parametrize(
    ("model", "precision", "strategy", "implementation"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_the_peak_of_a_steady_step_is_the_trackers(
    model: str, precision: str, strategy: str, implementation: str
) -> None:
    case = scenario(model, precision, strategy, implementation)
    begin = time.perf_counter()
    predicted = replay(plan(case, device="cpu").of_rank(0))["steady"].peak_bytes
    between = time.perf_counter()
    tracked = tracked_peak(case)
    took = time.perf_counter() - between
    sys.stdout.write(f"{predicted:,} B in {between - begin:.3f} s, the tracker's {tracked:,} B in "
                     f"{took:.1f} s\n")
    assert predicted == tracked


def test_the_peak_of_a_step_with_an_int_reshard_is_the_meters_and_the_trackers() -> None:
    case = scenario("mlp-tiny", "fp32", 'name = "fsdp2", reshard_after_forward = 2', "foreach")
    predicted = replay(plan(case, device="cpu").of_rank(0))["steady"].peak_bytes
    (measured,) = find("fake").run(case, options=RunOptions(ranks=(0,))).ranks
    assert measured.phases["steady"].memory.peak_bytes == predicted == tracked_peak(case)


def test_a_mesh_cannot_be_made_of_tensors_without_values() -> None:
    case = scenario("mlp-tiny", "fp32", 'name = "fsdp2", reshard_after_forward = 2', "foreach")
    with torch_private.fake_group(rank=0, world_size=case.world_size):
        mesh, _ = device_mesh(case, device="cpu")
        with torch_private.fake_mode(), pytest.raises(RuntimeError, match="_local_scalar_dense"):
            SUBJECTS[case.strategy](case, modules.build(case.model, seed=case.seed), mesh, made)
