"""A real profile of torch's own training, imported: its collectives are the simulator's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.folders import PARITY
from zreal.processes import launch
from zsim.cli.main import main
from zsim.ir.ops import COLLECTIVES
from zsim.runs import saved

pytestmark = pytest.mark.gloo
TIMES = ("step time", "exposed communication", "time by unit")


def profiles(name: str, folder: Path, *, shapes: bool = True) -> list[str]:
    job = {"scenario": str(PARITY / f"{name}.toml"), "folder": str(folder), "shapes": shapes}
    return launch.launch("tests.zreal.profiled_ranks:profiled", job, world_size=2, timeout_s=300)


@pytest.mark.parametrize("name", ["fsdp2-mlp-2", "ddp-mlp-2"])
def test_a_profile_becomes_a_run_that_is_compared(name: str, tmp_path: Path, capsys) -> None:
    scenario, measured = str(PARITY / f"{name}.toml"), tmp_path / "measured.json"
    traces = profiles(name, tmp_path)
    asked = ["import", "kineto", *traces, "--scenario", scenario, "--save", str(measured)]
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["ranks"]
    assert [rank["rank"] for rank in told] == [0, 1]
    for rank in told:
        assert sum(rank["time_by_unit_ns"].values()) == rank["recorded_step_ns"]
        assert 0 < rank["exposed_communication_ns"] <= rank["communication_ns"]
        assert 0 < rank["compute_ns"] < rank["recorded_step_ns"]

    predicted = tmp_path / "predicted.json"
    assert main(["run", scenario, "--all-ranks", "--save", str(predicted)]) == 0
    capsys.readouterr()
    ended = main(["compare", str(predicted), str(measured), "--json"])
    compared = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in compared["checks"]}
    times = {checks.pop(name)["status"] for name in TIMES if name in checks}
    # a profiled step beside other tests may take ten times as long as assumed constants say
    assert (ended == 0) is ("failed" not in times)
    assert {name for name, check in checks.items() if check["status"] == "ok"} == {
        "collective order", "bytes", "groups",
    }
    assert checks["collective order"]["measured"] > 0
    assert "kineto cannot see memory" in checks["peak memory, steady"]["detail"]
    assert not compared["agrees"]

    both = [saved.load(path).ranks[0].spans for path in (predicted, measured)]
    left, right = (
        [s.name for s in sorted(spans, key=lambda s: s.issued_ns) if s.kind in COLLECTIVES]
        for spans in both
    )
    assert left == right
    if name.startswith("fsdp2"):  # FSDP's annotations tell units
        forwards = [s.unit for s in both[1] if s.kind == "forward" and s.unit != "root"]
        assert list(dict.fromkeys(forwards)) == list(dict.fromkeys(
            s.unit for s in both[0] if s.kind == "forward" and s.unit != "root"
        ))
        backwards = {s.unit for s in both[1] if s.kind == "backward"}
        assert set(forwards) <= backwards


def test_a_profile_without_shapes_says_what_to_turn_on(tmp_path: Path, capsys) -> None:
    trace = profiles("ddp-mlp-2", tmp_path, shapes=False)[0]
    assert main(["import", "kineto", trace]) == 2
    assert "profile with record_shapes=True" in capsys.readouterr().err
