"""Rows that their links could not carry: named with the bound, averaged into nothing, fitted to
nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.published.convert import TABLES
from tests.zsim.calibration.tables import GATHER, STEP, table
from tests.zsim.calibration.test_fit_steps import nccl_text, slower
from zsim.calibration import accuracy, impossible
from zsim.calibration.data import table as tables
from zsim.calibration.records import Collective
from zsim.cli import main

LARGE = GATHER | {"bytes": "1 GiB", "measured.time": "2700 us"}


def test_a_collective_faster_than_its_links_is_named_with_the_bound_and_averaged_into_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """7/8 of a GiB at 450 GB/s are 2.088 ms. On 4 nodes a GPU's own NIC brings 50 GB/s more of
    31/32."""
    table(
        tmp_path / "n.csv", LARGE, LARGE | {"measured.time": "2000 us"},
        LARGE | {"cluster.nodes": "4", "measured.time": "2000 us"},
    )
    assert main.main(["accuracy", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [(row["line"], row["link"]) for row in printed["impossible"]] == [
        (3, "the links of a device"), (4, "the links of a device"),
    ]
    assert printed["impossible"][0]["least"] == pytest.approx(7 / 8 * 2**30 / 450e9, rel=1e-6)
    assert [row["line"] for row in printed["rows"]] == [2]
    assert [each["n"] for each in printed["groups"]] == [1]
    assert main.main(["accuracy", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "faster than their links can be, 2 rows, which no figure above includes:" in out
    assert (
        "  n.csv line 3: all_gather of 1.00 GiB over 8 ranks, measured 0.002 s; the links of a "
        "device need 0.00208783 s"
    ) in out


def test_between_nodes_it_is_their_nics_that_could_not_carry_a_row(tmp_path: Path) -> None:
    """A gather of 1 GiB over 2 p4d: half of it into each node, through 4 NICs of 12.5 GB/s."""
    table(tmp_path / "n.csv", LARGE | {"cluster.preset": "p4d", "cluster.nodes": "2"})
    report = accuracy.accuracy(tmp_path)
    (row,) = report.impossible
    assert (row.link, report.rows) == ("the NICs of a node", ())
    assert row.least == pytest.approx(2**29 / 50e9)


def test_a_folder_of_impossible_rows_alone_is_an_error_that_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table(tmp_path / "n.csv", LARGE | {"measured.time": "2 us"})
    assert main.main(["accuracy", str(tmp_path)]) == 2
    assert "n.csv line 2: all_gather of 1.00 GiB over 8 ranks" in capsys.readouterr().err


def test_a_step_is_no_shorter_than_the_bytes_of_its_collectives(tmp_path: Path) -> None:
    table(tmp_path / "s.csv", STEP, STEP | {"measured.step_time": "1 ms"})
    report = accuracy.accuracy(tmp_path)
    assert [row.line for row in report.rows] == [2]
    (row,) = report.impossible
    assert (row.line, row.label) == (3, "step")
    assert row.least > row.measured


def test_nothing_is_fitted_to_what_no_link_could_carry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times that are off by four: small messages may be so fast, large ones may not."""
    log, sizes = tmp_path / "log.txt", [1 << power for power in range(18, 32, 2)]
    log.write_text(nccl_text({size: us / 4 for size, us in slower(1.0, sizes).items()}))
    assert main.main(["calibrate", "--from", str(log), "--cluster", "dgx-h100", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    reason = "faster than its links can be: another time, size or network than it says"
    assert [each["reason"] for each in printed["skipped"]] == [reason] * 4
    assert printed["collectives"]["fitted"]["n"] == len(sizes) - 4


def test_no_published_row_is_impossible_and_a_shared_network_vouches_for_nothing() -> None:
    rows = [row for path in sorted(TABLES.glob("nccl_*.csv")) for row in tables.read(path)]
    assert len(rows) == 333
    measured = [row for row in rows if isinstance(row, Collective)]
    assert [impossible.of_collective(row) for row in measured] == [None] * len(rows)
