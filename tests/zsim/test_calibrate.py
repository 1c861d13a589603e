"""Constants fitted to measured steps: what made the steps is found again, groups are left out, the file says what it is made from."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from tests.zsim.test_measurements import FOUNDRY, table
from zsim import calibrate, cli, cluster_file, measurements
from zsim.calibrate import CalibrationError
from zsim.devices import load_device

SMALL = {"n_layers": "2", "tokens_per_s_per_gpu": "", "global_batch_seqs": "", "grad_accum": "1"}
ROWS = [
    FOUNDRY | SMALL | {"model": name, "d_model": str(width), "micro_batch": str(batch)}
    for name, width, batch in (("a", 2048, 8), ("a", 2048, 4), ("b", 4096, 8), ("b", 4096, 4))
]


def cases(folder: Path) -> list[calibrate.Case]:
    columns, records = measurements.read(table(folder / "t.csv", *ROWS))
    found, skipped = calibrate.prepared(measurements.steps(measurements.source_of(columns), records, file="t.csv"))
    assert not skipped
    return found


def measured(folder: Path, factors: dict[tuple[str, str], float]) -> Path:
    """The rows as they would be measured on a device whose constants are `factors` times the preset's."""
    rows = []
    for row, case in zip(ROWS, cases(folder), strict=True):
        tokens = int(row["seq_len"]) * int(row["micro_batch"]) * 8
        rows.append(row | {"tokens_per_s": repr(tokens / calibrate.predicted(case, factors))})
    return table(folder / "measured.csv", *rows)


def test_what_made_the_measurements_is_found_and_left_out_groups_are_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Products that are 6 % slower: most of it is found in matmul_efficiency, and the rest in what works alike."""
    path = measured(tmp_path, {("A100", "matmul_efficiency"): 0.94})
    out = tmp_path / "mine.toml"
    assert cli.main(["calibrate", "--from", str(path), "--cluster", "dgx-a100-40", "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    factors = {(one["generation"], one["name"]): one["factor"] for one in found["constants"]}
    assert factors["A100", "matmul_efficiency"] < 0.97
    assert factors["A100", "attention.rate"] == pytest.approx(1, abs=0.05)
    assert factors["", "matmul_prologue"] > 1  # whose prior is wide, and which makes products slower too
    assert found["fitted"]["max"] < 0.015
    assert found["left_out"]["max"] < 0.03
    assert len({tuple(row["group"]) for row in found["rows"]}) == 2
    written = tomllib.loads(out.read_text())["device"]["matmul_efficiency"]
    assert written["provenance"] == "calibrated"
    assert written["source"].startswith("measured.csv; before: 80.3 %")
    assert written["value"] == f"{80.3 * factors['A100', 'matmul_efficiency']:.4g} %"


def test_the_preset_is_kept_where_the_measurements_are_its_own(tmp_path: Path) -> None:
    columns, records = measurements.read(measured(tmp_path, {}))
    rows = measurements.steps(measurements.source_of(columns), records, file="t.csv")
    fitted = calibrate.fit(calibrate.prepared(rows)[0])
    assert all(abs(factor - 1) < 1e-3 for factor in fitted.factors.values())
    assert max(map(abs, (*fitted.errors, *fitted.left_out))) < 1e-4
    assert fitted.device(load_device("a100-40")).num_sms == 108


def test_one_group_alone_cannot_be_calibrated_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(tmp_path / "t.csv", *ROWS[:2])
    assert cli.main(["calibrate", "--from", str(path)]) == 2
    assert "expected rows of at least two groups" in capsys.readouterr().err


def test_a_table_of_no_known_source_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(tmp_path / "t.csv", {"a": "1"})
    assert cli.main(["calibrate", "--from", str(path)]) == 2
    assert "expected columns of a known source" in capsys.readouterr().err


def test_no_rows_are_no_calibration() -> None:
    with pytest.raises(CalibrationError):
        calibrate.fit([])


@pytest.mark.parametrize("preset", ["dgx-h100", "p4d", "cpu-gloo"])
def test_a_clusters_file_holds_every_number_of_its_preset(preset: str) -> None:
    fitted = calibrate.Fitted(factors={}, errors=(0.01,), left_out=(0.02,), cases=())
    table_of = tomllib.loads(cluster_file.text(preset, fitted, source="none"))
    device = load_device({"dgx-h100": "h100-80", "p4d": "a100-40", "cpu-gloo": "cpu-core"}[preset])
    assert {
        f"device.{key}" for key, value in table_of["device"].items() if isinstance(value, dict) and "value" in value
    } <= {f.key for f in device.figures}
    assert {"links", "overheads", "host", "collectives"} <= set(table_of)
