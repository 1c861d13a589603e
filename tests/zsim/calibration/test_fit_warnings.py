"""Constants that measurements do not bear out are written, and doubted out loud: on standard error,
in JSON and in the file."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.folders import PUBLISHED
from tests.zsim.calibration.tables import STEP, table
from tests.zsim.calibration.test_fit_steps import (
    FORCED,
    all_reduces,
    measured,
    nccl_text,
    on_a_curve,
    slower,
    steps,
    took,
)
from zsim.calibration.fitting import fit_warnings
from zsim.calibration.fitting.fit_steps import Fitted
from zsim.calibration.fitting.planned_steps import prepared
from zsim.cli import main
from zsim.scenario.parts import cluster_file


def test_a_curve_that_misses_its_rows_is_doubted_everywhere_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times that are twice and half a curve's in turn: no curve comes near both."""
    times = {
        size: us * (2 if index % 2 else 0.5)
        for index, (size, us) in enumerate(on_a_curve(30, 180, 0).items())
    }
    path, out = all_reduces(tmp_path / "a.csv", times, FORCED), tmp_path / "mine.toml"
    assert main.main(
        ["calibrate", "--from", str(path), "--cluster", "dgx-h100", "--out", str(out), "--json"]
    ) == 0
    streams = capsys.readouterr()
    (doubt,) = json.loads(streams.out)["doubts"]
    assert doubt.startswith("ring all_reduce: the fit misses its own 22 rows by ")
    assert doubt.endswith(fit_warnings.CHECK_CURVE)
    assert f"warning: calibrate: {doubt}\n" in streams.err
    assert f"# doubtful: {doubt}\n" in out.read_text()
    (curve,) = cluster_file.parse(out.read_bytes(), where="mine.toml").curves
    assert curve.source.endswith(f"; doubtful: {doubt.removeprefix('ring all_reduce: ')}")


@pytest.mark.parametrize(("times", "share"), [(2, "50 %"), (3, "33 %")])
def test_a_curve_that_meets_its_rows_at_another_bandwidth_than_its_links_is_doubted(
    times: float, share: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes or times that are off leave no residual: the fit takes the bandwidth there."""
    log, sizes = tmp_path / "log.txt", [1 << power for power in range(18, 34, 2)]
    log.write_text(nccl_text({size: us * times for size, us in slower(1.0, sizes).items()}))
    assert main.main(["calibrate", "--from", str(log), "--cluster", "dgx-h100", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["collectives"]["fitted"]["median"] < 0.1
    (doubt,) = printed["doubts"]
    moved = float(doubt.partition(" comes to ")[2].partition(" % of the bandwidth of published "
                                                             "ones")[0])
    assert moved == pytest.approx(float(share.removesuffix(" %")), rel=0.1)


def test_steps_that_no_constants_meet_are_doubted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of one of two models are twice as long."""
    path, out = measured(tmp_path, {}, slower=2.0), tmp_path / "mine.toml"
    assert (
        main.main(["calibrate", "--from", str(path), "--cluster", "dgx-a100-40", "--out", str(out)])
        == 0
    )
    warning = capsys.readouterr().err
    assert "warning: calibrate: the fit misses steps of " in warning
    assert fit_warnings.CHECK_STEPS in warning
    assert "# doubtful: the fit misses steps of " in out.read_text()
    written = tomllib.loads(out.read_text())["device"]["matmul_efficiency"]
    assert written["source"].startswith("measured.csv; doubtful: the fit misses steps of ")
    assert cluster_file.parse(out.read_bytes(), where="mine.toml").device.name == "A100 SXM 40 GB"


def test_what_presets_and_published_tables_say_is_not_doubted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = measured(tmp_path, {})
    assert main.main(["calibrate", "--from", str(path), "--cluster", "dgx-a100-40", "--json"]) == 0
    streams = capsys.readouterr()
    assert (json.loads(streams.out)["doubts"], streams.err) == ([], "")
    assert main.main([
        "calibrate", "--from", str(PUBLISHED / "tables" / "nccl_h100_sweep.csv"),
        "--cluster", "dgx-h100", "--json",
    ]) == 0
    streams = capsys.readouterr()
    assert (json.loads(streams.out)["doubts"], streams.err) == ([], "")


def test_files_may_be_given_together_or_one_by_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [str(tmp_path / name) for name in ("a.txt", "b.txt", "c.txt")]
    for index, name in enumerate(names):
        Path(name).write_text(nccl_text(slower(1 + index / 10)))
    counts = []
    for asked in (
        ["--from", *names], ["--from", names[0], "--from", *names[1:]],
        [word for name in names for word in ("--from", name)],
    ):
        assert main.main(["calibrate", *asked, "--cluster", "dgx-h100", "--json"]) == 0
        counts.append(json.loads(capsys.readouterr().out)["collectives"]["fitted"])
    assert counts[0]["n"] == 18
    assert counts == [counts[0]] * 3


def test_steps_that_hang_on_the_host_and_are_missed_are_doubted_for_nothing_fitted_is_its_pace(
    tmp_path: Path
) -> None:
    """A small model of 512 tokens a GPU, which a host of half the pace makes longer; one of 65,536
    tokens keeps the device busy."""
    small = STEP | {
        "model.sizes.num_layers": "12", "model.sizes.hidden_size": "768",
        "model.sizes.num_heads": "12", "batch.sequence_length": "512", "batch.micro_batch": "1",
        "batch.accumulation": "1",
    } | took(0.046)
    large = small | {"batch.sequence_length": "2048", "batch.micro_batch": "32"} | took(1.5)
    cases, skipped = prepared(steps(table(tmp_path / "a.csv", small, large)))
    assert not skipped
    fitted = Fitted(factors={}, errors=(-0.25, -0.25), left_out=(0.0, 0.0), cases=tuple(cases))
    (caveat,) = fit_warnings.of_host(fitted)
    assert caveat.text.startswith("the fit misses 1 of 2 steps that half the host's pace would "
                            "lengthen by a tenth and more, by up to 25 %")
    assert caveat in fit_warnings.caveats(fitted, None)
    assert not [*fit_warnings.of_host(replace(fitted, errors=(-0.05, -0.25)))]
