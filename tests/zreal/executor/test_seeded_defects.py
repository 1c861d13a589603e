"""Defects of our own engine that stay within every bound of peaks and of two-byte training are each
caught by an exact check."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.folders import PARITY
from tests.zreal.processes.rank_bodies import DEFECTS
from zreal.processes.launch import launch
from zsim.cli.main import main

pytestmark = [pytest.mark.gloo, pytest.mark.quality]

ZERO2, ZERO3 = (
    str(PARITY / f"{name}.toml") for name in ("zero2-llama-2-bf16", "zero3-llama-4-bf16")
)


def failed(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The checks that failed, with their words."""
    checks = json.loads(capsys.readouterr().out)["checks"]
    return {check["name"]: check["detail"] for check in checks if check["status"] == "failed"}


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Ranks on gloo have the defect that the test is given."""

    def start(target: str, arguments: dict[str, Any], **more: Any) -> list[Any]:
        assert target == "zreal.rank.run:launched_rank"
        return launch(
            "tests.zreal.processes.rank_bodies:with_defect", {**arguments, "defect": request.param},
            **more,
        )

    monkeypatch.setattr("zreal.processes.launch.launch", start)


@pytest.mark.slow
@pytest.mark.parametrize("seeded", ["missing free"], indirect=True)
def test_a_missing_free_fails_at_rest_on_gloo(
    seeded: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", ZERO3, "--json"]) == 1
    assert failed(capsys)["memory at rest"].startswith("0 of 20 exact; end of construction, rank "
                                                       "0: predicted ")


@pytest.mark.slow
@pytest.mark.parametrize("seeded", ["leak"], indirect=True)
def test_a_leak_of_every_step_is_called_that_on_gloo(
    seeded: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", ZERO2, "--json"]) == 1
    assert failed(capsys)["memory at rest"].startswith("rank 0, steady: a leak, the step ends "
                                                       "2,400 B higher than it began; ")


@pytest.mark.parametrize("defect", ["missing free", "leak"])
def test_what_is_not_freed_fails_at_rest_on_fake(
    defect: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    DEFECTS[defect](monkeypatch.setattr)
    assert main(["validate", ZERO3, "--against", "fake", "--json"]) == 1
    assert "memory at rest" in failed(capsys)


@pytest.mark.parametrize(
    ("seeded", "message"),
    [
        ("eager optimizer", "away from where torch's takes the same state and gradients"),
        ("rounded master", "away from the model's own"),
    ],
    indirect=["seeded"],
)
def test_what_two_bytes_would_pass_for_rounding_is_held_to_the_bit(
    seeded: None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", ZERO2, "--json"]) == 1
    assert message in failed(capsys)["numerics"]
