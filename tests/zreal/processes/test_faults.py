"""Every kind of fault of one rank of a real run: the rank is named, and nothing is left running.

`python -m tests.measured.faults` has the whole matrix, and tests/measured/faults.json its result.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.measured.faults import KINDS, fail, left_over, ports_grabbed
from tests.support.faulty.faults import CHANGES, Fault
from tests.support.folders import PARITY
from tests.zreal.conftest import TimeOutWhen
from zreal.processes import rank_status
from zsim.scenario.scenario import load

pytestmark = pytest.mark.gloo

LIMIT_S = 600.0
"""Seconds that no run here takes; a run that hangs is over once nobody enters a collective."""
HANGS = ("hang before", "hang inside", "stopped", "other op")
QUIET_S = 0.5
"""Seconds after which a rank that has entered no collective is taken to hang."""
NAMED = {
    "SIGKILL": "killed by SIGKILL", "exception": "ValueError: a wrong shard",
    "exit(3)": "exited with code 3", "sys.exit(3)": "SystemExit: 3", "hang inside": "a hang: ",
    "out of memory": "can't allocate memory",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_named_and_what_there_is_is_kept(
    kind: str, tmp_path: Path, time_out_when: TimeOutWhen, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(kind=kind, rank=1, stamp=str(tmp_path / "moment"))
    if kind in HANGS:
        monkeypatch.setattr(rank_status, "RECENT_S", QUIET_S)
        stamp = Path(fault.stamp)
        time_out_when(
            lambda ranks: stamp.exists() and not any(rank.is_progressing for rank in ranks)
        )
    row = fail(load(PARITY / "fsdp2-mlp-2.toml"), fault, limit_s=LIMIT_S)
    assert row["marked"]
    assert len(row["kept"]) <= 2
    assert left_over() == []
    assert NAMED.get(kind, "") in row["found"]
    assert row["blamed"] == "rank 1"
    if kind in CHANGES:
        assert "rank 1 entered all_gather #5 of 66,816 B over dp_shard, where the Program has " in (
            row["found"]
        )


def test_no_launch_fails_beside_a_process_that_takes_ports(tmp_path: Path) -> None:
    row = ports_grabbed(2, folder=tmp_path / "run", launches=5)
    assert (row["blamed"], row["right"], row["left"]) == ("", True, 0)


def test_the_recorded_runs_blame_the_rank_at_fault_and_leave_nothing() -> None:
    """The Program does not tell the dtype of DDP's own broadcast of sizes, whose int64 has as many
    bytes as float64."""
    record = json.loads((Path(__file__).parents[2] / "measured/faults.json").read_text())
    assert (len(record["matrix"]["rows"]), len(record["random"]["rows"])) == (44, 200)
    limit_s = record["matrix"]["limit_s"]
    for row in (*record["matrix"]["rows"], *record["random"]["rows"]):
        assert row["left"] == 0
        is_told = not (row["kind"] == "other dtype" and row["at"] == 1 and "ddp" in row["scenario"])
        assert row["right"] or not is_told
        assert row["by"] == "comparison" or row["marked"]
        assert row["verdict_s"] < (limit_s + 3 if row["at_the_limit"] else 3)
