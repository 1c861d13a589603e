"""Constants fitted to measured steps: what made the steps is found again, groups are left out, the
file says what it is made from."""

from __future__ import annotations

import json
import random
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import exp
from pathlib import Path

import pytest

from tests.support.folders import PUBLISHED, SCENARIOS
from tests.zsim.calibration.tables import GATHER, STEP, table
from zsim.calibration.collectives import predict
from zsim.calibration.data.model_identity import model_of
from zsim.calibration.data.table import read
from zsim.calibration.fitting import fit_collectives, fit_steps, planned_steps, write_cluster
from zsim.calibration.records import CalibrationError, Collective, Step
from zsim.cli import main
from zsim.cluster.cluster_presets import load_cluster
from zsim.cluster.collectives.nccl.curves import CURVES
from zsim.cluster.collectives.nccl.measured_curves import as_it_is, curves_of, with_curve
from zsim.cluster.devices import load_device
from zsim.cluster.links import MeasuredCurve
from zsim.engine.bands import error_bands
from zsim.engine.costs.op_costs import Costs
from zsim.engine.simulate_step import simulate_step
from zsim.runs import saved
from zsim.runs.backend import RunOptions
from zsim.runs.simulator import SimBackend
from zsim.scenario.parts import cluster_file as cluster_reader
from zsim.scenario.scenario import load, parse

ROWS = [
    STEP
    | {
        "model.sizes.num_layers": "2", "model.sizes.hidden_size": str(width),
        "model.sizes.num_heads": str(width // 128), "batch.micro_batch": str(batch),
        "batch.accumulation": "1",
    }
    for width, batch in ((2048, 8), (2048, 4), (4096, 8), (4096, 4))
]
WIDE = "4096"


def steps(path: Path) -> list[Step]:
    """The steps of a table."""
    return [row for row in read(path) if isinstance(row, Step)]


def cases(folder: Path) -> list[planned_steps.Case]:
    prepared, skipped = planned_steps.prepared(steps(table(folder / "t.csv", *ROWS)))
    assert not skipped
    return prepared


def took(seconds: float) -> dict[str, str]:
    """The cell of a step time."""
    return {"measured.step_time": f"{seconds:.9f} s"}


def measured(folder: Path, factors: dict[tuple[str, str], float], *, slower: float = 1.0) -> Path:
    """The rows as measured on a device with constants `factors` times the preset's. Steps of the
    wide model take `slower` times as long there."""
    rows = [
        row | took(planned_steps.predicted(case, factors)
                   * (slower if row["model.sizes.hidden_size"] == WIDE else 1.0))
        for row, case in zip(ROWS, cases(folder), strict=True)
    ]
    return table(folder / "measured.csv", *rows)


def test_what_made_the_measurements_is_found_and_left_out_groups_are_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Products that are 6 % slower are found in matmul_efficiency."""
    path = measured(tmp_path, {("A100", "matmul_efficiency"): 0.94})
    out = tmp_path / "mine.toml"
    assert main.main([
        "calibrate", "--from", str(path), "--cluster", "dgx-a100-40", "--out", str(out), "--json",
    ]) == 0
    printed = json.loads(capsys.readouterr().out)
    factors = {
        (constant["generation"], constant["name"]): constant["factor"]
        for constant in printed["constants"]
    }
    assert factors["A100", "matmul_efficiency"] == pytest.approx(0.94, abs=0.01)
    assert factors["A100", "attention.rate"] == pytest.approx(1, abs=0.05)
    assert printed["fitted"]["max"] < 0.015
    assert printed["left_out"]["max"] < 0.03
    assert len({tuple(row["group"]) for row in printed["rows"]}) == 2
    written = tomllib.loads(out.read_text())["device"]["matmul_efficiency"]
    assert written["provenance"] == "calibrated"
    assert written["source"].startswith("measured.csv; before: 80.3 %")
    assert written["value"] == f"{80.3 * factors['A100', 'matmul_efficiency']:.4g} %"


def test_narrow_priors_keep_a_fit_from_its_rows(tmp_path: Path) -> None:
    """Rows whose products are a fifth slower than the preset's: with priors of a tenth of the width
    most of that is left."""
    path = measured(tmp_path, {("A100", "matmul_efficiency"): 0.8})
    prepared, _ = planned_steps.prepared(steps(path))
    narrow, usual, wide = (
        max(map(abs, fit_steps.fit(prepared, wider=wider, rounds=1).errors))
        for wider in (0.1, 1.0, 3.0)
    )
    assert narrow > 0.1
    assert max(usual, wide) < 0.02


def test_a_fit_that_misses_has_a_band_that_says_so_and_holds_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of one model are half as long again, for a reason that is none of the device: no
    constants meet both models."""
    path, out = measured(tmp_path, {}, slower=1.5), tmp_path / "mine.toml"
    asked = ["calibrate", "--from", str(path), "--cluster", "dgx-a100-40", "--out", str(out)]
    assert main.main([*asked, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    far = max(
        1 - min(1 + error, 1 / (1 + error)) for row in printed["rows"]
        for error in (row["error"], row["left_out"])
    )
    assert far <= printed["width"] <= far + 0.001
    assert far > 0.25
    text = out.read_text()
    sentence = (
        f"half-width of steps by what was fitted: {100 * printed['width']:.1f} %; nine of ten rows "
        f"lie within it"
    )
    assert f"# {sentence}\n" in text
    for case in planned_steps.prepared(steps(path))[0]:
        costs = Costs(
            cluster=cluster_reader.parse(text.encode(), where="mine.toml"),
            execution=case.scenario.executed,
        )
        timeline = simulate_step(case.program, costs=costs)
        low, high = error_bands.band(case.program, timeline, costs=costs)
        assert low <= case.seconds / (timeline.step_time_ns / 1e9) <= high
    assert main.main(asked) == 0
    assert f"{sentence}\n" in capsys.readouterr().out


def test_constants_of_which_no_row_speaks_stay_what_they_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One node waits for no straggler, and its rows ran one kind of attention kernels."""
    path, out = measured(tmp_path, {("A100", "matmul_efficiency"): 0.94}), tmp_path / "mine.toml"
    asked = ["calibrate", "--from", str(path), "--cluster", "dgx-a100-40", "--out", str(out)]
    assert main.main([*asked, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    heard = {constant["name"]: constant["heard"] for constant in printed["constants"]}
    (ran,) = {case.scenario.executed.attention_kernels for case in cases(tmp_path)}
    assert (heard["straggler"], heard["matmul_efficiency"]) == ([], ["matmul_efficiency"])
    assert heard["attention.rate"] == [f"attention.{ran}.rate"]
    written = tomllib.loads(out.read_text())["device"]
    preset = tomllib.loads(write_cluster.text("dgx-a100-40", None, source="none"))["device"]
    assert written["straggler"] == preset["straggler"]
    assert {
        kind for kind, rates in written["attention"].items() if rates != preset["attention"][kind]
    } == {ran}
    assert len(written["attention"]) > 1
    assert written["attention"][ran]["rate"]["width"] == written["matmul_efficiency"]["width"] == (
        "8.0 %"
    )
    assert main.main(asked) == 0
    report = capsys.readouterr().out
    assert re.search(r"^straggler +all +as before: no row speaks of it$", report, re.MULTILINE)
    assert re.search(
        r"^no row speaks of .*straggler.*: as before, with where it came from$", report,
        re.MULTILINE,
    )
    assert f"attention was run by {ran}: other kernels stay as before" in report


def test_a_constant_that_moves_a_row_by_a_tenth_of_the_noise_is_spoken_of() -> None:
    knob = fit_steps.KNOBS[0]
    least = fit_steps.NOISE / 10 / knob.width
    assert fit_steps.quiet([[0.5 * least], [-1.01 * least]], [("", knob)]) == set()
    assert fit_steps.quiet([[0.5 * least], [-0.99 * least]], [("", knob)]) == {0}


def test_a_share_that_the_fit_takes_to_all_there_is_has_been_heard(tmp_path: Path) -> None:
    """Element-wise kernels cannot reach more than the whole bandwidth: there they move nothing
    upwards, and rows spoke of them."""
    factors = [
        replace(case, step=replace(case.step, seconds=case.seconds / 3)) for case in cases(tmp_path)
    ]
    fitted = fit_steps.fit(factors)
    assert {"matmul_efficiency", "elementwise_efficiency"} <= fitted.heard


def test_nine_of_ten_rows_are_the_width_and_all_of_few() -> None:
    """Half as long as measured is as far off as twice as long."""
    known = fit_steps.Fitted(
        factors={}, errors=(0.0,) * 20, left_out=(0.1,) * 18 + (1.0, -0.5), cases=()
    )
    assert known.width == pytest.approx(0.5)
    assert replace(known, left_out=(0.25,) * 19 + (1.0,)).width == pytest.approx(0.2)
    assert replace(known, left_out=(0.25,) * 8 + (1.0,)).width == pytest.approx(0.5)
    assert replace(known, errors=(-0.6,), left_out=(0.0,)).width == pytest.approx(0.6)


def test_the_preset_is_kept_where_the_measurements_are_its_own(tmp_path: Path) -> None:
    fitted = fit_steps.fit(planned_steps.prepared(steps(measured(tmp_path, {})))[0])
    assert all(abs(factor - 1) < 1e-3 for factor in fitted.factors.values())
    assert max(map(abs, (*fitted.errors, *fitted.left_out))) < 1e-4
    assert fitted.device(load_device("a100-40")).num_sms == 108


def test_one_group_alone_cannot_be_calibrated_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path / "t.csv", *ROWS[:2])
    assert main.main(["calibrate", "--from", str(path), "--cluster", "dgx-a100-40"]) == 2
    assert "expected rows of at least two groups" in capsys.readouterr().err


def test_a_group_is_left_out_of_what_predicts_it(tmp_path: Path) -> None:
    """One model's steps are 20 % slower than the other's say: fitted they meet halfway, left out
    they miss by nearly all of it."""
    errors = [
        replace(
            case,
            step=replace(
                case.step,
                seconds=planned_steps.predicted(case, {})
                * (1.2 if case.step.fields["model.sizes.hidden_size"] == WIDE else 1.0),
            ),
        )
        for case in cases(tmp_path)
    ]
    fitted = fit_steps.fit(errors)
    for error, left_out in zip(fitted.errors, fitted.left_out, strict=True):
        assert abs(left_out) > abs(error) + 0.02
    is_wide = [case.step.fields["model.sizes.hidden_size"] == WIDE for case in errors]
    alone = [case for case, wide in zip(errors, is_wide, strict=True) if not wide]
    others = [row for row, wide in enumerate(is_wide) if wide]
    # who alone say: nothing moves
    assert all(
        planned_steps.predicted(case, {}) == pytest.approx(case.step.seconds) for case in alone
    )
    assert [fitted.left_out[row] for row in others] == pytest.approx(
        [1 / 1.2 - 1] * len(others), abs=0.03
    )


def test_steps_of_another_machine_are_skipped_by_name_and_move_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = measured(tmp_path, {})
    other = table(
        tmp_path / "other.csv", *(row | {"cluster.preset": "dgx-h100"} for row in ROWS[:2]),
    )
    asked = ["calibrate", "--from", str(path), str(other), "--cluster", "dgx-a100-40", "--json"]
    assert main.main(asked) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {constant["generation"] for constant in printed["constants"]} == {"", "A100"}
    assert all(abs(constant["factor"] - 1) < 1e-3 for constant in printed["constants"])
    assert [row["reason"] for row in printed["skipped"]] == ["a step on H100 SXM 80 GB, not on "
                                                           "A100 SXM 40 GB"] * 2


def test_a_table_of_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path / "t.csv", {"a": "1"})
    assert main.main(["calibrate", "--from", str(path)]) == 2
    assert "found no measurements: a table has columns that begin with measured." in (
        capsys.readouterr().err
    )


def test_rows_of_one_group_are_left_out_together(tmp_path: Path) -> None:
    """A column groups rows of one model by what else they have in common."""
    rows = [row | {"group": str(index % 3)} for index, row in enumerate(ROWS)]
    prepared, _ = planned_steps.prepared(steps(table(tmp_path / "t.csv", *rows)))
    assert [case.group for case in prepared] == [("A100 SXM 40 GB", str(n)) for n in (0, 1, 2, 0)]


def test_rows_of_peaks_alone_are_skipped_by_name(tmp_path: Path) -> None:
    peak = {"measured.step_time": "", "measured.peak_allocated": "30 GiB"}
    _, skipped = planned_steps.prepared(steps(table(tmp_path / "t.csv", ROWS[0], ROWS[0] | peak)))
    assert [row.reason for row in skipped] == ["peaks of memory, and no time to calibrate on"]


def test_no_rows_are_no_calibration() -> None:
    with pytest.raises(CalibrationError):
        fit_steps.fit([])


@pytest.mark.parametrize("preset", ["dgx-h100", "p4d", "cpu-gloo"])
def test_a_clusters_file_holds_every_number_of_its_preset(preset: str) -> None:
    fitted = fit_steps.Fitted(factors={}, errors=(0.01,), left_out=(0.02,), cases=())
    table_of = tomllib.loads(write_cluster.text(preset, fitted, source="none"))
    device = load_device({"dgx-h100": "h100-80", "p4d": "a100-40", "cpu-gloo": "cpu-core"}[preset])
    assert {
        f"device.{key}"
        for key, value in table_of["device"].items()
        if isinstance(value, dict) and "value" in value
    } <= {f.key for f in device.figures}
    assert {"links", "overheads", "host", "collectives"} <= set(table_of)


SIZES = (2**18, 2**20, 2**22, 2**24, 2**26, 2**28)


def nccl_text(times: dict[int, float], *, ranks: int = 8) -> str:
    """Output of nccl-tests for an all-gather on nodes of eight."""
    gpu = "[0x00] NVIDIA H100 80GB HBM3"
    devices = [
        f"#  Rank  {rank} Group  0 Pid  1 on  host{rank // 8} device  {rank % 8} {gpu}"
        for rank in range(ranks)
    ]
    share = (ranks - 1) / ranks
    rates = {size: size / us / 1000 for size, us in times.items()}
    counts = {size: size // 4 // ranks for size in times}
    rows = [f"{size} {counts[size]} float none -1 {us:.2f} {rates[size]:.2f} "
            f"{share * rates[size]:.2f} 0" for size, us in times.items()]
    head = ["# Collective test starting: all_gather_perf", *devices,
            "# size count type redop root time algbw busbw #wrong", "#  (B) (us) (GB/s)"]
    return "\n".join([*head, *rows, "# Avg bus bandwidth    : 100", ""])


def published(scope: str, op: str) -> MeasuredCurve:
    """The curve of H100 that is there without measurements."""
    node = load_cluster("dgx-h100").nccl
    assert node is not None
    curve = as_it_is(CURVES, scope, op, node)
    assert curve is not None
    return curve


def slower(times: float, sizes: Iterable[int] = SIZES) -> dict[int, float]:
    """All-gathers of 8 H100 whose floor, and what is added to it, are `times` those that presets
    have."""
    curve = published("ring", "all_gather")
    by_size = {}
    for size in sizes:
        added = sum(each * size / (size + half) for each, half in curve.added)
        by_size[size] = times * (curve.floor + added) + size * 7 / 8 / (360e3 * curve.share)
    return by_size


@pytest.mark.parametrize("cluster", ["dgx-h100", "p5"])
def test_a_log_of_several_nodes_is_taken_to_have_run_over_the_clusters_own_network(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """nccl-tests names no network. All-gathers of 16 at 330 GB/s."""
    (tmp_path / "log.txt").write_text(
        nccl_text({2**power: 2**power * 15 / 16 / 330e3 for power in range(26, 31)}, ranks=16)
    )
    assert main.main(
        ["calibrate", "--from", str(tmp_path / "log.txt"), "--cluster", cluster, "--json"]
    ) == 0
    printed = json.loads(capsys.readouterr().out)
    (curve,) = printed["collectives"]["curves"]
    assert (curve["scope"], curve["collective"], printed["collectives"]["fitted"]["n"]) == (
        "network", "all_gather", 5,
    )


def test_nccl_tests_output_moves_the_curve_of_its_collective_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, out = tmp_path / "log.txt", tmp_path / "mine.toml"
    log.write_text(nccl_text(slower(1.5)))
    assert main.main(
        ["calibrate", "--from", str(log), "--cluster", "dgx-h100", "--out", str(out), "--json"]
    ) == 0
    printed = json.loads(capsys.readouterr().out)
    (curve,) = printed["collectives"]["curves"]
    before = published("ring", "all_gather")
    assert (curve["scope"], curve["collective"]) == ("ring", "all_gather")
    assert curve["floor"] == pytest.approx(1.5 * before.floor, rel=0.1)
    assert curve["added"][0][0] == pytest.approx(1.5 * before.added[0][0], rel=0.2)
    assert printed["collectives"]["fitted"]["max"] < 0.04
    # the one system, predicted by the published curve
    assert printed["collectives"]["left_out"]["max"] > 0.2
    (group,) = printed["groups"]
    assert (group["group"], group["n"]) == ("ring all_gather, log.txt, H100 SXM 80 GB, 8 "
                                            "ranks on 1 nodes", 6)
    text = out.read_text()
    assert text.startswith("# calibrated on 6 collectives of log.txt\n# errors of rows fitted: "
                           "median ")
    (read,) = cluster_reader.parse(text.encode(), where="mine.toml").curves
    assert (read.provenance, round(read.floor, 1)) == ("calibrated", round(curve["floor"], 1))
    assert read.source.startswith("6 rows of log.txt; before: NCCL's mechanisms on 8 ranks")


def test_percentiles_are_the_same_everywhere_and_rows_of_the_preset_alone_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One system on each of three curves: left out, nothing but the published curve is there to
    predict it."""
    log, out = PUBLISHED / "tables" / "nccl_h100_sweep.csv", tmp_path / "mine.toml"
    asked = ["calibrate", "--from", str(log), "--cluster", "dgx-h100", "--out", str(out)]
    assert main.main(asked) == 0
    percentiles = re.findall(
        r"^rows (fitted|left out with their group): n 33, median ([\d.]+) %,.* p95 ([\d.]+) %",
        capsys.readouterr().out, re.M,
    )
    written = re.findall(
        r"^# errors of rows (.*): median ([\d.]+) %, 95th percentile ([\d.]+) %", out.read_text(),
        re.M,
    )
    assert [rows for rows, *_ in written] == ["fitted", "left out with their group"]
    assert written == [
        (rows, *(f"{float(share):.1f}" for share in shares)) for rows, *shares in percentiles
    ]
    groups = [line for line in out.read_text().splitlines() if line.startswith("#   ring ")]
    assert len(groups) == 3
    assert all(
        "not fitted, the preset's value, from: NCCL's mechanisms" in line for line in groups
    )


FORCED = {"nccl.algorithm": "ring", "nccl.nvls": "false"}
EIGHT = GATHER | {"collective": "all_reduce"}


def all_reduces(path: Path, times: dict[int, float], more: Mapping[str, str] = EIGHT) -> Path:
    """A table of all-reduces of 8 H100, by size in µs."""
    return table(
        path,
        *(
            EIGHT | more | {"bytes": str(size), "measured.time": f"{us:.3f} us"}
            for size, us in times.items()
        ),
    )


def of_eight(size: int) -> Collective:
    """An all-reduce of 8 H100."""
    return Collective(
        source="a.csv", line=2, op="all_reduce", nbytes=size, seconds=1.0,
        cluster=load_cluster("dgx-h100"),
    )


def on_a_curve(floor: float, bus_gb_s: float, added: float) -> dict[int, float]:
    """µs of all-reduces of 8 from 4 KiB to 8 GiB: `floor`, the wire at `bus_gb_s`, and up to
    `added`, half of it at 8 MiB."""
    sizes = [1 << power for power in range(12, 34)]
    return {
        size: floor + size * 1.75 / (1000 * bus_gb_s) + added * size / (size + 2**23)
        for size in sizes
    }


@pytest.mark.parametrize("curve", [
    (30, 360, 0), (60, 360, 0), (18, 370, 65), (40, 470, 60), (40, 420, 60), (100, 470, 60),
    (15, 300, 0), (30, 200, 100),
])
def test_all_reduces_that_are_slower_than_the_published_ring_are_fitted_as_they_are(
    curve: tuple[float, float, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The published ring of a node takes 30 µs and more: beside a switch that has been measured it
    holds no time to its own."""
    times, out = on_a_curve(*curve), tmp_path / "mine.toml"
    path = all_reduces(tmp_path / "a.csv", times)
    assert main.main(
        ["calibrate", "--from", str(path), "--cluster", "dgx-h100", "--out", str(out), "--json"]
    ) == 0
    printed = json.loads(capsys.readouterr().out)
    (fitted,) = printed["collectives"]["curves"]
    assert (fitted["scope"], fitted["collective"]) == ("nvls", "all_reduce")
    assert printed["collectives"]["fitted"]["max"] < 0.02
    cluster = cluster_reader.parse(out.read_bytes(), where="mine.toml")
    warning = (
        "22 rows of a.csv, by which alone NCCL's own choice in a node goes, without the published "
        "ring; before: NCCL's mechanisms on 8 ranks of hopper"
    )
    assert cluster.curves[0].source.startswith(warning)
    for row in read(path):
        assert isinstance(row, Collective)
        assert predict(row, curves=curves_of(cluster)).microseconds == pytest.approx(
            1e6 * row.seconds, rel=0.02
        )


def bands_of(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[float, ...]:
    """Half-widths of the one curve calibrated on the file: for large, middle and small messages."""
    assert main.main(["calibrate", "--from", str(path), "--cluster", "dgx-h100", "--json"]) == 0
    (curve,) = json.loads(capsys.readouterr().out)["collectives"]["curves"]
    return tuple(curve[name] for name in ("band", "band_middle", "band_small"))


@pytest.mark.parametrize("times", [1.0, 1.3, 2.0])
def test_a_machine_that_differs_from_its_preset_is_trusted_as_much_once_it_was_measured(
    times: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The band is what the machine's own sizes miss one another by. The preset misses them by up to
    half."""
    path = all_reduces(
        tmp_path / "a.csv", {size: times * us for size, us in on_a_curve(28, 470, 50).items()}
    )
    assert bands_of(path, capsys) == (0.05, 0.05, 0.1)


def test_the_band_of_a_machine_measured_alone_holds_nine_of_ten_further_measurements() -> None:
    """Machines of all kinds, noise of 3 and 7 %, half the sizes measured. Large, middle and small
    sizes have three to five rows each."""
    node, draw, held = load_cluster("dgx-h100").nccl, random.Random(7), list[bool]()
    assert node is not None
    for trial in range(8):
        curve = on_a_curve(draw.uniform(20, 60), draw.uniform(280, 470), draw.uniform(20, 150))
        noise = (0.03, 0.07)[trial % 2]
        sizes = [size for size in curve if size >= 2**14]
        rows = [
            replace(of_eight(size), seconds=curve[size] * exp(draw.gauss(0, noise)) / 1e6)
            for size in sizes[::2]
        ]
        (fitted,) = fit_collectives.fit(rows, node, source="a.csv").curves
        for size in sizes[1::2]:
            predicted = predict(of_eight(size), curves=with_curve(CURVES, fitted, node))
            held += [
                predicted.low <= curve[size] * exp(draw.gauss(0, noise)) <= predicted.high
                for _ in range(5)
            ]
    assert len(held) == 8 * 10 * 5
    assert sum(held) >= 0.9 * len(held)


def test_one_or_two_rows_do_not_narrow_a_band(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = published("nvls", "all_reduce")
    times = {
        size: us
        for size, us in on_a_curve(28, 470, 50).items()
        if size >= 2**24 or size in (2**14, 2**17)
    }
    assert bands_of(all_reduces(tmp_path / "a.csv", times), capsys) == (
        0.05, before.band_middle, before.band_small,
    )


def test_a_curve_that_its_own_rows_scatter_about_has_a_band_that_says_so_where_they_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = on_a_curve(28, 470, 50)
    for index, size in enumerate(size for size in times if size < 2**20):
        times[size] *= 1.5 if index in (2, 6) else 1.0
    large, middle, small = bands_of(all_reduces(tmp_path / "a.csv", times), capsys)
    assert (large, middle) == (0.05, 0.05)
    assert 0.3 <= small < 0.4  # 1 - 1/1.5


def test_a_size_that_no_other_vouches_for_is_not_trusted_although_the_fit_meets_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only 16 MiB of four sizes shows what middle ones have added: six times the preset's."""
    times = {
        size: us
        for size, us in on_a_curve(28, 470, 300).items()
        if size in (2**12, 2**18, 2**24, 2**33)
    }
    path = all_reduces(tmp_path / "a.csv", times)
    assert main.main(["calibrate", "--from", str(path), "--cluster", "dgx-h100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["collectives"]["fitted"]["max"] < 0.1
    assert bands_of(path, capsys)[1] > 0.3


def test_sizes_of_which_there_is_no_row_keep_the_band_that_they_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {size: us for size, us in on_a_curve(28, 470, 50).items() if size >= 2**26}
    before = published("nvls", "all_reduce")
    assert bands_of(all_reduces(tmp_path / "a.csv", times), capsys) == (
        0.05, before.band_middle, before.band_small,
    )


@pytest.mark.parametrize("times", [1.0, 1.2, 1.6])
def test_one_number_of_nodes_does_not_vouch_for_others(
    times: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The band is no narrower than that of the published curve, or than what this one misses the
    one number by. It is wider by what a smooth curve misses where NCCL changes its protocol."""
    four = replace(of_eight(0), op="all_gather", cluster=load_cluster("dgx-h100", nodes=4))
    sizes = [1 << power for power in range(16, 32)]
    took = {
        size: times * predict(replace(four, nbytes=size), curves=CURVES).microseconds
        for size in sizes
    }
    path = all_reduces(tmp_path / "a.csv", took, {"collective": "all_gather", "cluster.nodes": "4"})
    before = published("network", "all_gather")
    widths = zip(
        (0.05, 0.05, 0.1), (before.band, before.band_middle, before.band_small), strict=True
    )
    for width, (least, most) in zip(bands_of(path, capsys), widths, strict=True):
        narrowest = max(least, min(1 - 1 / times, most))
        assert 0.98 * narrowest <= width <= 1.02 * max(narrowest, 0.2)


def test_a_preset_predicts_what_is_left_out_as_it_does_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NCCL chooses the ring where that is faster, as with few ranks and small messages."""
    path = all_reduces(
        tmp_path / "a.csv", {1 << power: 40.0 for power in range(12, 20)}, {"cluster.ranks": "6"}
    )
    assert main.main(["calibrate", "--from", str(path), "--cluster", "dgx-h100", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["collectives"]
    rows = [row for row in read(path) if isinstance(row, Collective)]
    assert [row["left_out"] for row in printed["rows"]] == pytest.approx(
        [predict(row).microseconds / 40 - 1 for row in rows]
    )
    assert {predict(row).algorithm for row in rows} == {"ring"}
    assert [curve["scope"] for curve in printed["curves"]] == ["nvls"]


def test_a_ring_that_was_forced_has_its_own_curve_and_says_nothing_of_the_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forced = all_reduces(tmp_path / "ring.csv", on_a_curve(35, 330, 60), FORCED)
    chosen = all_reduces(tmp_path / "own.csv", on_a_curve(90, 440, 60))
    assert main.main(
        ["calibrate", "--from", str(forced), str(chosen), "--cluster", "dgx-h100", "--json"]
    ) == 0
    printed = json.loads(capsys.readouterr().out)["collectives"]
    assert [curve["scope"] for curve in printed["curves"]] == ["nvls", "ring"]
    assert printed["fitted"]["max"] < 0.02


def test_what_two_files_hold_alike_is_counted_once_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(nccl_text(slower(1.0)))
    logs, out = (
        [str(tmp_path / name) for name in ("a.txt", "a.txt", "b.txt")], tmp_path / "mine.toml",
    )
    assert main.main(
        ["calibrate", "--from", *logs, "--cluster", "dgx-h100", "--out", str(out), "--json"]
    ) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["collectives"]["fitted"]["n"] == len(SIZES)
    same = "holds the same as a.txt: counted once"
    assert printed["skipped"] == [
        {"source": name, "line": 1, "reason": same} for name in ("a.txt", "b.txt")
    ]
    assert out.read_text().startswith(f"# calibrated on {len(SIZES)} collectives of a.txt\n")


def test_rows_that_others_predict_when_they_are_left_out_name_no_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, times in enumerate((1.0, 1.2)):
        (tmp_path / f"{number}.txt").write_text(nccl_text(slower(times)))
    logs = [str(tmp_path / f"{number}.txt") for number in range(2)]
    assert main.main(["calibrate", "--from", *logs, "--cluster", "dgx-h100", "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    assert [group["by_preset"] for group in groups] == ["", ""]


def test_rows_of_other_machines_and_shared_networks_are_skipped_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = {"network.least": "0.3", "network.most": "3"}
    rows = [
        GATHER, GATHER | {"cluster.preset": "dgx-a100"},
        GATHER | {"cluster.nodes": "2", "cluster.fabric": "efa"},
        GATHER | {"cluster.nodes": "2"} | shared,
    ]
    path = table(tmp_path / "n.csv", *rows)
    assert main.main(["calibrate", "--from", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["collectives"]["fitted"]["n"] == 1
    assert [each["reason"] for each in printed["skipped"]] == [
        "ampere on nvlink: another machine than the cluster's hopper on nvlink",
        "network efa: another than the cluster's ib",
        "others used the network: congestion, not the cluster",
    ]


def test_measurements_of_another_machine_alone_are_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.txt").write_text(nccl_text(slower(1.0)))
    assert (
        main.main(["calibrate", "--from", str(tmp_path / "log.txt"), "--cluster", "dgx-a100"]) == 2
    )
    assert (
        "found ran on NVIDIA H100 80GB HBM3, and dgx-a100 has A100 SXM 80 GB"
        in capsys.readouterr().err
    )


def test_an_unknown_cluster_is_refused_before_anything_is_fitted(
    capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["calibrate", "--from", "none.csv", "--cluster", "dgx-h10"]) == 2
    assert "did you mean dgx-h100?" in capsys.readouterr().err


def test_saved_runs_are_measurements_of_their_scenarios(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs whose steps took 8 % longer than predicted; that of another scenario is named. Two
    models: one at two lengths is one group."""
    whole = (
        (SCENARIOS / "published" / "llama-3-8b-8-h100.toml").read_text().partition("[expect]")[0]
    )
    paths = []
    for name, layers, length in (("two", 2, 8192), ("short", 2, 4096), ("four", 4, 8192)):
        path = tmp_path / "scenarios" / f"{name}.toml"
        path.parent.mkdir(exist_ok=True)
        cut = whole.replace('preset = "llama-3-8b"', f'preset = "llama-3-8b", num_layers = '
                                                     f'{layers}')
        path.write_text(cut.replace("sequence_length = 8192", f"sequence_length = {length}"))
        run = SimBackend().run(load(path), options=RunOptions())
        longer = replace(
            run, backend="nccl", step_time_ns=round(1.08 * (run.step_time_ns or 0)),
            provenance={
                **run.provenance, "device": "NVIDIA H100 80GB HBM3"
            },  # as torch calls what the scenario calls an H100
        )
        paths.append(tmp_path / f"{name}.json")
        saved.save(longer, paths[-1])
    saved.save(
        replace(longer, provenance={**longer.provenance, "fingerprint": "0"}),
        tmp_path / "other.json",
    )
    names = list(map(str, paths))
    assert main.main(
        ["calibrate", "--from", *names, "--scenarios", str(tmp_path / "scenarios"), "--json"]
    ) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {row["source"] for row in printed["rows"]} == {"two.json", "short.json", "four.json"}
    groups = {row["source"]: tuple(row["group"]) for row in printed["rows"]}
    assert groups["two.json"] == groups["short.json"] != groups["four.json"]
    assert groups["two.json"][0] == "H100 SXM 80 GB"
    assert printed["fitted"]["max"] < 0.04
    factors = {constant["name"]: constant["factor"] for constant in printed["constants"]}
    assert factors["matmul_efficiency"] < 0.98
    saved.save(
        replace(longer, provenance={**longer.provenance, "device": "NVIDIA A100-SXM4-80GB"}),
        tmp_path / "a100.json",
    )
    assert main.main([
        "calibrate", "--from", str(tmp_path / "a100.json"), "--scenarios",
        str(tmp_path / "scenarios"),
    ]) == 2
    assert (
        "ran on NVIDIA A100-SXM4-80GB, and the scenario's cluster is of H100 SXM 80 GB"
        in capsys.readouterr().err
    )
    assert main.main(["calibrate", "--from", *names]) == 2
    assert "--scenarios FOLDER" in capsys.readouterr().err
    assert main.main(
        ["calibrate", "--from", str(tmp_path / "other.json"), "--scenarios", str(tmp_path)]
    ) == 2
    assert (
        "no scenario four with the Run's fingerprint below --scenarios" in capsys.readouterr().err
    )
    assert load_cluster("dgx-h100").curves == ()


GPT = (
    'family = "gpt", sizes = { num_layers = 12, hidden_size = 768, num_heads = 12, vocabulary = '
    '50368 }'
)


@pytest.mark.parametrize(("written", "other", "same"), [
    ('preset = "llama-3-8b"', 'preset = "llama-3-8b", attention = "explicit"', True),
    ('preset = "llama-3-8b"', 'preset = "llama-3-8b", num_layers = 4', False),
    ('preset = "mpt-125m"', GPT, True),
    ('preset = "mpt-125m"', GPT.replace("num_heads = 12", "num_heads = 6"), False),
    ('preset = "mpt-125m"', GPT.replace("768", "576"), False),
])
def test_a_model_is_what_it_is_and_not_what_it_is_called(
    written: str, other: str, same: bool
) -> None:
    """Sequences of another length, and another attention, are the same model; other sizes are
    another."""
    models = [
        model_of(parse(scenario_of(table, length).encode(), where="row"))
        for table, length in ((written, 2048), (other, 1024))
    ]
    assert (models[0] == models[1]) == same


def scenario_of(model: str, length: int) -> str:
    """A scenario of eight H100 for a `model` table."""
    return f"""description = "A model"
model = {{ {model} }}
batch = {{ micro_batch = 1, sequence_length = {length} }}
cluster = {{ preset = "dgx-h100" }}
strategy = {{ name = "fsdp2", dp_shard = 8 }}
precision = {{ parameters = "bf16" }}
optimizer = {{ name = "adamw" }}
"""


def test_sums_of_profiles_are_skipped_by_name() -> None:
    """Products alone are faster than in training, which what is calibrated is for."""
    rows = steps(PUBLISHED / "tables" / "vtrain_megatron_ds_a100.csv")
    cases, skipped = planned_steps.prepared(rows[:3])
    assert cases == []
    assert {each.reason for each in skipped} == {planned_steps.SUMS}
    assert len(skipped) == 3


def test_a_band_of_many_errors_is_their_95th_percentile_and_of_few_by_students_t() -> None:
    many = [(-1) ** percent * percent / 100 for percent in range(1, 41)]
    assert fit_collectives._expected(many, published=0.05) == 0.39
    assert fit_collectives._expected([0.01, -0.01, 0.01, -0.01], published=0.05) == pytest.approx(
        2.13 * 0.01
    )
    assert fit_collectives._expected([0.01, -0.3, 0.01, -0.01], published=0.05) == pytest.approx(
        2.13 * 0.1504, rel=0.01
    )
    assert fit_collectives._expected([0.01, 0.02], published=0.05) == 0.05
