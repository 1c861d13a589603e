"""Scenarios with faults, simulated: the Run says so, names who came late, and agrees with none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zsim
from tests.support.folders import ROOT, SCENARIOS
from zsim import api
from zsim.cli.main import main
from zsim.cluster.testbed import layout
from zsim.errors import (
    ArgumentError,
    BackendUnavailableError,
    DeadlockError,
    RankError,
    ScenarioError,
)
from zsim.ir.run import IncompleteRunError, UnendedRunError, ranks_at_fault
from zsim.runs import fault_support, saved, unended
from zsim.runs.backend import Capabilities
from zsim.runs.compare.compare import compare

FSDP2 = zsim.load(SCENARIOS / "parity/fsdp2-gpt-4.toml")
CLEAN = zsim.simulate(FSDP2)
SLOW = {"kind": "slow_rank", "rank": 2, "factor": 1.5}


def faulty(*faults: dict[str, Any], of: zsim.Scenario = FSDP2) -> zsim.Run:
    return zsim.simulate(of.with_(faults=faults))


def test_a_slow_rank_is_blamed_by_arrival_and_not_by_the_time_of_its_collectives() -> None:
    run = faulty(SLOW)
    assert run.faults == ("slow_rank: rank 2, factor 1.5",)
    assert [(late.rank, late.last_at) for late in run.late] == [(2, 14)]
    assert run.late[0].collectives == 14
    assert run.step_time is not None
    assert CLEAN.step_time is not None
    assert 0 < run.late[0].held_up_ns <= run.step_time
    assert run.step_time > CLEAN.step_time
    waits = {
        rank.rank: sum(s.end_ns - s.issued_ns for s in rank.spans if s.kind == "all_gather")
        for rank in run.ranks
    }
    assert waits[2] < waits[0]  # the longest collectives are on ranks that wait


def test_a_late_rank_holds_up_its_first_collective_for_the_whole_time() -> None:
    run = faulty({"kind": "late_start", "rank": 1, "by": "2 ms"})
    assert [(late.rank, late.last_at, late.held_up_ns) for late in run.late] == [(1, 1, 2_000_000)]
    assert run.step_time == (CLEAN.step_time or 0) + 2_000_000


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "failure", "at": "backward blocks.1"},
        {"kind": "failure", "at": "optimizer root"},
        {"kind": "skipped_collective", "at": "all_gather blocks.1"},
        {"kind": "skipped_collective", "at": "reduce_scatter root"},
        {"kind": "reordered_collective", "at": "all_gather root"},
    ],
    ids=str,
)
@pytest.mark.parametrize("rank", [0, 3])
def test_a_step_that_cannot_end_names_the_rank_at_fault(fault: dict[str, Any], rank: int) -> None:
    with pytest.raises(DeadlockError) as caught:
        faulty(fault | {"rank": rank})
    error = caught.value
    assert error.where.partition(",")[0] == f"rank {rank}"
    if ", op " not in error.where:
        others = ", ".join(str(other) for other in range(4) if other != rank)
        assert f"found others or none, and a deadlock of ranks {others}:\n" in str(error)
    told = f"{fault['kind']}: rank {rank}, at {fault['at']}"
    assert error.remedy == f"the scenario's faults are {told}"


@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_ranks_the_one_that_leaves_its_program_is_blamed(rank: int) -> None:
    two = zsim.load(SCENARIOS / "parity/fsdp2-mlp-2.toml")
    with pytest.raises(DeadlockError) as caught:
        faulty({"kind": "skipped_collective", "rank": rank, "at": "all_gather root"}, of=two)
    assert caught.value.where.partition(",")[0] == f"rank {rank}"


def test_collectives_that_are_alike_are_mixed_up_and_the_run_says_it() -> None:
    run = faulty({"kind": "reordered_collective", "rank": 3, "at": "all_gather blocks.1"})
    assert run.faults == (
        "reordered_collective: rank 3, at all_gather blocks.1 (no rank notices, and its data are "
        "mixed up)",
    )
    assert run.step_time == CLEAN.step_time


HSDP = zsim.load(SCENARIOS / "published/hsdp-llama-3-8b-4x8-h100.toml")


LOST = {"kind": "lost_link", "node": 1, "nic": 3}


def test_a_lost_link_is_named_with_the_collective_that_needs_it() -> None:
    with pytest.raises(DeadlockError) as caught:
        faulty(LOST, of=HSDP)
    error = caught.value
    assert error.where == "lost_link: node 1, nic 3 (of rank 11)"
    assert error.expected.startswith("a network that carries the all_reduce of ")
    assert error.found.startswith("a lost link: ranks 3, 11, 19, 27 wait in it forever, from ")
    assert error.remedy == "the scenario's faults are lost_link: node 1, nic 3"


def test_a_lost_link_is_at_fault_even_beside_a_rank_that_would_fail() -> None:
    failure = {"kind": "failure", "rank": 5, "at": "optimizer root"}
    with pytest.raises(DeadlockError, match=r"^lost_link: node 1, nic 3 \(of rank 11\): "):
        faulty(failure, LOST, of=HSDP)


def test_commands_that_need_a_step_name_the_lost_link_and_memory_needs_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lost.toml"
    file.write_text(HSDP.with_(faults=[LOST], expect=None).to_toml())
    named = (
        "lost_link: node 1, nic 3 (of rank 11): expected a network that carries the all_reduce of "
        "blocks.31, "
    )
    remedy = "; leave the fault out for a step that ends\n"
    assert main(["show", str(file), "--memory"]) == 0
    shown = capsys.readouterr()
    assert f"warning: lost: changes are not simulated: {named}" in shown.err
    assert shown.err.endswith(remedy)
    assert "FITS" in shown.out
    assert main(["lint", str(file)]) == 1
    linted = capsys.readouterr().out
    assert linted.startswith(f"lost: not linted: {named}")
    assert linted.endswith(remedy)


def test_a_slow_link_makes_the_step_longer_and_ranks_over_it_no_later() -> None:
    slow = faulty({"kind": "slow_link", "node": 1, "nic": 3, "bandwidth": "10 Gbit/s"}, of=HSDP)
    clean = zsim.simulate(HSDP)
    assert (slow.step_time or 0) > (clean.step_time or 0)
    assert slow.faults == ("slow_link: node 1, nic 3, bandwidth 1.2 GB/s",)


@pytest.mark.parametrize("link", [
    {"kind": "lost_link"}, {"kind": "slow_link", "bandwidth": "10 Gbit/s"},
], ids=lambda link: link["kind"])
@pytest.mark.parametrize(("cluster", "node", "nic"), [
    ({"nodes": 1}, 0, 3),  # nobody leaves the node
    ({"nodes": 2, "ranks": 9}, 1, 5),  # no rank is next to that NIC
], ids=["one node", "no rank there"])
def test_a_fault_of_a_link_that_carries_nothing_is_told(
    link: dict[str, Any], cluster: dict[str, int], node: int, nic: int
) -> None:
    apart = zsim.Scenario(
        model={"preset": "mlp-tiny"}, batch={"micro_batch": 2}, strategy={"name": "fsdp2"},
        cluster={"preset": "dgx-h100", **cluster}, precision={"parameters": "bf16"},
    )
    run = faulty({**link, "node": node, "nic": nic}, of=apart)
    assert run.step_time == zsim.simulate(apart).step_time
    (warning,) = run.warnings
    assert warning.startswith(f"faults[0] ({link['kind']}: node {node}, nic {nic}")
    assert "does nothing: no collective goes over that link" in warning
    if cluster["nodes"] > 1:
        used = {**link, "node": 0, "nic": 0}
        try:
            assert not faulty(used, of=apart).warnings
        except DeadlockError:
            assert link["kind"] == "lost_link"


@pytest.mark.parametrize("order", [1, -1])
def test_a_fault_that_a_rank_never_comes_to_is_told(order: int) -> None:
    plan = [
        {"kind": "failure", "rank": 1, "at": "forward blocks.1"},
        {"kind": "failure", "rank": 1, "at": "backward blocks.0"},
        {"kind": "reordered_collective", "rank": 1, "at": "reduce_scatter blocks.1"},
        {"kind": "skipped_collective", "rank": 1, "at": "all_gather blocks.0"},
    ][::order]
    with pytest.raises(DeadlockError) as caught:
        faulty(*plan)
    told = caught.value.remedy.removeprefix("the scenario's faults are ").split("; ")
    never = " (never reached: its rank has ended before)"
    assert [never in each for each in told] == [False, True, True, False][::order]


def test_no_run_with_a_fault_agrees() -> None:
    slow = faulty(SLOW)
    for predicted, measured in ((CLEAN, slow), (slow, CLEAN)):
        differs = zsim.compare(predicted, measured)
        assert not differs.ok
        assert str(differs.agreement).startswith("DIFFERS: faults")
    same = zsim.compare(slow, slow)
    assert same.ok
    assert not same.agrees
    assert str(same.agreement).startswith("WITH FAULTS, alike in order, bytes and memory")
    checks = compare(slow.record, replace(slow.record, faults=()))
    assert checks[0].detail == "slow_rank: rank 2, factor 1.5 predicted, none measured"


def test_faults_are_saved_shown_and_in_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "slow.toml"
    file.write_text(FSDP2.with_(faults=[SLOW], expect=None).to_toml())
    assert main(["run", str(file), "--save", str(tmp_path / "run.json")]) == 0
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[1].startswith("step time with faults 31.9")
    assert lines[2] == "fault slow_rank: rank 2, factor 1.5"
    assert lines[3].startswith("held up by rank 2, last at 14 of 14 collectives, for 1.5")
    record = saved.load(tmp_path / "run.json")
    assert (record.faults, record.late) == (faulty(SLOW).faults, faulty(SLOW).late)
    assert main(["run", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["faults"] == ["slow_rank: rank 2, factor 1.5"]
    assert told["late"][0]["rank"] == 2
    assert "faults" not in CLEAN.to_dict()
    assert repr(faulty(SLOW)).endswith(", WITH FAULTS>")


def test_a_step_that_cannot_end_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "skip.toml"
    fault = {"kind": "skipped_collective", "rank": 1, "at": "all_gather blocks.1"}
    file.write_text(FSDP2.with_(faults=[fault]).to_toml())
    assert main(["run", str(file)]) == 1
    assert "zsim: rank 1, op " in capsys.readouterr().err


def test_the_command_line_tells_a_step_that_is_not_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "skip.toml"
    fault = {"kind": "skipped_collective", "rank": 1, "at": "all_gather blocks.1"}
    for rank, code in ((1, 0), (3, 1)):
        expect = {"ends": False, "at_fault": rank}
        file.write_text(FSDP2.with_(faults=[fault], expect=None).with_(expect=expect).to_toml())
        assert main(["run", str(file)]) == code
        text = capsys.readouterr().out
        assert "  the step does not end: rank 1, op " in text
        assert f"{'FAILED' if code else 'ok    '} at_fault: rank {rank}, found rank 1" in text
        assert main(["run", str(file), "--json"]) == code
        told = json.loads(capsys.readouterr().out)
        assert (told["ended"], told["ok"]) == (False, not code)
        assert told["faults"] == ["skipped_collective: rank 1, at all_gather blocks.1"]


def test_ranks_that_break_down_before_the_step_with_faults_are_not_what_is_meant() -> None:
    fault = {"kind": "failure", "rank": 0, "at": "optimizer root"}
    meant = FSDP2.with_(faults=[fault], expect=None).with_(expect={"ends": False})
    cause = RankError(where="rank 0", expected="every rank to finish", found="a broken torch")
    begun = replace(CLEAN.record, ranks=(replace(CLEAN.record.ranks[0], phases={}),))
    for record, known in ((CLEAN.record, True), (begun, False)):
        step = unended.expected(meant, IncompleteRunError(cause, record), backend="gloo")
        assert (step is not None) is known
    assert unended.expected(meant, cause, backend="gloo") is None


ENDED = SCENARIOS / "faults/zero3-mlp-4-failure.toml"


def test_what_a_step_that_does_not_end_leaves_is_saved_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, trace = tmp_path / "run.json", tmp_path / "run.trace.json"
    assert main(["run", str(ENDED), "--save", str(file), "--trace", str(trace)]) == 0
    told = capsys.readouterr()
    assert f"; phases that ranks had ended are in {file}, marked incomplete\n" in told.out
    name = "zero3-mlp-4-failure"
    assert told.err == f"note: {name}: no trace is written, as the step does not end\n"
    assert not trace.exists()
    record = zsim.load_run(file)
    assert (record.complete, ranks_at_fault(record)) == (False, (2,))
    assert record.failure.startswith("rank 2: expected the ops that the Program has")
    assert record.faults == ("failure: rank 2, at backward blocks.1",)
    clean = zsim.simulate(zsim.load(ENDED).with_(faults=None, expect=None))
    assert record.representatives == clean.record.representatives
    for rank, whole in zip(record.ranks, clean.ranks, strict=True):
        assert (rank.rank, rank.stands_for) == (whole.rank, whole.stands_for)
        assert rank.phases == {
            name: phase for name, phase in whole.phases.items() if name != "steady"
        }


@pytest.mark.parametrize(
    "options", [{"ranks": (1, 3)}, {"all_ranks": True}], ids=["some ranks", "all ranks"]
)
def test_the_ranks_that_are_asked_for_are_kept_of_a_step_that_does_not_end(
    options: dict[str, Any]
) -> None:
    with pytest.raises(UnendedRunError) as caught:
        zsim.simulate(zsim.load(ENDED), **options)
    run = caught.value.run
    assert [rank.rank for rank in run.ranks] == [*options.get("ranks", range(4))]
    assert all(rank.stands_for == 1 for rank in run.ranks)


def ended_by(rank: int, *, backend: str = "gloo") -> IncompleteRunError:
    """The error of real ranks that end as those of `ENDED`, with another rank at fault."""
    with pytest.raises(UnendedRunError) as caught:
        zsim.simulate(zsim.load(ENDED), all_ranks=True)
    error = RankError(where=f"rank {rank}", expected="steps", found="exited with code 86")
    record = replace(
        caught.value.run, backend=backend, interpreter="executor", failure=str(error),
    )
    return IncompleteRunError(error, record)


@pytest.mark.parametrize("rank", [2, 0])
def test_ends_of_a_step_simulated_and_real_are_compared_and_held_to_what_is_expected(
    rank: int
) -> None:
    capabilities = Capabilities(memory=True, numerics=True, time=False, device="cpu")
    comparison = api.compare_with_simulation(zsim.load(ENDED), ended_by(rank).run, capabilities)
    assert comparison.ok is (rank == 2)
    told = {check.name: check for check in comparison.checks}
    assert told["expect.ends"].detail == "false expected, false predicted, false measured"
    assert told["expect.at_fault"].detail == (
        f"rank 2 expected, rank 2 predicted, rank {rank} measured"
    )
    who = "rank 2" if rank == 2 else "rank 2 predicted, rank 0 measured"
    first, predicted, *_, measured = told["complete"].detail.splitlines()
    assert first == f"neither Run reaches its end; at fault {who}"
    assert predicted.startswith("predicted: rank 2: expected the ops that the Program has")
    assert measured == f"measured: rank {rank}: expected steps, found exited with code 86"
    assert told["collective order"].status == "ok"
    verdict = "DIFFERS: expect.at_fault and complete" if rank != 2 else "WITH FAULTS, alike in"
    assert str(comparison.agreement).startswith(verdict)
    assert not comparison.agrees


def test_a_step_that_ends_for_real_alone_is_not_what_is_expected() -> None:
    measured = zsim.simulate(zsim.load(ENDED).with_(faults=None, expect=None), all_ranks=True)
    record = replace(measured.record, faults=("failure: rank 2, at backward blocks.1",))
    capabilities = Capabilities(memory=True, numerics=False, time=False, device="cpu")
    comparison = api.compare_with_simulation(zsim.load(ENDED), record, capabilities)
    assert comparison.agreement.failed == ("expect.ends", "expect.at_fault", "complete")
    assert comparison.checks[0].detail == "false expected, false predicted, true measured"


TWO = zsim.load(SCENARIOS / "parity/fsdp2-mlp-2.toml").with_(cluster={"ranks": None, "nodes": 2})
SLOW_LINK = {"kind": "slow_link", "node": 1, "nic": 0, "bandwidth": "100 Mbit/s"}


def test_a_slow_link_is_one_on_the_testbed() -> None:
    slow = fault_support.on_testbed(TWO.with_(faults=[SLOW_LINK]), layout("2x1gbit"))
    assert slow.rates == (10**9, 10**8)
    plain = layout("2x1gbit")
    assert fault_support.on_testbed(TWO, plain) == plain


@pytest.mark.parametrize(("cluster", "testbed", "told"), [
    ({"nodes": 2}, "2x50mbit", "expected a slower link than on 2x50mbit, found slow_link: node 1"),
    ({"nodes": 2}, "2x1x1gbit/1gbit", r"found one of ranks \[1\], on 2x1x1gbit/1gbit"),
    ({"preset": "pcie-box", "nodes": 2, "ranks": 10}, "10x1gbit", r"found one of ranks \[8, 9\], "),
])
def test_a_slow_link_that_no_host_has_is_refused(
    cluster: dict[str, Any], testbed: str, told: str
) -> None:
    scenario = TWO.with_(cluster=cluster, strategy={"dp_shard": None}, faults=[SLOW_LINK])
    with pytest.raises(BackendUnavailableError, match=told):
        fault_support.on_testbed(scenario, layout(testbed))


@pytest.mark.parametrize("backend", ["fake", "gloo"])
def test_faults_that_real_ranks_cannot_have_are_refused_by_name(backend: str) -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        zsim.run(FSDP2.with_(faults=[SLOW, {"kind": "jitter", "mean": "1 ms"}]), backend=backend)
    assert caught.value.where.startswith("fsdp2-gpt-4: faults[")
    assert caught.value.found in ("slow_rank", "jitter")


def test_faults_at_ops_that_are_not_there_are_refused_by_key() -> None:
    with pytest.raises(ScenarioError) as caught:
        faulty(SLOW, {"kind": "failure", "rank": 1, "at": "backward blocks.9"})
    assert str(caught.value).startswith("faults[1].at: expected the kind and unit of an op in rank")
    assert "found backward blocks.9, did you mean backward blocks." in str(caught.value)


def test_choices_and_reasons_are_of_clean_steps() -> None:
    scenario = FSDP2.with_(faults=[SLOW])
    with pytest.raises(ArgumentError, match="faults: expected none for a choice of strategies"):
        zsim.fit(scenario)
    with pytest.raises(ArgumentError, match="faults: expected none for a plan of training"):
        zsim.plan_for(scenario)
    why = zsim.why(zsim.simulate(scenario))
    assert why.step_ns == zsim.simulate(scenario).step_time


def test_the_training_is_the_same_with_faults() -> None:
    assert FSDP2.with_(faults=[SLOW]).fingerprint == FSDP2.fingerprint
    assert FSDP2.with_(faults=[SLOW]).with_(faults=None) == FSDP2


def test_the_page_of_keys_names_each_kind() -> None:
    page = (ROOT / "scenarios/README.md").read_text()
    assert page.count("## faults, kind = ") == 8
