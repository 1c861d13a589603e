"""Devices chosen by the user: one scenario on a CPU and on a GPU, and choices that are refused.

Refusals need no GPU, and are tried where there is none.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

import torch

import zsim
from tests.support.folders import PARITY
from zreal.backends import FakeBackend, GlooBackend, NcclBackend
from zsim import api
from zsim.cli.main import main
from zsim.errors import ArgumentError
from zsim.runs import real_run
from zsim.runs.backend import RunOptions

FILE = str(PARITY / "zero3-mlp-4.toml")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
on_a_gpu = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_a_gpu)])
def test_the_same_scenario_agrees_on_fake_ranks_of_either_device(device, capsys) -> None:
    assert main(["validate", FILE, "--against", "fake", "--device", device, "--json"]) == 0
    names = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert names["peak memory, steady"]["detail"].startswith("exact")
    assert ("allocated memory, CUDA" in names) == (device == "cuda")


@without_gpu
@pytest.mark.parametrize(("arguments", "backend", "remedy"), [
    (["validate", FILE, "--device", "cuda"], "nccl", "use the backend gloo or fake here"),
    (["validate", FILE, "--against", "fake", "--device", "cuda"], "fake",
     "leave out the device, or make it cpu"),
    (["run", FILE, "--backend", "fake", "--device", "cuda"], "fake",
     "leave out the device, or make it cpu"),
])
def test_a_gpu_that_is_not_there_is_refused(arguments, backend, remedy, capsys) -> None:
    assert main(arguments) == 3
    assert capsys.readouterr().err.strip().endswith(
        f"backend {backend}: expected a CUDA device and a CUDA build of torch, found torch "
        f"{torch.__version__} without a device; {remedy}"
    )


@pytest.mark.parametrize(("arguments", "message"), [
    (["run", FILE, "--backend", "gloo", "--device", "cuda"],
     "--device: expected cpu, where gloo runs, found cuda; the backend nccl or fake"),
    (["run", FILE, "--device", "cpu"], "--device: expected a real backend, found sim"),
    (["run", FILE, "--device", "tpu"], "--device: expected cpu or cuda"),
    (["validate", FILE, "--launch", "srun {worker}", "--save", "x", "--against", "gloo",
      "--device", "cuda"],
     "--device: expected cpu, where gloo runs, found cuda; --against nccl"),
])
def test_a_device_that_a_backend_does_not_have_is_refused(arguments, message, capsys) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_python_has_the_same_choice() -> None:
    scenario = zsim.load(FILE)
    run = zsim.run(scenario, backend="fake", device="cpu")
    assert run.record.provenance["device"] == "cpu"
    assert run.ranks[0].cache is None
    with pytest.raises(ArgumentError, match='device: expected cpu or cuda, found "tpu"'):
        zsim.run(scenario, backend="fake", device="tpu")
    assert FakeBackend().on("cuda") == FakeBackend("cuda")
    for own in (GlooBackend(), NcclBackend()):
        assert own.on(own.device) is own
        assert real_run.REAL_BACKENDS[own.device] == own.name


def test_a_backend_of_others_without_that_choice_says_so(monkeypatch) -> None:
    class Foreign:
        name = "foreign"

    monkeypatch.setattr("zsim.runs.registry.find", lambda name, where: Foreign())
    with pytest.raises(ArgumentError, match="expected a backend whose devices can be chosen"):
        api.open_backend("foreign", RunOptions(device="cpu"))
