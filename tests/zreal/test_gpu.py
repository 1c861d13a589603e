"""GPU: what only a CUDA device can confirm, and its CPU form, which runs everywhere."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

import zsim
from tests.measured.gpu import peaks, real_ranks

on_a_gpu = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ROUNDING = 1.03
"""Reserved bytes over the prediction, at most: blocks of other streams come back later."""


def scenario(strategy: str, *, device: str, activations: str | None = None) -> zsim.Scenario:
    """A small model on eight ranks of the fake process group."""
    cluster = {"cuda": {"preset": "dgx-h100"}, "cpu": {"preset": "cpu-gloo", "ranks": 8}}[device]
    return zsim.Scenario(
        model={"preset": "gpt-tiny"}, batch={"micro_batch": 2, "sequence_length": 64},
        cluster=cluster, strategy={"name": strategy}, name=strategy,
        activation_checkpointing={"mode": "full" if activations else "none"},
        offload={"activations": activations} if activations else {},
    )


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_the_row_of_a_scenario_on_the_cpu_is_exact(strategy: str) -> None:
    row = peaks(scenario(strategy, device="cpu"), "cpu")
    assert row["metered_peak_bytes"] == row["predicted_peak_bytes"]


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=on_a_gpu) for name in ("fsdp2", "ddp")]
)
def test_bytes_of_a_gpu_are_those_predicted(strategy: str) -> None:
    """Bytes asked for are exact; the caching allocator rounds each up to 512."""
    row = peaks(scenario(strategy, device="cuda"), "cuda")
    assert row["metered_peak_bytes"] == row["predicted_peak_bytes"]
    assert row["peak_bytes"] - row["start_bytes"] == row["predicted_growth_bytes"]
    assert row["predicted_peak_bytes"] <= row["allocated_bytes"] <= row["active_bytes"]
    of_other_tests = row["start_bytes"] - row["predicted_start_bytes"]
    assert of_other_tests >= 0
    assert row["reserved_bytes"] - of_other_tests <= ROUNDING * row["predicted_reserved_bytes"]


@pytest.mark.parametrize("activations", ["saved_tensors", "checkpoint_inputs"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_a_gpu)])
def test_activations_in_host_memory_leave_the_device_as_predicted(
    activations: str, device: str
) -> None:
    row = peaks(scenario("ddp", device=device, activations=activations), device)
    assert row["metered_peak_bytes"] == row["predicted_peak_bytes"]


@pytest.mark.parametrize("left_s", [pytest.param(300.0, marks=on_a_gpu)])
def test_ranks_that_share_a_gpu_agree_with_their_simulation(left_s: float) -> None:
    ended = real_ranks("cuda", left_s, ("fsdp2-mlp-2", "ddp-mlp-2", "zero3-mlp-4"))
    told = [
        (each["scenario"], each.get("error") or [
            check for check in each["checks"] if check["status"] == "failed"
        ])
        for each in ended.get("result", {}).get("validations", ())
    ]
    assert ended.get("exit_code") == 0, told or ended
