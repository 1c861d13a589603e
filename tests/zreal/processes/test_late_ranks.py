"""A rank that enters collectives late holds the others up, and changes no byte that they are
measured to hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.folders import PARITY
from zreal.processes.launch import launch
from zsim.cli.main import main

pytestmark = pytest.mark.gloo



@pytest.mark.parametrize(
    "name", ["zero-redundancy-mlp-2", pytest.param("ddp-mlp-2", marks=pytest.mark.slow)]
)
def test_bytes_are_the_same_where_one_rank_is_late(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """gloo holds a collective's tensors until all ranks were there and a moment longer:
    construction and the first step are seen once."""

    def with_a_late_one(target: str, arguments: dict[str, Any], **more: Any) -> list[Any]:
        assert target == "zreal.rank.run:launched_rank"
        return launch("tests.zreal.processes.rank_bodies:late", arguments, **more)

    monkeypatch.setattr("zreal.processes.launch.launch", with_a_late_one)
    assert main(["validate", str(PARITY / f"{name}.toml"), "--json"]) == 0

    checks = json.loads(capsys.readouterr().out)["checks"]
    memory = {
        check["name"]: check["detail"] for check in checks
        if check["name"].startswith("peak memory")
    }
    assert len(memory) == 3
    assert [detail for detail in memory.values() if not detail.startswith("exact")] == []
