"""Lines of an nccl-tests log: none that holds a row is lost, whatever was written before it or into it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zsim.test_nccl_rows import GIB, LOG
from zsim import cli
from zsim.measurements.nccl_checks import Skipped
from zsim.measurements.nccl_logs import read_text

ROWS = LOG.splitlines()[10:12]


def with_second(line: str) -> str:
    return LOG.replace(ROWS[1], line)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("node0: NCCL WARN foo" + ROWS[1], "expected a size in bytes where its line begins, found 'node0:'"),
        ("+ " + ROWS[1], "expected a size in bytes where its line begins, found '+'"),
        ("# " + ROWS[1], "expected a size in bytes where its line begins, found '#'"),
        (ROWS[1].replace("2147483648", "2G"), "expected a size in bytes where its line begins, found '2G'"),
        ("2G " + ROWS[1], "expected a size in bytes where its line begins, found '2G'"),
        (ROWS[1].replace("2147483648", "2.1e9"), "expected a size in bytes where its line begins, found '2.1e9'"),
        (ROWS[1].replace("2147483648", "2,147,483,648"), "expected a size in bytes where its line begins, found '2,147,483,648'"),
        ("2G 536870912 float sum", "expected a size in bytes where its line begins, found '2G'"),
        (ROWS[1][:50], "fewer fields than the table has"),
        (ROWS[1].replace(" 5990.00", " node0: NCCL WARN foo 5990.00", 1), "time missing or no number"),
        (ROWS[1][58:], "expected a size in bytes where its line begins, found '5990.00'"),
    ],
)
def test_a_line_that_holds_a_row_and_is_none_is_skipped_by_its_line(tmp_path: Path, line: str, reason: str) -> None:
    found = read_text(with_second(line), source="a.log")
    assert [row.size_bytes for row in found.rows] == [GIB]
    assert found.skipped == (Skipped(source="a.log", line=12, reason=reason),)


@pytest.mark.parametrize(
    "line",
    [
        "node0:12:34 [0] NCCL INFO Channel 00/24 :    0   1   2   3   4   5   6   7",
        "node0:12:34 [0] NCCL INFO === System : maxBw 20.0 totalBw 160.0 ===",
        "node0:12:34 [3] NCCL WARN Timeout after 1800 s",
        "node0:12:34 [0] NCCL INFO Trees [0] 1/-1/-1->0->-1 [1] 2/-1/-1->0->-1",
        "# Out of bounds values : 0 OK",
        "",
    ],
)
def test_what_nccl_itself_reports_is_no_row(line: str) -> None:
    found = read_text(LOG.replace(ROWS[1], f"{line}\n{ROWS[1]}"), source="a.log")
    assert ([row.line for row in found.rows], found.skipped) == ([11, 13], ())


def test_lines_that_hold_rows_count_where_a_log_was_cut() -> None:
    cut = with_second("+ " + ROWS[1]).partition("# Out of bounds")[0]
    assert read_text(cut, source="a.log").reasons == {"log cut: no closing summary": 2}
    only = LOG.replace(ROWS[0] + "\n", "").replace(ROWS[1], "+ " + ROWS[1])
    assert list(read_text(only, source="a.log").reasons) == ["expected a size in bytes where its line begins, found '+'"]


def test_a_skipped_line_is_explained_by_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.log").write_text(with_second("node0: NCCL WARN foo" + ROWS[1]))
    assert cli.main(["accuracy", str(tmp_path), "--explain", "a.log:12"]) == 0
    assert capsys.readouterr().out == "# skipped: expected a size in bytes where its line begins, found 'node0:'\n"
