"""The verdict of a comparison: agreement in what was checked, and never in what was not."""

from dataclasses import replace

import pytest

import zsim
from tests.support.folders import SCENARIOS
from zsim.cli.main import main
from zsim.runs import saved
from zsim.runs.compare.agreement import DECIDES, Agreement
from zsim.runs.compare.check import Check
from zsim.runs.comparison import compare_records

BLIND = Check(
    name="step time", status="unsupported", detail="unsupported: mine is not calibrated here"
)


def checks(*, time: Check = BLIND, **statuses):
    made = {"order": "ok", "bytes": "ok", "memory": "ok", **statuses}
    return (*(Check(name=DECIDES[aspect], status=made[aspect]) for aspect in made), time)


def test_what_was_not_checked_is_named_with_its_reason_and_is_no_agreement():
    verdict = Agreement(checks())
    assert (verdict.ok, verdict.whole) == (True, False)
    assert verdict.checked == ("order", "bytes", "memory")
    assert str(verdict) == (
        "agrees in order, bytes and memory; time not checked: mine is not calibrated here"
    )


def test_a_run_agrees_where_all_four_were_checked():
    verdict = Agreement(checks(time=replace(BLIND, status="ok")))
    assert verdict.whole
    assert str(verdict) == "agrees in order, bytes, memory and time"


def test_a_time_within_a_band_is_told_with_its_ends():
    """A band over three orders of magnitude is no narrow agreement."""
    wide = replace(BLIND, status="ok", band_ns=(37_000_000, 18_000_000_000))
    assert str(Agreement(checks(time=wide))) == (
        "agrees in order, bytes, memory and time (within 37.000 ms to 18.000 s)"
    )


def test_a_failed_check_is_named():
    verdict = Agreement(checks(memory="failed"))
    assert (verdict.ok, verdict.whole) == (False, False)
    assert str(verdict) == "DIFFERS: peak memory, steady"


def test_what_is_required_and_was_not_checked_fails():
    verdict = Agreement(checks(), required=("memory", "time"))
    assert not verdict.ok
    assert str(verdict).endswith("; FAILED: --require time")
    assert "numerics not checked: no such check was made" in str(
        Agreement(checks(), required=("numerics",))
    )


def a_pair(step_time_ns: int):
    """The simulated H100 Run of a scenario, and one by hand whose step took `step_time_ns`."""
    run = zsim.simulate(zsim.load(SCENARIOS / "published" / "llama-3-8b-128-h100.toml")).record
    provenance = {
        **run.provenance, "device": "NVIDIA H100 80GB HBM3", "sees": "memory",
        "timed": "median of 5 steps",
    }
    measured = replace(
        run, backend="nccl", step_time_ns=step_time_ns, provenance=provenance,
        ranks=tuple(replace(rank, spans=()) for rank in run.ranks),
    )
    return run, measured


@pytest.mark.quality
@pytest.mark.parametrize("factor", [0.05, 1.0, 10.0])
def test_ten_times_the_predicted_step_time_on_a_shipped_cluster_fails(tmp_path, capsys, factor):
    run, measured = a_pair(1)
    measured = replace(measured, step_time_ns=round(run.step_time_ns * factor))
    paths = [tmp_path / "predicted.json", tmp_path / "measured.json"]
    for record, path in zip((run, measured), paths, strict=True):
        saved.save(record, path)
    code = main(["compare", *map(str, paths)])
    verdict = capsys.readouterr().out.splitlines()[-1].strip()
    assert code == (factor != 1.0)
    assert verdict.startswith("agrees in" if factor == 1.0 else "DIFFERS")
    assert "time" in verdict
    assert ("time (within " in verdict) == (factor == 1.0)


def test_requiring_an_aspect_that_nobody_knows_is_refused(capsys):
    assert main(["compare", "a.json", "b.json", "--require", "tmie"]) == 2
    assert "expected some of order, bytes, memory, numerics and time, found 'tmie'" in (
        capsys.readouterr().err
    )
    run, measured = a_pair(1)
    with pytest.raises(zsim.ZsimError, match="require: expected some of order"):
        compare_records(run, measured, required=("tmie",))
