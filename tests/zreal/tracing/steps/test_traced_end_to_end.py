"""Traces of real modules through everything that a scenario can be asked: a Run, its memory's
reasons, advice, fit, time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zreal.tracing.user_modules import CASES
from zreal.tracing.trace import trace
from zsim.autograd.traced.traced_file import save
from zsim.cli.main import main
from zsim.models.training_options import Device

SCENARIO = """
model = {{ traced = "mine.json" }}
batch = {{ micro_batch = {micro_batch}, sequence_length = {length} }}
cluster = {{ {cluster} }}
strategy = {{ name = "fsdp2" }}
precision = {{ parameters = "bf16", reduce = "fp32" }}
"""
CLUSTERS: dict[Device, str] = {
    "cpu": 'preset = "cpu-gloo", ranks = 2', "cuda": 'preset = "dgx-h100"'
}
QUICK = ("llama", "gpt2")
NAMES = [name for name, case in CASES.items() if "bfloat16" in case.dtypes]


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), "cuda"])
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
)
def test_whatever_was_traced_is_simulated_explained_and_fitted(
    name: str, device: Device, tmp_path: Path, capsys: object
) -> None:
    """Operators on integers, booleans and complex numbers among them, for which devices have no
    rate."""
    case = CASES[name]
    model = trace(case.make, case.data(), units=case.all_units, dtype="bfloat16", device=device)
    save(model, tmp_path / "mine.json")
    batch = {"micro_batch": model.batch.micro_batch, "length": model.batch.sequence_length}
    (tmp_path / "s.toml").write_text(SCENARIO.format(cluster=CLUSTERS[device], **batch))
    for command in (["run"], ["show", "--memory", "--time"], ["fit"]):
        assert main([command[0], str(tmp_path / "s.toml"), *command[1:]]) == 0


def test_some_of_them_compute_on_integers() -> None:
    case = CASES["llama"]
    model = trace(case.make, case.data(), units=case.all_units, dtype="bfloat16", device="cuda")
    assert "int64" in {
        kernel.dtype for module in model.lowered for kernel in module.forward.kernels
    }
