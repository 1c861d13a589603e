"""Saved Runs that break a law are compared with nothing, and the law is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.folders import PARITY
from zsim.cli.main import main
from zsim.ir.run import Numerics, RankRun, RunRecord
from zsim.runs import saved
from zsim.runs.backend import RunOptions
from zsim.runs.compare.compare import compare
from zsim.runs.simulator import SimBackend
from zsim.scenario.scenario import load

SCENARIO = PARITY / "zero3-mlp-2-lookahead-0.toml"
NUMERICS = Numerics(
    losses=(1.0,), largest_relative_difference=0.0, largest_gradient_difference=0.0, steps=1,
    reference_losses=(1.0,),
)


@pytest.fixture(scope="module")
def whole() -> RunRecord:
    return SimBackend().run(load(SCENARIO), options=RunOptions())


def remembering(**levels: Any) -> Callable[[RankRun], RankRun]:
    """A change of a rank: other figures of its steady step's memory."""

    def change(rank: RankRun) -> RankRun:
        steady = rank.phases["steady"]
        return replace(
            rank,
            phases={
                **rank.phases, "steady": replace(steady, memory=replace(steady.memory, **levels))
            },
        )

    return change


def with_numerics(**more: Any) -> Callable[[RankRun], RankRun]:
    return lambda rank: replace(rank, numerics=replace(NUMERICS, **more))


@pytest.mark.quality
@pytest.mark.parametrize(("change", "breach"), [
    (remembering(end_bytes=2**40), "peaks are the highest points: rank 0: steady: a peak of"),
    (remembering(by_kind={"magic": 1}),
     "sizes are possible: rank 0: steady: memory of no known kind, magic"),
    (remembering(held={"gradients": 2**40}),
     "sizes are possible: rank 0: steady: 1,099,511,627,776 B held at a peak of"),
    (remembering(held={"gradients": -5}), "sizes are possible: rank 0: steady: -5 B of memory"),
    (remembering(timeline=(("here", -1),)), "sizes are possible: rank 0: steady: -1 B of memory"),
    (lambda rank: replace(rank, stands_for=-5),
     "real ranks stand for themselves: rank 0: stands for -5 ranks"),
    (with_numerics(),
     "numerics tell every step: rank 0: numerics of 1 steps, though there is a "
     "steady one after the first"),
    (with_numerics(steps=3),
     "numerics tell every step: rank 0: 1 losses and 1 of the reference for 3 steps"),
    (lambda rank: replace(rank, stands_for=1),
     "real ranks stand for themselves: rank 0: stands for 1 ranks, and is named for 2"),
])
def test_a_saved_run_that_breaks_a_law_is_compared_with_nothing(
    whole: RunRecord, change: Callable[[RankRun], RankRun], breach: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved.save(whole, tmp_path / "whole.json")
    saved.save(
        replace(whole, ranks=(change(whole.ranks[0]), *whole.ranks[1:])), tmp_path / "changed.json"
    )
    for files in (("whole.json", "changed.json"), ("changed.json", "whole.json")):
        assert main(["compare", *(str(tmp_path / name) for name in files)]) == 1
        said = capsys.readouterr().err
        assert (
            f"{tmp_path / 'changed.json'}: expected a run that obeys the laws of "
            f"zsim.ir.laws.run_laws, found "
            in said
        )
        assert breach in said


@pytest.mark.quality
def test_a_measured_rank_that_stands_for_another_is_refused(
    whole: RunRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved.save(whole, tmp_path / "whole.json")
    saved.save(replace(whole, backend="gloo", interpreter="executor"), tmp_path / "folded.json")
    assert main(["compare", str(tmp_path / "whole.json"), str(tmp_path / "folded.json")]) == 1
    assert (
        "real ranks stand for themselves: rank 0: run for real by the executor"
        in capsys.readouterr().err
    )


def test_a_run_that_is_complete_has_no_failure(
    whole: RunRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = replace(whole, failure="rank 1: killed")
    first = compare(whole, failed)[0]
    assert (first.name, first.detail) == ("complete", "the measured Run did not reach its end: "
                                                      "rank 1: killed")
    saved.save(failed, tmp_path / "failed.json")
    assert main(["compare", *[str(tmp_path / "failed.json")] * 2]) == 2
    assert "a failure in a Run that says it is complete" in capsys.readouterr().err
