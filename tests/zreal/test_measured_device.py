"""Devices measured for real: the kernels and collectives of a request, on CPU tensors here and on a
GPU where there is one."""

from __future__ import annotations

import json
from itertools import pairwise
from statistics import median

import pytest

pytest.importorskip("torch")

import torch

from zreal.backends import GlooBackend, NcclBackend
from zsim.calibration.machine.device_request import KINDS, attention, product
from zsim.calibration.machine.machine_file import CACHE
from zsim.cli.main import main
from zsim.ir.ops import Kernel
from zsim.runs.backend import DeviceRequest

on_a_gpu = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SIZES = (2**12, 2**28 if torch.cuda.is_available() else 2**24)
"""The larger one takes a GPU 0.1 ms, longer than the host needs to launch a kernel."""
KERNELS = (
    product(32, 32, 32, "bfloat16"), product(256, 256, 512, "float32"),
    *(Kernel(name, 0, nbytes, "bfloat16") for nbytes in SIZES for name in (
        "copy", "add", "gelu", "layer_norm", "log_softmax"
    )),
    *attention(2, 64), Kernel("scale", 0, 512, "bfloat16"),
    *(Kernel(name, 0, 2**20, "bfloat16", location="link") for name in ("to_device", "to_host")),
)


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(GlooBackend(), marks=pytest.mark.gloo),
        pytest.param(NcclBackend(), marks=on_a_gpu),
    ],
    ids=["gloo", "nccl"],
)
def test_every_kernel_and_collective_is_timed_on_all_ranks(backend: GlooBackend) -> None:
    size = torch.cuda.device_count() if backend.device == "cuda" else 2
    collectives = tuple((kind, nbytes) for kind in KINDS for nbytes in SIZES)
    measured = backend.measure_device(DeviceRequest(
        world_size=size, kernels=KERNELS, collectives=collectives, budget_s=0.01, timeout_s=120
    ))
    assert len(measured.kernels) == len(KERNELS)
    assert len(measured.collectives) == len(collectives)
    for timed in (*measured.kernels, *measured.collectives):
        assert len(timed.device) == len(timed.issue) >= 3
        assert min(timed.device) > 0
    # so many times the bytes take longer, whatever else the machine does
    for small, large in zip(measured.kernels[2:7], measured.kernels[7:12], strict=True):
        assert median(small.device) < median(large.device)
    ns = {asked: median(timed.device) for asked, timed in zip(
        collectives, measured.collectives, strict=True
    )}
    assert all(ns[kind, small] < ns[kind, large] for kind in KINDS if size > 1
               for small, large in pairwise(SIZES))


@pytest.mark.parametrize("quick", [pytest.param(["--quick"], marks=on_a_gpu)])
def test_the_gpus_of_this_machine_are_calibrated(quick, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    assert main(["calibrate", "--here", "--backend", "nccl", "--json", *quick]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["gpu"] == torch.cuda.get_device_name(0)
    assert report["constants"]["device.memory_efficiency"]["factor"] > 0
    assert [*tmp_path.rglob("*-gpus.toml")]


def test_a_machine_without_gpus_is_not_calibrated_as_one(capsys) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["calibrate", "--here", "--backend", "nccl"]) == 3
    assert "expected a CUDA device" in capsys.readouterr().err


def test_a_node_is_named_for_gpus_alone(capsys) -> None:
    assert main(["calibrate", "--here", "--cluster", "dgx-h100"]) == 2
    assert "--cluster: expected --backend nccl, whose node it names" in capsys.readouterr().err
