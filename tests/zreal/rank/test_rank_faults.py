"""The faults of a scenario on real ranks over gloo: applied where the Program has them, named, and
agreeing with nothing."""

from __future__ import annotations

import gc
import random
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zsim
from tests.support.folders import PARITY, SCENARIOS
from zreal import torch_private, worker
from zreal.rank.faults import RankFaults, done, number_in_run
from zsim.cli.main import main
from zsim.engine.faults.fault import FailingRank, SkippedCollective
from zsim.errors import BackendUnavailableError, DeadlockError, ScenarioError
from zsim.ir.ops import COLLECTIVES
from zsim.ir.run import IncompleteRunError
from zsim.scenario.plan import plan

MLP = zsim.load(PARITY / "fsdp2-mlp-2.toml")


def failing(fault: dict[str, Any], name: str = "fsdp2-mlp-2") -> IncompleteRunError:
    with pytest.raises(IncompleteRunError) as caught:
        zsim.run(
            zsim.load(PARITY / f"{name}.toml").with_(faults=[fault]), backend="gloo", timeout_s=60,
            numerics="none",
        )
    assert caught.value.run.faults
    assert caught.value.remedy.startswith(f"the scenario's faults are {fault['kind']}: rank ")
    return caught.value


@pytest.mark.gloo
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_in_a_step_is_named_with_the_steps_before(rank: int) -> None:
    error = failing({"kind": "failure", "rank": rank, "at": "backward blocks.1"})
    assert error.where == f"rank {rank}"
    assert "exited with code 86" in error.found
    assert {*error.run.ranks[rank].phases} == {"construction", "first"}


@pytest.mark.gloo
def test_a_rank_fails_after_its_last_collective_too() -> None:
    assert failing({"kind": "failure", "rank": 1, "at": "optimizer root"}).where == "rank 1"


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "at"),
    [("fsdp2-mlp-2", "reduce_scatter root"), ("zero2-mlp-2", "reduce_scatter root")],
)
def test_a_skipped_collective_is_blamed_on_its_rank(name: str, at: str) -> None:
    """gloo ends the rank that awaits less, and not the one at fault."""
    error = failing({"kind": "skipped_collective", "rank": 1, "at": at}, name)
    assert error.where == "rank 1"
    assert ", where the Program has " in error.found


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["zero3-mlp-4-failure", "fsdp2-mlp-2-skipped-reduce-scatter"])
def test_a_step_that_is_meant_not_to_end_is_validated(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(SCENARIOS / f"faults/{name}.toml")
    saved = ["--save", str(tmp_path), "--trace", str(tmp_path / "trace.json")]
    assert main(["validate", file, "--no-calibrate", "--timeout", "60", *saved]) == 0
    told = capsys.readouterr()
    lines = [" ".join(line.split()) for line in told.out.splitlines()]
    assert lines[1] == "expect.ends false expected, false predicted, false measured"
    assert lines[4].startswith("complete neither Run reaches its end; at fault rank ")
    assert lines[-1].startswith(
        "WITH FAULTS, alike in order and bytes; memory not checked: a Run did not reach its end; "
    )
    assert f"note: {name}: no trace is written, as the step does not end\n" in told.err
    sides = [str(tmp_path / f"{name}.{side}.json") for side in ("predicted", "measured")]
    assert main(["compare", *sides]) == 0


@pytest.mark.slow
@pytest.mark.gloo
def test_random_faults_end_real_ranks_and_simulated_ones_alike_and_both_name_the_rank() -> None:
    """Five minutes; all 60 on 2026-11-26."""
    dice = random.Random(20261126)
    names = (
        "fsdp2-mlp-2", "ddp-mlp-2", "zero3-mlp-2-lookahead-0", "zero2-mlp-2", "fsdp2-mlp-4",
        "zero3-mlp-4", "hsdp-mlp-2x2", "fsdp1-mlp-2",
    )
    for _ in range(60):
        scenario = zsim.load(PARITY / f"{dice.choice(names)}.toml")
        program, rank = plan(scenario, device="cpu"), dice.randrange(scenario.world_size)
        kind = dice.choice(("failure", "skipped_collective", "skipped_collective"))
        ops = [
            op for op in program.of_rank(rank).steady if kind == "failure" or
            (op.kind in COLLECTIVES and program.mesh.size(op.group) > 1)
        ]
        op = dice.choice(ops)
        fault = {"kind": kind, "rank": rank, "at": f"{op.kind} {op.unit}"}
        with pytest.raises(DeadlockError) as simulated:
            zsim.simulate(scenario.with_(faults=[fault]))
        assert simulated.value.where.partition(",")[0] == f"rank {rank}"
        assert failing(fault, scenario.name).where == f"rank {rank}"


@pytest.mark.gloo
def test_a_late_rank_makes_the_step_of_every_rank_longer_and_nothing_agrees() -> None:
    fault = {"kind": "late_start", "rank": 1, "by": "80 ms"}
    comparison = zsim.validate(zsim.load(PARITY / "ddp-mlp-2.toml").with_(faults=[fault]))
    assert min(rank.step_time_ns or 0 for rank in comparison.measured.ranks) >= 70_000_000
    assert comparison.ok
    assert not comparison.agrees
    assert str(comparison.agreement).startswith("WITH FAULTS, alike in order, bytes, memory and ")
    assert comparison.measured.faults == ("late_start: rank 1, by 80.000 ms",)
    late = comparison.measured.late[0]
    assert late.rank == comparison.predicted.late[0].rank == 1
    assert late.held_up_ns >= 60_000_000
    assert "most held up by rank 1 predicted, held up by rank 1 measured" in str(comparison)


def test_a_slow_rank_sleeps_for_as_long_as_its_own_work_would_take_more() -> None:
    slow = MLP.with_(faults=[{"kind": "slow_rank", "rank": 0, "factor": 3.0}])

    def step() -> None:
        began = time.thread_time()
        while time.thread_time() - began < 0.05:
            pass

    began = time.monotonic()
    RankFaults(slow, rank=0, device="cpu").slowed(step)()
    assert time.monotonic() - began >= 0.15
    assert RankFaults(slow, rank=1, device="cpu").slowed(step) is step


def test_numbers_count_from_construction_to_the_second_step() -> None:
    program = plan(MLP, device="cpu")
    own = program.of_rank(1)
    before = sum(
        op.kind in ("all_gather", "reduce_scatter")
        for op in (*own.construction, *own.first, *own.second)
    )
    first = SkippedCollective(rank=1, at="all_gather root")
    assert number_in_run(program, first, key="") == before
    last = FailingRank(rank=1, at="optimizer root")
    steady = sum(op.kind in ("all_gather", "reduce_scatter") for op in own.steady)
    assert number_in_run(program, last, key="") == before + steady


def test_what_is_not_issued_is_not_announced_and_later_ones_move_up() -> None:
    scenario = MLP.with_(
        faults=[{"kind": "skipped_collective", "rank": 1, "at": "all_gather root"}]
    )
    skipped = SkippedCollective(rank=1, at="all_gather root")
    number = number_in_run(plan(scenario, device="cpu"), skipped, key="")
    told: list[str] = []
    announce = RankFaults(scenario, rank=1, device="cpu").announced(told.append)
    for each in range(number - 1, number + 2):
        announce(f"all_gather #{each} of 8 B over dp_shard")
    assert told == [f"all_gather #{each} of 8 B over dp_shard" for each in (number - 1, number)]
    assert RankFaults(scenario, rank=0, device="cpu").announced(told.append) == told.append


def test_the_work_of_nobody_has_ended_and_changes_nothing() -> None:
    tensor = torch.arange(4.0)
    assert done([tensor]).is_completed()
    assert torch.equal(tensor, torch.arange(4.0))


def test_watchers_of_collectives_can_watch_inside_one_another() -> None:
    seen: list[str] = []

    def watching(name: str) -> Any:
        def watch(_: str, __: Any, call: Any) -> Any:
            seen.append(name)
            return call()

        return watch

    names = ("c10d::allreduce_",)
    with torch_private.fake_group(rank=0, world_size=2):
        for inside in (False, True, False):
            with torch_private.c10d_calls(names, watching("outer")):
                if inside:
                    with torch_private.c10d_calls(names, watching("inner")):
                        dist.all_reduce(torch.zeros(1))
                dist.all_reduce(torch.zeros(1))
            seen.append("|")
        dist.all_reduce(torch.zeros(1))
    assert seen == ["outer", "|", "inner", "outer", "outer", "|", "outer", "|"]


def test_a_watched_collective_lets_its_tensors_go_at_once() -> None:
    names = ("c10d::allreduce_",)
    gc.disable()
    try:
        with (
            torch_private.fake_group(rank=0, world_size=2),
            torch_private.c10d_calls(names, lambda _, __, call: call()),
        ):
            tensor = torch.zeros(1)
            dist.all_reduce(tensor)
            held = weakref.ref(tensor)
            del tensor
            assert held() is None
    finally:
        gc.enable()


def test_faults_at_no_op_and_faults_of_a_launchers_ranks_are_refused(tmp_path: Path) -> None:
    misspelt = MLP.with_(faults=[{"kind": "failure", "rank": 0, "at": "optimizer rot"}])
    with pytest.raises(ScenarioError, match="did you mean optimizer root"):
        zsim.run(misspelt, backend="gloo")
    file = tmp_path / "slow.toml"
    file.write_text(
        MLP.with_(faults=[{"kind": "slow_rank", "rank": 0, "factor": 2.0}]).to_toml()
    )
    with pytest.raises(BackendUnavailableError, match="a fault that ranks of zreal.worker can"):
        worker.main([str(file), "--results", str(tmp_path)])
