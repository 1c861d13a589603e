"""Partial Runs: when a rank of a real gloo run fails, what all ranks had ended until then is kept.
Such a Run is marked incomplete, and never agrees."""

from __future__ import annotations

import json
import multiprocessing
from typing import Any, cast

import pytest

from tests.support.folders import PARITY
from tests.zreal.conftest import TimeOutWhen
from zreal.backends import GlooBackend
from zreal.processes import launch
from zreal.processes.progress import Progress
from zreal.processes.rank_status import REFERENCE, TIMED, RankStatus, phase
from zsim.cli.main import main
from zsim.runs import saved
from zsim.runs.backend import RunOptions
from zsim.scenario.scenario import load

pytestmark = pytest.mark.gloo

SCENARIO = str(PARITY / "fsdp2-mlp-2.toml")
TIMEOUT = "400"
"""Seconds, which no run here takes."""
CAUSES = {
    "killed": "rank 1: expected every rank to finish, found killed by SIGKILL",
    "raised": "rank 1: expected every rank to finish, found ValueError: a wrong shard",
    "absent": "rank 1: expected every rank to finish within 400 s, found a hang: ranks [1] at "
              "all_gather #1",
}


def one_waits_for_the_other(ranks: list[RankStatus]) -> bool:
    """Rank 0 is at the third collective of its first step, rank 1 stays at the second, and for long
    enough that neither gets on."""
    ahead, behind = ranks
    return (
        "all_gather #2" in ahead.last_collective
        and "all_gather #1" in behind.last_collective
        and not (ahead.is_progressing or behind.is_progressing)
    )


@pytest.fixture(params=CAUSES)
def cause(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, time_out_when: TimeOutWhen
) -> str:
    """One way to fail; the ranks are real, with rank 1 failing inside its first step."""
    start = launch.launch
    if request.param == "absent":
        time_out_when(one_waits_for_the_other)

    def failing(target: str, arguments: dict[str, Any], **more: Any) -> list[Any]:
        assert target == "zreal.rank.run:launched_rank"
        job = {**arguments, "how": request.param}
        return start("tests.zreal.processes.rank_bodies:failing_in_the_first_step", job, **more)

    monkeypatch.setattr(launch, "launch", failing)
    return str(request.param)


def test_a_failed_run_is_saved_with_the_phases_that_had_ended_and_never_agrees(
    cause, tmp_path, capsys
):
    measured, predicted = tmp_path / "measured.json", tmp_path / "predicted.json"
    command = ["run", SCENARIO, "--backend", "gloo", "--timeout", TIMEOUT, "--save", str(measured)]

    assert main(command) == 1

    said = capsys.readouterr().err
    assert CAUSES[cause] in said
    assert "all_gather #1 of " in said  # the last that rank 1 entered
    assert f"phases that ranks had ended are in {measured}, marked incomplete" in said
    run = saved.load(measured)
    assert (run.complete, run.world_size, run.backend) == (False, 2, "gloo")
    assert run.failure.split(";")[0] in said
    assert [(rank.rank, list(rank.phases)) for rank in run.ranks] == [
        (0, ["construction"]), (1, ["construction"])
    ]
    assert run.ranks[1].phases["construction"].memory.peak_bytes > 0

    assert main(["run", SCENARIO, "--save", str(predicted)]) == 0
    capsys.readouterr()
    assert main(["compare", str(predicted), str(measured), "--json"]) == 1

    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["complete"]["status"] == "failed"
    assert checks["complete"]["detail"].startswith("the measured Run did not reach its end: rank ")


@pytest.mark.parametrize("cause", ["raised"], indirect=True)
def test_validate_keeps_the_failed_run_and_says_so(cause, tmp_path, capsys):
    command = ["validate", SCENARIO, "--timeout", TIMEOUT, "--save", str(tmp_path), "--json"]

    assert main(command) == 1

    answer = json.loads(capsys.readouterr().out)
    assert CAUSES[cause] in answer["error"][0]
    assert saved.load(tmp_path / "fsdp2-mlp-2.measured.json").complete is False


def test_a_run_tells_construction_steps_and_what_follows_in_order() -> None:
    told: list[str] = []
    GlooBackend().run(load(SCENARIO), options=RunOptions(progress=told.append))
    after = ("the single-process reference, then warm-up and timed steps", TIMED)
    phases = ["construction", *(f"step {step} of 5" for step in range(1, 6)), *after]
    order = [phases.index(text.removeprefix("fsdp2-mlp-2: ")) for text in told]
    steps = [number for number in order if number < 6]
    assert steps == sorted(set(steps)) != []  # a short phase may pass between two looks


def test_the_phase_of_a_run_is_that_of_the_rank_furthest_behind() -> None:
    def rank(num_parts: int, last: str = "all_gather #1", *, done: bool = False) -> RankStatus:
        progress = Progress(multiprocessing)
        progress.announce(last)
        return RankStatus(
            rank=0, process=None, pipe=cast(Any, None), progress=progress, num_parts=num_parts,
            done=done,
        )

    assert phase([rank(0), rank(1)], 5) == "construction"
    assert phase([rank(2), rank(1)], 5) == "step 1 of 5"
    assert phase([rank(6, REFERENCE)], 5) == "the single-process reference, then " + TIMED
    assert phase([rank(6), rank(6, done=True)], 5) == TIMED
    assert phase([rank(6, done=True)], 5) == ""
