"""Faults of ranks that torchrun starts, and of the port, the disk and the controller around them.

`python -m tests.measured.faults` has the whole matrix, and tests/measured/faults.json its result.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.measured.launched_faults import (
    CONTROLLERS,
    LAUNCHERS,
    controller_ended,
    fail_launched,
    full_disk_of_the_controller,
    port_taken,
)
from tests.support.faulty.faults import FULL_DISK, Fault
from tests.support.folders import PARITY, ROOT
from zsim.scenario.scenario import load

pytestmark = pytest.mark.gloo

NAME = "fsdp2-mlp-2"
LIMIT_S = 40.0


@pytest.mark.parametrize(("kind", "found"), [
    ("other shape", "all_gather #5 of 66,816 B over dp_shard; the Program has all_gather of "
                    "33,408 B over dp_shard"),
    pytest.param("stopped", "was stopped (as by SIGSTOP or a debugger), and was ended",
                 marks=pytest.mark.slow),
    pytest.param("SIGKILL", "Signal 9 (SIGKILL)", marks=pytest.mark.slow),
    pytest.param("hang inside", "in asleep", marks=pytest.mark.slow),
    pytest.param(FULL_DISK, "rank-1.json: expected room for ", marks=pytest.mark.slow),
])
def test_the_rank_at_fault_is_named_under_torchrun(kind: str, found: str, tmp_path: Path) -> None:
    row = fail_launched(
        load(PARITY / f"{NAME}.toml"), Fault(kind=kind, rank=1), folder=tmp_path / "run",
        limit_s=LIMIT_S,
    )
    assert (row["left"], row["marked"]) == (0, True)
    assert row["blamed"] == "rank 1"
    assert found in row["found"]
    assert all("construction" in phases for phases in row["kept"])


@pytest.mark.slow
def test_a_port_that_another_process_has_is_named(tmp_path: Path) -> None:
    row = port_taken(load(PARITY / f"{NAME}.toml"), folder=tmp_path / "run", limit_s=LIMIT_S)
    assert row["right"]
    assert row["left"] == 0


@pytest.mark.slow
def test_a_full_disk_leaves_the_verdict_and_no_half_file(tmp_path: Path) -> None:
    row = full_disk_of_the_controller(NAME, folder=tmp_path)
    assert (row["right"], row["kept"], row["half_files"], row["exit"]) == (
        True, ["the verdict"], 0, 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("kind", CONTROLLERS)
def test_nothing_is_left_when_the_controller_ends(launcher: str, kind: str, tmp_path: Path) -> None:
    row = controller_ended(NAME, kind, launcher, folder=tmp_path / "run")
    assert row["right"]
    assert row["left"] == 0
    assert row["marked"]
    if kind == "controller SIGTERM" or launcher == "torchrun":
        assert row["kept"]
        assert all("construction" in phases for phases in row["kept"])


def test_the_recorded_runs_name_the_rank_at_fault_and_leave_nothing() -> None:
    record = json.loads((ROOT / "tests/measured/faults.json").read_text())
    launched, around = record["launched"]["rows"], record["around"]["rows"]
    assert (len(launched), len(around)) == (48, 14)
    for row in (*launched, *around):
        assert (row["left"], row["right"], row.get("marked", True)) == (0, True, True), row
