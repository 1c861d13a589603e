"""Last words of a rank that a launcher started, about its place in the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.folders import PARITY
from zreal import worker
from zreal.cluster.launcher import launched_rank
from zsim.runs import saved
from zsim.runs.launch.launched_failure import OUTSIDE
from zsim.scenario.scenario import load

TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_rank_that_already_fails_by_itself_hangs_nowhere(
    has_failed: bool, tmp_path: Path
) -> None:
    """The main thread may be in linecache then, for the traceback: that blamed it for a hang."""
    run = worker.WorkerRun(
        load(PARITY / "fsdp2-mlp-2.toml"), launched_rank(TORCHRUN), "cpu", "observer", tmp_path
    )
    run.has_failed = has_failed
    worker._say(run, "no end within 25 s: a hang")
    [file] = tmp_path.glob("*.json")
    told = saved.load(file).provenance
    assert (OUTSIDE in told) == (not has_failed)
