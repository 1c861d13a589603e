"""Two Runs are compared in order of rigour; what cannot be seen is unsupported, and nothing at all
is a failure."""

import json
from dataclasses import replace

import pytest

from tests.support.folders import SCENARIOS
from zsim.cluster.devices import is_called
from zsim.ir.mesh import Mesh
from zsim.ir.run import (
    CollectiveRecord,
    MemoryRecord,
    Numerics,
    PhaseRecord,
    RankRun,
    RunRecord,
    Span,
)
from zsim.runs import saved
from zsim.runs.backend import RunOptions
from zsim.runs.compare.agreement import Agreement
from zsim.runs.compare.check import Check
from zsim.runs.compare.compare import compare
from zsim.runs.simulator import SimBackend
from zsim.scenario.scenario import load

GATHER = CollectiveRecord(op="all_gather", nbytes=1024, group="dp_shard", group_size=2)
SCATTER = CollectiveRecord(op="reduce_scatter", nbytes=512, group="dp_shard", group_size=2)


def phase(*collectives: CollectiveRecord, peak: int = 1000) -> PhaseRecord:
    memory = MemoryRecord(
        start_bytes=10, peak_bytes=peak, end_bytes=10, peak_at="backward blocks.1"
    )
    return PhaseRecord(collectives=collectives, memory=memory)


def a_run(
    backend: str = "gloo", *, peak: int = 1000, order=(GATHER, SCATTER), numerics=None, **more
) -> RunRecord:
    phases = {
        "construction": phase(peak=7), "first": phase(*order), "steady": phase(*order, peak=peak)
    }
    ranks = tuple(RankRun(rank=rank, phases=phases, numerics=numerics) for rank in range(2))
    fields = {
        "scenario": "x", "backend": backend, "interpreter": "observer", "world_size": 2,
        "ranks": ranks,
    }
    fields |= more
    return RunRecord(mesh=Mesh(dp_shard=fields["world_size"]), **fields)


def holds(checks):
    return Agreement(checks).ok


def statuses(checks):
    return {check.name: check.status for check in checks}


def named(checks, name):
    return next(check for check in checks if check.name == name)


PARITY = Numerics(
    losses=(1.0, 0.5), largest_relative_difference=3e-7, largest_gradient_difference=0.0, steps=2,
    reference_losses=(1.0, 0.5),
)


def test_a_run_agrees_with_itself_in_every_check():
    checks = compare(a_run("sim"), a_run(numerics=PARITY))
    assert statuses(checks) == {
        "collective order": "ok", "bytes": "ok", "groups": "unsupported",
        "peak memory, construction": "ok", "peak memory, first": "ok", "peak memory, steady": "ok",
        "memory at rest": "ok", "memory of parts": "unsupported", "memory by kind": "unsupported",
        "numerics": "ok", "step time": "unsupported", "exposed communication": "unsupported",
        "time by unit": "unsupported",
    }
    assert [check.detail for check in checks[:2]] == ["exact    8 of 8", "exact    8 of 8, 6,144 B"]
    assert named(checks, "peak memory, steady").detail == (
        "exact    1,000 B on rank 0, exact on all 2 observed (backward blocks.1)"
    )
    assert named(checks, "numerics").detail == (
        "parameters after 2 steps: 3e-07 of the distance trained apart from the reference, at "
        "most 0.001 allowed"
        "; gradients 0 of their size, at most 1e-05"
    )
    assert holds(checks)


@pytest.mark.quality
def test_two_swapped_collectives_are_shown_in_their_context():
    checks = compare(a_run("sim", order=(SCATTER, GATHER)), a_run())
    assert statuses(checks)["collective order"] == "failed"
    assert named(checks, "collective order").detail.splitlines() == [
        "rank 0, first phase, first difference at collective 0:",
        ">    0 predicted reduce_scatter 512 B dp_shard(2)             measured all_gather 1,024 "
        "B dp_shard(2)",
        "     1 predicted all_gather 1,024 B dp_shard(2)               measured reduce_scatter "
        "512 B dp_shard(2)",
    ]
    assert not holds(checks)


@pytest.mark.quality
def test_a_shard_off_by_one_element_fails_the_bytes_and_not_the_order():
    checks = compare(a_run("sim", order=(replace(GATHER, nbytes=1028), SCATTER)), a_run())
    assert (statuses(checks)["collective order"], statuses(checks)["bytes"]) == ("ok", "failed")


@pytest.mark.quality
def test_a_missing_collective_fails_order_and_bytes():
    checks = compare(a_run("sim", order=(GATHER,)), a_run())
    assert (statuses(checks)["collective order"], statuses(checks)["bytes"]) == ("failed", "failed")


def test_no_observed_collective_is_a_failure_and_never_a_pass():
    checks = compare(a_run("sim", order=()), a_run(order=()))
    assert named(checks, "collective order").status == "failed"
    assert named(checks, "collective order").detail == "no collective was observed at all"


def test_one_rank_alone_needs_no_collective():
    alone = a_run(order=(), world_size=1)
    alone = replace(alone, ranks=alone.ranks[:1])
    assert statuses(compare(alone, alone))["collective order"] == "ok"


def test_no_observed_memory_is_a_failure():
    checks = compare(a_run("sim", peak=0), a_run(peak=0))
    assert named(checks, "peak memory, steady").status == "failed"


@pytest.mark.parametrize(
    ("predicted", "status", "word"), [(1049, "ok", "within"), (1051, "failed", "beyond")]
)
def test_memory_that_is_not_exact_says_its_bound_and_its_difference(predicted, status, word):
    check = named(compare(a_run("sim", peak=predicted), a_run()), "peak memory, steady")
    assert check.status == status
    figures = f"predicted {predicted:,} B, measured 1,000 B on rank 0, +{predicted - 1000}"
    assert check.detail.startswith(f"{word} 5%: {figures}")


def test_a_backend_that_cannot_see_memory_says_unsupported():
    blind = a_run(provenance={"sees": "numerics"})
    check = named(compare(a_run("sim"), blind), "peak memory, steady")
    assert (check.status, check.detail) == ("unsupported", "unsupported: gloo cannot see memory")
    held = {
        name: replace(phase, memory=replace(phase.memory, held={"gradients": 5}))
        for name, phase in blind.ranks[0].phases.items()
    }
    claimed = replace(blind, ranks=tuple(replace(rank, phases=held) for rank in blind.ranks))
    assert named(compare(a_run("sim"), claimed), "memory by kind").detail == (
        "unsupported: gloo cannot see memory"
    )


@pytest.mark.parametrize(("change", "message"), [
    ({"largest_relative_difference": 0.5}, "0.5 of the distance trained apart"),
    ({"largest_relative_difference": float("nan")}, "nan of the distance trained apart"),
    ({"largest_gradient_difference": 0.5}, "gradients 0.5 of their size"),
    ({"largest_gradient_difference": float("nan")}, "gradients nan of their size"),
    ({"largest_relative_difference": 0.5, "furthest_parameter": "head.bias"},
     "; head.bias on rank 0"),
    ({"largest_gradient_difference": 0.5, "furthest_gradient": "head.weight"},
     "; the gradient of head.weight on rank 0"),
    ({"losses": (1.0, float("nan"))}, "a loss is not finite"),
    ({"losses": (1.0, 0.6)}, "losses 0.2 apart"),
])
def test_numbers_that_differ_or_are_none_fail(change, message):
    """Each alone fails, and nothing else of the Run does."""
    check = named(compare(a_run("sim"), a_run(numerics=replace(PARITY, **change))), "numerics")
    assert check.status == "failed"
    assert message in check.detail


@pytest.mark.parametrize("name", ["construction", "first", "steady"])
def test_bytes_that_differ_in_one_phase_alone_fail_and_say_where(name):
    run = a_run("sim", order=(GATHER,))
    phases = {
        phase: replace(record, collectives=(GATHER,))
        for phase, record in run.ranks[0].phases.items()
    }
    predicted = replace(run, ranks=tuple(replace(rank, phases=phases) for rank in run.ranks))
    other = {**phases, name: replace(phases[name], collectives=(replace(GATHER, nbytes=2048),))}
    measured = replace(a_run(), ranks=tuple(replace(rank, phases=other) for rank in run.ranks))
    outcomes = statuses(compare(predicted, measured))
    assert (outcomes["collective order"], outcomes["bytes"]) == ("ok", "failed")
    assert name in named(compare(predicted, measured), "bytes").detail


def test_time_is_unsupported_where_constants_are_assumed():
    assumed = a_run(
        "sim", step_time_ns=100, provenance={"calibration": "assumed", "cluster": "cpu-gloo"}
    )
    check = named(compare(assumed, a_run(step_time_ns=200)), "step time")
    assert (check.status, check.predicted, check.measured) == ("unsupported", 100, 200)
    assert check.detail == (
        "unsupported: cpu-gloo is not calibrated here (its constants are assumed); predicted 100 "
        "ns, measured 200 ns"
    )


@pytest.mark.parametrize(
    ("step_time_ns", "status"),
    [(899, "failed"), (900, "ok"), (1050, "ok"), (1100, "ok"), (1101, "failed"), (1200, "failed")],
)
def test_time_is_judged_where_both_sides_are_calibrated(step_time_ns, status):
    checks = compare(a_run("sim", step_time_ns=step_time_ns), a_run(step_time_ns=1000))
    assert named(checks, "step time").status == status


BANDED = {
    "calibration": "calibrated", "cluster": "mine", "device": "cuda",
    "device_name": "H100 SXM 80 GB", "band": "0.8000 1.5000",
}
TIMED = {"sees": "memory", "timed": "median of 3 steps", "device": "NVIDIA H100 80GB HBM3"}

BOTH = "predicted 1.000 us, measured 5.000 us"


@pytest.mark.parametrize(
    ("step_time_ns", "status"),
    [(799, "failed"), (800, "ok"), (1000, "ok"), (1500, "ok"), (1501, "failed"), (4000, "failed")],
)
def test_a_step_that_real_ranks_timed_is_held_to_the_band_of_the_prediction(step_time_ns, status):
    """Their backend sees no time of single operators, and has timed the step all the same."""
    predicted = a_run("sim", step_time_ns=1000, provenance=BANDED)
    checks = compare(predicted, a_run("nccl", step_time_ns=step_time_ns, provenance=TIMED))
    check = named(checks, "step time")
    assert (check.status, check.predicted, check.measured) == (status, 1000, step_time_ns)
    assert check.relative_error == (1000 - step_time_ns) / step_time_ns
    assert holds(checks) == (status == "ok")


@pytest.mark.parametrize(
    ("step_time_ns", "status"), [(899, "failed"), (1050, "ok"), (1400, "failed")]
)
def test_a_run_whose_time_is_another_simulators_is_held_to_the_bound_and_to_no_band(
    step_time_ns, status
):
    """A band is how far off reality may be: what no rank has timed is compared as a figure, though
    it has one."""
    predicted = a_run("sim", step_time_ns=step_time_ns, provenance=BANDED)
    check = named(
        compare(predicted, a_run("sim", step_time_ns=1000, provenance=BANDED)), "step time"
    )
    assert (check.status, "at most 10% allowed" in check.detail) == (status, True)


@pytest.mark.parametrize(
    ("share", "ends"),
    [(None, (800, 1500)), (0.1, (800, 1500)), (0.2, (800, 2344)), (0.5, (800, 6000)),
     (0.99, (800, 9999))],
)
def test_other_work_widens_the_band_upwards_and_ten_times_off_fails_always(share, ends):
    """Steps may take 1 / (1 - share)² as long: four times where others have half of the cores."""
    predicted = a_run("sim", step_time_ns=1000, provenance=BANDED)
    low, high = ends
    for ns, verdict in (
        (low - 1, "failed"), (low, "ok"), (high, "ok"), (high + 1, "failed"), (10_000, "failed"),
    ):
        timed = a_run("gloo", step_time_ns=ns, provenance=TIMED)
        ranks = tuple(replace(rank, others_share=share) for rank in timed.ranks)
        checks = compare(predicted, replace(timed, ranks=ranks))
        assert named(checks, "step time").status == verdict
        widened = f"widened: other work took {share or 0:.0%} of this machine's cores"
        assert (widened in named(checks, "step time").detail) == (
            (share or 0) > 0.1 and ns < 10_000
        )


@pytest.mark.parametrize(
    ("cores", "share", "limit"),
    [("4", 0.0, 100_000), ("1", 0.0, 200_000), ("1", 0.5, 800_000), ("none", 0.0, 100_000)],
)
def test_assumed_constants_of_a_cpu_fail_at_a_hundred_times_their_cores(cores, share, limit):
    """Two ranks; the preset has a core for each."""
    assumed = BANDED | {"calibration": "assumed", "device": "cpu", "device_name": "cpu"}
    predicted = a_run("sim", step_time_ns=1000, provenance=assumed)
    for ns, status in ((limit - 1, "unsupported"), (limit, "failed"), (100, "failed")):
        timed = a_run("gloo", step_time_ns=ns, provenance=TIMED | {"device": "cpu", "cores": cores})
        ranks = tuple(replace(rank, others_share=share) for rank in timed.ranks)
        assert timed.world_size == 2
        check = named(compare(predicted, replace(timed, ranks=ranks)), "step time")
        assert check.status == status


def test_both_times_their_error_and_the_band_are_said():
    predicted = a_run("sim", step_time_ns=1000, provenance=BANDED)
    details = [
        named(
            compare(predicted, a_run("nccl", step_time_ns=time, provenance=TIMED)), "step time"
        ).detail
        for time in (1250, 2000)
    ]
    assert details == [
        "within the band: predicted 1.000 us (800 ns to 1.500 us), measured 1.250 us, -20.0%",
        "beyond the band: predicted 1.000 us (800 ns to 1.500 us), measured 2.000 us, -50.0%",
    ]


@pytest.mark.parametrize(("predicted", "measured", "reason"), [
    (BANDED | {"calibration": "assumed"}, TIMED,
     f"mine is not calibrated here (its constants are assumed); {BOTH}"),
    (BANDED, TIMED | {"device": "NVIDIA A100"},
     f"measured on NVIDIA A100, and predicted for H100 SXM 80 GB; {BOTH}"),
    (BANDED, TIMED | {"device": "cpu"},
     f"measured on cpu, and predicted for H100 SXM 80 GB; {BOTH}"),
    (BANDED, TIMED | {"nccl_hostid": "0"},
     f"NCCL_HOSTID was set, by which ranks share a GPU and talk by sockets; {BOTH}"),
    (BANDED, {"sees": "memory", "device": "cpu"}, "gloo cannot see time"),
    (BANDED | {"sees": "memory"}, TIMED, "gloo cannot see time"),
])
def test_time_is_not_judged_elsewhere_and_both_times_are_said_with_the_reason(
    predicted, measured, reason
):
    left = a_run(
        "sim" if "sees" not in predicted else "gloo", step_time_ns=1000, provenance=predicted
    )
    check = named(compare(left, a_run(step_time_ns=5000, provenance=measured)), "step time")
    assert check.status == "unsupported"
    assert check.detail == f"unsupported: {reason}"


@pytest.mark.parametrize("band", ["", "nan nan", "0 2", "1.2 2", "0.8", "0.5 1e9", "a b"])
def test_a_band_that_means_nothing_is_none_and_the_tolerance_holds(band):
    """Such a band is one of an edited file of a saved Run."""
    predicted = a_run("sim", step_time_ns=1000, provenance=BANDED | {"band": band})
    checks = [
        named(compare(predicted, a_run(step_time_ns=time, provenance=TIMED)), "step time").status
        for time in (1050, 1300)
    ]
    assert checks == ["ok", "failed"]


def test_a_verdict_in_which_nothing_could_be_checked_is_no_agreement():
    blind = tuple(
        Check(name=name, status="unsupported") for name in ("collective order", "step time")
    )
    seen = Check(name="bytes", status="ok")
    assert [
        holds(checks)
        for checks in ((), blind, (*blind, seen), (*blind, seen, replace(seen, status="failed")))
    ] == [False, False, True, False]


def test_runs_of_other_world_sizes_are_not_compared_further():
    checks = compare(a_run("sim", world_size=4), a_run())
    assert [(check.name, check.status) for check in checks] == [("same experiment", "failed")]


def test_a_folded_rank_stands_for_all_when_it_says_so():
    folded = a_run("sim")
    both = replace(folded.ranks[0], stands_for=2)
    folded = replace(folded, ranks=(both,), representatives=(0, 0))
    assert holds(compare(folded, a_run()))


def test_a_folded_measurement_speaks_for_every_rank_without_naming_those_it_observed():
    folded = a_run(provenance={"sees": "memory numerics"})
    folded = replace(folded, ranks=(replace(folded.ranks[0], stands_for=2),))
    assert named(compare(a_run("sim"), folded), "ranks").detail.startswith(
        "1 of 2 ranks were measured"
    )
    assert "ranks" not in statuses(compare(a_run("sim"), replace(folded, representatives=(0, 0))))


def test_a_group_of_all_ranks_is_the_world_whatever_its_axis_is_called():
    other = tuple(replace(record, group="world") for record in (GATHER, SCATTER))
    assert holds(compare(a_run("sim"), a_run(order=other)))


def test_ranks_that_did_the_same_are_saved_once_and_read_back(tmp_path):
    """A Run of 1,024 ranks is one text for each kind of rank, not 1,024."""
    case = load(SCENARIOS / "scale/fsdp2-gpt-1024.toml")
    run = SimBackend().run(case, options=RunOptions(all_ranks=True))
    saved.save(run, tmp_path / "run.json")

    back = saved.load(tmp_path / "run.json")

    assert back == run
    assert (
        len({id(rank.phases) for rank in back.ranks})
        == len({id(rank.phases) for rank in run.ranks})
        < 20
    )
    assert saved.dump(back) == saved.dump(run)


def test_a_saved_run_is_read_back_to_the_last_field(tmp_path):
    span = Span(
        name="forward blocks.0", kind="forward", unit="blocks.0", stream="compute", start_ns=0,
        end_ns=5,
    )
    run = a_run(numerics=PARITY, step_time_ns=5, provenance={"seed": "0"})
    run = replace(run, ranks=tuple(replace(rank, spans=(span,)) for rank in run.ranks))
    saved.save(run, tmp_path / "deep" / "run.json")
    assert saved.load(tmp_path / "deep" / "run.json") == run
    assert saved.dump(run) == saved.dump(saved.load(tmp_path / "deep" / "run.json"))


@pytest.mark.parametrize(("text", "message"), [
    ("", "expected a saved Run, found no JSON"), ("{", "expected a saved Run, found no JSON"),
    ("[" * 9999, "expected a saved Run, found no JSON"),
    ("[]", "expected a saved Run, found other JSON"),
    ("{}", "expected a saved Run, found other JSON"),
    ('{"run": 1, "run": {}}', "expected a saved Run, found the key 'run' twice in a table"),
    ('{"run": {}}', "schema_version: expected 1, that of this version, found null"),
    ('{"schema_version": 9, "run": {}}',
     "schema_version: expected 1, that of this version, found 9"),
    ('{"schema_version": 1, "run": {}}', "run.scenario: expected a value, found nothing"),
    ('{"schema_version": 1, "run": 3}', "run: expected a table, found 3"),
])
def test_a_file_that_is_no_saved_run_is_refused_with_its_name(tmp_path, text, message):
    file = tmp_path / "run.json"
    file.write_text(text)
    with pytest.raises(saved.SavedRunError) as refused:
        saved.load(file)
    assert str(refused.value) == f"{file}: {message}; write one with `zsim run --save`"


def test_every_single_damage_to_a_saved_run_is_refused_or_read(tmp_path):
    text = saved.dump(a_run(numerics=PARITY))
    file = tmp_path / "run.json"
    refused = []
    for i in range(0, len(text), 7):
        file.write_text(text[:i] + text[i + 3 :])
        try:
            saved.load(file)
        except saved.SavedRunError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all("run.json" in message for message in refused)


def with_held(run: RunRecord, **held: int) -> RunRecord:
    """`run` with what each rank held after its steady step's optimizer."""

    def holding(rank: RankRun) -> RankRun:
        steady = rank.phases["steady"]
        return replace(
            rank,
            phases={
                **rank.phases, "steady": replace(steady, memory=replace(steady.memory, held=held))
            },
        )

    return replace(run, ranks=tuple(map(holding, run.ranks)))


def test_what_ranks_hold_is_compared_kind_by_kind_and_exactly():
    holding = with_held(a_run(), parameters=10, gradients=4, optimizer_states=20)
    check = named(
        compare(with_held(a_run("sim"), parameters=10, gradients=4, optimizer_states=20), holding),
        "memory by kind",
    )
    assert (check.status, check.detail) == ("ok", "exact    parameters 10 B, gradients 4 B, "
                                                  "optimizer_states 20 B")


@pytest.mark.quality
def test_one_byte_of_one_kind_is_a_difference():
    holding = with_held(a_run(), parameters=10, gradients=5, optimizer_states=20)
    check = named(
        compare(with_held(a_run("sim"), parameters=10, gradients=4, optimizer_states=21), holding),
        "memory by kind",
    )
    assert (check.status, check.detail) == ("failed", "rank 0, steady: gradients: predicted 4 B, "
                                                      "measured 5 B")


@pytest.mark.parametrize("phase_name", ["construction", "first", "steady"])
def test_no_phase_on_gloo_has_an_allowance_of_its_own(phase_name):
    def peaking(run, peak):
        phases = {**run.ranks[0].phases, phase_name: phase(GATHER, SCATTER, peak=peak)}
        return replace(run, ranks=tuple(replace(rank, phases=phases) for rank in run.ranks))

    predicted = peaking(a_run("sim"), 10_000)
    for peak, status in ((10_526, "ok"), (10_527, "failed")):
        assert (
            named(compare(predicted, peaking(a_run(), peak)), f"peak memory, {phase_name}").status
            == status
        )


def test_a_collective_over_another_axis_of_the_same_size_is_another_collective():
    """Both axes of 2 x 2 ranks have 2."""

    def on(axis):
        run = a_run(world_size=4)
        phases = {**run.ranks[0].phases, "steady": phase(replace(GATHER, group=axis), SCATTER)}
        return replace(run, ranks=tuple(replace(rank, phases=phases) for rank in run.ranks))

    for axis, status in (("dp_shard", "ok"), ("dp_replicate", "failed")):
        assert named(compare(on("dp_shard"), on(axis)), "collective order").status == status


def test_ranks_that_share_phases_and_not_spans_keep_their_own(tmp_path):
    run = a_run()
    spans = tuple(
        (Span(name="a", kind="forward", unit="a", stream="compute", start_ns=n, end_ns=n + 1),)
        for n in range(2)
    )
    ranks = tuple(
        replace(rank, phases=run.ranks[0].phases, spans=own)
        for rank, own in zip(run.ranks, spans, strict=True)
    )
    apart = replace(run, ranks=ranks)
    saved.save(apart, tmp_path / "run.json")
    assert saved.load(tmp_path / "run.json") == apart


@pytest.mark.parametrize("order", [1, -1])
def test_an_incomplete_run_never_agrees_on_whichever_side(order):
    broken = a_run(complete=False, failure="rank 1: killed")
    checks = compare(*(a_run("sim"), broken)[::order])
    assert not holds(checks)
    assert named(checks, "complete").detail.endswith("Run did not reach its end: rank 1: killed")


def test_two_byte_runs_are_held_to_their_own_bound_whoever_compares_them():
    apart = replace(PARITY, largest_relative_difference=0.04, dtype="bfloat16")
    assert named(compare(a_run("sim"), a_run(numerics=apart)), "numerics").status == "ok"
    assert named(
        compare(a_run("sim"), a_run(numerics=replace(apart, dtype="float32"))), "numerics"
    ).status == ("failed")
    assert named(
        compare(a_run("sim"), a_run(numerics=replace(apart, dtype="float8"))), "numerics"
    ).status == ("failed")


@pytest.mark.parametrize(("change", "difference"), [
    ({"mesh": Mesh(dp_replicate=2)},
     "mesh: mesh dp_shard=2 (2 ranks) predicted, mesh dp_replicate=2 (2 ranks) measured"),
    ({"provenance": {"strategy": "ddp"}}, "strategy: fsdp2 predicted, ddp measured"),
    ({"provenance": {"fingerprint": "b"}}, "fingerprint: a predicted, b measured"),
])
def test_runs_of_two_experiments_are_not_compared_further(change, difference):
    predicted = a_run("sim", provenance={"strategy": "fsdp2", "fingerprint": "a"})
    (only,) = compare(predicted, replace(a_run(), **change))
    assert (only.name, only.status, only.detail) == ("same experiment", "failed", difference)


def test_a_complete_run_without_some_phase_does_not_agree():
    run = a_run()
    short = replace(
        run.ranks[1],
        phases={name: phase for name, phase in run.ranks[1].phases.items() if name != "steady"},
    )
    checks = compare(a_run("sim"), replace(run, ranks=(run.ranks[0], short)))
    assert named(checks, "complete").detail == (
        "the measured Run says it is complete, but rank 1 has no steady phase"
    )
    assert not holds(checks)


def test_a_measured_run_without_some_rank_agrees_only_when_it_says_so():
    run = a_run()
    first = replace(run, ranks=run.ranks[:1])
    assert not holds(compare(a_run("sim"), first))
    assert holds(compare(a_run("sim"), replace(first, provenance={"ranks": "0"})))
    assert not holds(compare(a_run("sim"), replace(first, provenance={"ranks": "1"})))


def test_a_measured_rank_that_nobody_predicted_is_not_skipped():
    predicted = a_run("sim")
    checks = compare(replace(predicted, ranks=predicted.ranks[:1]), a_run())
    assert (
        named(checks, "ranks").detail
        == "1 measured ranks were not predicted, rank 1 first; predict all ranks"
    )
    assert not holds(checks)


def test_ranks_that_are_folded_are_compared_with_the_one_that_stands_for_them():
    scenario = load(SCENARIOS / "parity/fsdp2-uneven-4.toml")
    folded = SimBackend().run(scenario, options=RunOptions())
    whole = SimBackend().run(scenario, options=RunOptions(all_ranks=True))
    assert len(folded.ranks) < 4
    assert holds(compare(folded, whole))
    steady = whole.ranks[1].phases["steady"]
    fatter = replace(steady, memory=replace(steady.memory, peak_bytes=3 * steady.memory.peak_bytes))
    wrong = replace(whole.ranks[1], phases={**whole.ranks[1].phases, "steady": fatter})
    checks = compare(folded, replace(whole, ranks=(whole.ranks[0], wrong, *whole.ranks[2:])))
    assert "on rank 1" in named(checks, "peak memory, steady").detail
    assert not holds(checks)


@pytest.mark.parametrize(("damage", "complaint"), [
    (lambda run: run["ranks"].append(dict(run["ranks"][0])),
     "ranks that are there twice or outside the world"),
    (lambda run: run["mesh"].update(dp_shard=-2, dp_replicate=-1), "for 2 ranks"),
    (lambda run: run["mesh"].update(dp_shard=4), "for 2 ranks"),
    (lambda run: run["ranks"][0]["phases"]["steady"]["memory"].update(peak_bytes=10**400),
     rf"steady\.memory\.peak_bytes: expected at most {2**63 - 1:,}, found an integer of "
     "1,329 bits"),
    (lambda run: run["ranks"][0]["phases"]["first"]["memory"].update(peak_bytes="12"),
     r'ranks\[0\]\.phases\.first\.memory\.peak_bytes: expected a whole number, found "12";'),
    (lambda run: run.update(world_size=True), "run.world_size: expected a whole number"),
    (lambda run: run.update(world_size=2.0), "run.world_size: expected a whole number"),
    (lambda run: run.update(ranks=None), "run.ranks: expected a list, found null"),
    (lambda run: run.update(ranks=[7]), r"run.ranks\[0\]: expected a table, found 7"),
    (lambda run: run["mesh"].update(tp=2), "run.mesh.tp: expected no such key, found 2"),
    (lambda run: run["ranks"].append({"rank": 1, "like": [0]}),
     r"run.ranks\[2\].like: expected a rank before this one, found \[0\]"),
    (lambda run: run["ranks"][0]["phases"].update(bogus=run["ranks"][0]["phases"]["first"]),
     "a phase that is none of"),
    (lambda run: run.update(representatives=[0, 7]),
     "representatives that are not among its ranks"),
])
def test_a_saved_run_that_makes_no_sense_is_refused_by_name(damage, complaint, tmp_path):
    table = json.loads(saved.dump(a_run()))
    damage(table["run"])
    path = tmp_path / "run.json"
    path.write_text(json.dumps(table))
    with pytest.raises(saved.SavedRunError, match=complaint):
        saved.load(path)


def test_control_characters_of_a_saved_run_do_not_reach_the_terminal(tmp_path):
    path = tmp_path / "run.json"
    table = {"a\x1b": "\ud800"}
    saved.save(replace(a_run(), complete=False, failure="\x1b[2Jgone\n", provenance=table), path)
    assert saved.load(path).failure == "?[2Jgone\n"
    assert saved.load(path).provenance == {"a?": "?"}


def test_a_loss_that_is_not_the_references_does_not_agree():
    """Ranks have losses of their own; their mean is the reference's."""
    fine = [
        Numerics(
            losses=(loss, 0.5), largest_relative_difference=0.0, largest_gradient_difference=0.0,
            steps=2, reference_losses=(1.0, 0.5),
        )
        for loss in (0.9, 1.1)
    ]
    run = a_run()

    def with_numerics(both):
        return replace(
            run,
            ranks=tuple(
                replace(rank, numerics=each) for rank, each in zip(run.ranks, both, strict=True)
            ),
        )

    assert holds(compare(a_run("sim"), with_numerics(fine)))
    off = [fine[0], replace(fine[1], losses=(1.2, 0.5))]
    assert named(compare(a_run("sim"), with_numerics(off)), "numerics").status == "failed"


@pytest.mark.parametrize("change", [{"losses": ()}, {"reference_losses": ()}, {"steps": 3}])
def test_numerics_without_some_loss_do_not_agree(change):
    assert named(
        compare(a_run("sim"), a_run(numerics=replace(PARITY, **change))), "numerics"
    ).status == ("failed")


def test_a_kind_that_differs_in_the_first_step_alone_is_a_difference():
    def holding(run, nbytes):
        first = run.ranks[0].phases["first"]
        phases = {
            **run.ranks[0].phases,
            "first": replace(first, memory=replace(first.memory, held={"gradients": nbytes})),
        }
        return replace(run, ranks=(replace(run.ranks[0], phases=phases), *run.ranks[1:]))

    assert named(
        compare(holding(a_run("sim"), 8), holding(a_run(), 8)), "memory by kind"
    ).status == ("ok")
    assert named(
        compare(holding(a_run("sim"), 8), holding(a_run(), 9)), "memory by kind"
    ).status == ("failed")


@pytest.mark.parametrize(
    "change", [{"group_size": 1}, {"root": 1}, {"group": "dp_replicate", "group_size": 1}]
)
def test_a_collective_over_another_group_or_from_another_root_is_another_collective(change):
    other = a_run(order=(replace(GATHER, **change), SCATTER))
    assert named(compare(a_run("sim"), other), "collective order").status == "failed"


def seeing(run, *groups):
    """`run` whose ranks, in order, were seen to communicate in these groups."""
    return replace(
        run,
        ranks=tuple(
            replace(rank, groups=seen) for rank, seen in zip(run.ranks, groups, strict=True)
        ),
    )


def test_the_ranks_of_every_group_are_those_of_the_mesh():
    both = {"dp_shard": (0, 1)}
    check = named(compare(a_run("sim"), seeing(a_run(), both, both)), "groups")
    assert (check.status, check.detail) == ("ok", "exact    2 of 2: dp_shard(2)")


@pytest.mark.quality
@pytest.mark.parametrize(("group", "message"), [
    ({"dp_shard": (1, 0)}, "rank 1, dp_shard: predicted ranks [0, 1], measured ranks [1, 0]"),
    ({"dp_shard": (1,)}, "rank 1, dp_shard: predicted ranks [0, 1], measured ranks [1]"),
    ({"dp_shard": (0, 1), "tp": (0, 1)}, "rank 1, tp: predicted ranks [], measured ranks [0, "
                                         "1]"),
])
def test_a_group_of_other_ranks_fails(group, message):
    check = named(compare(a_run("sim"), seeing(a_run(), {"dp_shard": (0, 1)}, group)), "groups")
    assert (check.status, check.detail) == ("failed", message)


@pytest.mark.quality
@pytest.mark.parametrize("silent", [{}, {"dp_replicate": (0, 1)}])
def test_a_rank_that_communicates_and_does_not_tell_with_whom_fails_where_others_tell(silent):
    check = named(compare(a_run("sim"), seeing(a_run(), {"dp_shard": (0, 1)}, silent)), "groups")
    assert (check.status, check.detail) == ("failed", "rank 1 communicates over dp_shard and "
                                                      "does not tell with whom")


@pytest.mark.quality
def test_a_rank_that_computes_in_another_dtype_than_the_scenario_loosens_no_bound():
    narrow = replace(PARITY, largest_relative_difference=0.04, dtype="bfloat16")
    check = named(
        compare(a_run("sim", provenance={"computes_in": "float32"}), a_run(numerics=narrow)),
        "numerics",
    )
    assert (check.status, check.detail) == ("failed", "a rank computes in bfloat16, the scenario "
                                                      "in float32")


def test_parameters_that_end_up_elsewhere_by_the_right_gradients_are_called_that():
    apart = replace(PARITY, largest_relative_difference=0.5)
    check = named(compare(a_run("sim"), a_run(numerics=apart)), "numerics")
    assert check.status == "failed"
    assert "gradients agree, so look at the optimizer" in check.detail


def test_a_rank_that_tells_no_numerics_while_others_do_is_a_failure():
    run = a_run(numerics=PARITY)
    silent = replace(run, ranks=(run.ranks[0], replace(run.ranks[1], numerics=None)))
    for sides in ((a_run("sim"), silent), (silent, a_run(numerics=PARITY))):
        check = named(compare(*sides), "numerics")
        assert (check.status, check.detail) == ("failed", f"rank 1 of {run.backend} tells none, "
                                                          f"though others do")


def test_a_run_that_says_it_sees_numerics_and_tells_none_is_a_failure():
    run = a_run()
    promised = replace(run, provenance={**run.provenance, "sees": "memory numerics"})
    assert named(compare(a_run("sim"), promised), "numerics").status == "failed"
    assert named(compare(a_run("sim"), run), "numerics").status == "unsupported"


def resting(run, phase_name, **levels):
    """`run` with other levels at the ends of one phase of every rank."""
    old = run.ranks[0].phases[phase_name]
    phases = {**run.ranks[0].phases, phase_name: replace(old, memory=replace(old.memory, **levels))}
    return replace(run, ranks=tuple(replace(rank, phases=phases) for rank in run.ranks))


@pytest.mark.quality
@pytest.mark.parametrize(("phase_name", "levels", "message"), [
    ("construction", {"end_bytes": 9}, "8 of 10 exact; end of construction, rank 0: "
                                       "predicted 10 B, measured 9 B, +1 B"),
    ("first", {"start_bytes": 11}, "8 of 10 exact; start of first, rank 0: predicted 10 B, "
                                   "measured 11 B, -1 B"),
    ("steady", {"end_bytes": 12},
     "rank 0, steady: a leak, the step ends 2 B higher than it began; "
     "8 of 10 exact; end of steady, rank 0: predicted 10 B, measured 12 B, -2 B"),
])
def test_one_byte_more_or_less_at_rest_is_a_difference_on_any_backend(phase_name, levels, message):
    check = named(compare(a_run("sim"), resting(a_run(), phase_name, **levels)), "memory at rest")
    assert (check.status, check.detail) == ("failed", message)


@pytest.mark.parametrize(("change", "message"), [
    ({"initial_difference": 1e-9}, "the optimizer's parameters begin 1e-09 away from the "
                                   "model's own"),
    ({"step_difference": float("nan")}, "one step of the optimizer ends nan away from where "
                                        "torch's takes"),
    ({"reference_losses": (1.0, float("nan"))}, "a loss is not finite"),
])
def test_what_has_no_rounding_in_it_has_no_bound(change, message):
    check = named(compare(a_run("sim"), a_run(numerics=replace(PARITY, **change))), "numerics")
    assert check.status == "failed"
    assert message in check.detail


def test_reference_losses_of_every_rank_are_held_to_the_losses():
    run = a_run()
    both = (PARITY, replace(PARITY, reference_losses=(1.0, 0.7)))
    other = replace(
        run,
        ranks=tuple(
            replace(rank, numerics=each) for rank, each in zip(run.ranks, both, strict=True)
        ),
    )
    assert named(compare(a_run("sim"), other), "numerics").status == "failed"


def test_numerics_of_fewer_steps_than_the_scenario_has_do_not_agree():
    short = a_run(numerics=PARITY)
    check = named(compare(a_run("sim", provenance={"steps": "3"}), short), "numerics")
    assert (check.status, check.detail.rpartition("; ")[2]) == (
        "failed", "losses of 2 steps, of at least 3",
    )
    cut = replace(PARITY, steps=1, losses=(1.0,), reference_losses=(1.0,))
    assert named(compare(a_run("sim"), a_run(numerics=cut)), "numerics").status == "failed"


@pytest.mark.parametrize(("name", "by_torch", "is_it"), [
    ("H100 SXM 80 GB", "NVIDIA H100 80GB HBM3", True),
    ("H100 SXM 80 GB", "NVIDIA H100 PCIe", False), ("H100 SXM 80 GB", "NVIDIA H100 NVL", False),
    ("A100 SXM 80 GB", "NVIDIA A100-SXM4-80GB", True),
    ("A100 SXM 80 GB", "NVIDIA A100-SXM4-40GB", False),
    ("A100 SXM 80 GB", "NVIDIA A100 80GB PCIe", False),
    ("A100 SXM 40 GB", "NVIDIA A100-PCIE-40GB", False), ("H200 SXM 141 GB", "NVIDIA H200", True),
    ("L40S 48 GB", "NVIDIA L40S", True), ("H100 SXM 80 GB", "cpu", False),
    ("RTX 4090 24 GB", "NVIDIA GeForce RTX 4090", True),
    ("RTX 4090 24 GB", "NVIDIA RTX A6000", False), ("A10 24 GB", "NVIDIA A10G", False),
    ("V100 SXM2 32 GB", "Tesla V100-SXM2-32GB", True),
    ("MI300X 192 GB", "AMD Instinct MI300X", True),
])
def test_a_gpu_is_the_one_that_was_predicted_only_with_its_memory_and_its_form(
    name: str, by_torch: str, is_it: bool
) -> None:
    assert is_called(name, by_torch) is is_it
