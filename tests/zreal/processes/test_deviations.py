"""Ranks that issue other collectives than the Program has are blamed, and no others."""

from __future__ import annotations

import pytest

from tests.support.folders import PARITY
from zreal.backends import GlooBackend
from zreal.processes.launch import launch
from zreal.processes.reports.failure_report import LaunchError
from zreal.rank import run as rank_run
from zsim.runs.backend import RunOptions
from zsim.runs.launch.planned_collectives import number_of, planned_collectives, without_number
from zsim.scenario.scenario import load

pytestmark = pytest.mark.gloo

BODIES = "tests.zreal.processes.rank_bodies"
FAR_S = 600.0
"""Timeout that no launch here reaches."""


@pytest.mark.parametrize(
    ("how", "where", "cause"),
    [
        ("aborted", "rank 0", ""),
        ("raised in torch", "rank 0", "; rank 1: ValueError: Default process group has not been "
                                      "initialized"),
        ("raised", "rank 1", "ValueError: a wrong shard"),
    ],
)
def test_a_rank_that_sent_more_than_the_program_has_is_blamed_for_what_torch_and_gloo_refuse(
    how: str, where: str, cause: str
) -> None:
    with pytest.raises(LaunchError) as error:
        launch(
            f"{BODIES}:sending_more", {"how": how}, world_size=2, timeout_s=FAR_S,
            program=lambda rank, number: (
                f"{('all_gather', 'reduce_scatter')[number]} of 64 B over dp_shard"
            ),
        )

    assert error.value.where == where
    assert cause in error.value.found
    report = (
        "rank 0 entered all_gather #0 of 128 B over dp_shard, where the Program has all_gather of "
        "64 B over dp_shard; ranks [1] at all_gather #0 of 64 B over dp_shard; ranks [0] at "
        "reduce_scatter #1 of 64 B over dp_shard"
    )
    assert (report in error.value.found) == (where == "rank 0")


@pytest.mark.parametrize(
    "name", ["ddp-mlp-2", "zero3-mlp-2-lookahead-0", "hsdp-mlp-2x2"]
)
def test_ranks_without_a_fault_announce_what_the_program_has(name: str) -> None:
    """Else they would be blamed for the failure of another rank."""
    scenario = load(PARITY / f"{name}.toml")
    interpreter = rank_run.interpreter_of(scenario, None)
    arguments = GlooBackend()._rank_arguments(scenario, interpreter, RunOptions(timeout_s=FAR_S))
    ranks = launch(
        f"{BODIES}:announced", {**arguments, "numerics": "full"},
        world_size=scenario.world_size, timeout_s=FAR_S,
    )

    planned = planned_collectives(scenario, "cpu")
    for rank, texts in enumerate(ranks):
        issued = [text for text in texts if number_of(text) >= 0]
        assert [number_of(text) for text in issued] == list(range(len(issued)))
        known = [text for number in range(len(issued)) if (text := planned(rank, number))]
        assert known == [without_number(text) for text in issued][: len(known)]
        assert len(known) >= 4
    assert not any(planned(0, number) for number in (-1, 1000))
