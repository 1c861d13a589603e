"""Tables that are broken, empty or huge: what is wrong with them is said, and in a time that grows
with their size alone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.zsim.calibration.nccl_tests.test_nccl_rows import LOG
from tests.zsim.calibration.tables.test_measurements import FOUNDRY, table
from zsim.calibration import accuracy, tables
from zsim.calibration.accuracy import spearman
from zsim.calibration.nccl_tests.files import read_csv
from zsim.calibration.nccl_tests.text_logs import read_text
from zsim.calibration.tables import MeasurementError, Skipped
from zsim.cli import main

NCCL = "collective,gpu,n_ranks,n_nodes,size_bytes,time_us"


def between(path: Path, separator: str, row: dict[str, str]) -> str:
    """Why a row is skipped whose fields are joined without quotes."""
    path.write_text("".join(separator.join(cells) + "\n" for cells in (row.keys(), row.values())))
    (skipped,) = tables.rows(path)
    assert isinstance(skipped, Skipped)
    return skipped.reason


@pytest.mark.parametrize(
    ("separator", "name"), [(",", "commas"), (";", "semicolons"), ("\t", "tabs")]
)
def test_a_line_that_does_not_fit_its_header_says_what_its_fields_are_between(
    tmp_path: Path, separator: str, name: str
) -> None:
    """A separator inside a field that is not quoted is one field more."""
    count, row = len(FOUNDRY), FOUNDRY | {"model": f"mpt-125m{separator} tuned"}
    expected = (
        f"more or fewer fields than the header: expected {count} between {name}, found {count + 1}"
    )
    assert between(tmp_path / "a.csv", separator, row) == expected


@pytest.mark.parametrize(("separator", "name"), [(";", "semicolons"), ("\t", "tabs")])
def test_lines_between_other_separators_than_their_header_say_which(
    tmp_path: Path, separator: str, name: str
) -> None:
    reason = (
        f"more or fewer fields than the header: expected {len(FOUNDRY)} between commas, found 1 "
        f"with {len(FOUNDRY) - 1} {name} in them"
    )
    path = tmp_path / "a.csv"
    path.write_text(",".join(FOUNDRY) + "\n" + separator.join(FOUNDRY.values()) + "\n")
    assert tables.rows(path) == [Skipped(source="a.csv", line=2, reason=reason)]
    row = separator.join(["all_reduce", "A100", "8", "1", "1073741824", "8203.9"])
    reason = (
        f"more or fewer fields than the header: expected 6 between commas, found 1 with 5 {name} "
        f"in them"
    )
    assert read_csv(f"{NCCL}\n{row}\n", source="a").reasons == {reason: 1}


@pytest.mark.parametrize("header", [",".join(FOUNDRY), "gpu,dtype,tflops,shape_mxnxk", NCCL])
def test_a_header_without_rows_is_skipped_by_name(tmp_path: Path, header: str) -> None:
    (tmp_path / "empty.csv").write_text(header + "\n")
    reason = Skipped(source="empty.csv", line=1, reason="no rows under its header")
    assert tables.rows(tmp_path / "empty.csv") == [reason]
    table(tmp_path / "full.csv", FOUNDRY)
    found = accuracy.accuracy(tmp_path)
    assert (len(found.rows), found.skipped) == (1, (reason,))


@pytest.mark.parametrize("name", ["sep=;", "SEP=;", '"sep=;"'])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_first_line_that_says_what_fields_are_between_is_no_header(
    tmp_path: Path, name: str, end: str
) -> None:
    """As spreadsheets write it, before headers in which another sign stands more often. Lines are
    counted as an editor does."""
    steps, collectives = tmp_path / "steps.csv", tmp_path / "collectives.csv"
    more = FOUNDRY | {"notes,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,": "none"}
    steps.write_bytes(
        "".join(f"{line}{end}" for line in (name, ";".join(more), ";".join(more.values()))).encode()
    )
    row = ["all_reduce", "A100", "8", "1", "1073741824", "8203.9"]
    collectives.write_bytes(
        "".join(f"{line}{end}" for line in (name, NCCL.replace(",", ";"), ";".join(row))).encode()
    )
    for path in (steps, collectives):
        (found,) = tables.rows(path)
        assert not isinstance(found, Skipped), found
        assert found.line == 3


def test_a_separator_that_nobody_reads_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("sep=|\na|b\n1|2\n")
    (found,) = tables.rows(path)
    assert isinstance(found, Skipped)
    assert found.reason == "columns of no known source: sep=| (2 rows)"


@pytest.mark.parametrize("column", ["model", "notes"])
def test_a_row_of_steps_with_a_nul_byte_is_skipped_by_name_and_the_others_are_kept(
    tmp_path: Path, column: str
) -> None:
    path = table(
        tmp_path / "a.csv", FOUNDRY | {"notes": ""}, FOUNDRY | {column: "mpt\0"},
        FOUNDRY | {"notes": ""},
    )
    found = tables.rows(path)
    assert [row for row in found if isinstance(row, Skipped)] == [
        Skipped(source="a.csv", line=3, reason="damaged: a NUL byte in it")
    ]
    assert len(found) == 3


def test_a_row_of_collectives_with_a_nul_byte_is_skipped_by_name() -> None:
    good = "all_reduce,A100,8,1,1073741824,8203.9,x"
    found = read_csv(f"{NCCL},job_id\n{good}\n{good}\0\n{good}\n", source="a")
    assert (len(found.rows), found.reasons) == (2, {"damaged: a NUL byte in it": 1})


def test_a_header_with_a_nul_byte_is_a_damaged_file(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", FOUNDRY)
    path.write_text(path.read_text().replace("model", "mod\0el", 1))
    with pytest.raises(MeasurementError, match="its header is damaged: a NUL byte in it"):
        tables.rows(path)
    assert read_csv(f"{NCCL},job\0\n", source="a").reasons == {"CSV damaged: its header is "
                                                               "damaged: a NUL byte in it": 1}


def test_a_log_with_nul_bytes_loses_the_rows_that_have_them_or_is_refused() -> None:
    """In the in-place columns, which are not read, and in a size; in a line of its header there is
    no telling what it said."""
    times, sizes = " 5990.00  358.51  358.51       0\n", "\n  2147483648 "
    for old, new in ((times, times.replace(".", ".\0")), (sizes, sizes.replace("7", "7\0"))):
        assert LOG.count(old) == 1
        found = read_text(LOG.replace(old, new), source="run.log")
        assert (len(found.rows), found.reasons) == (1, {"damaged: a NUL byte in it": 1})
    found = read_text(LOG.replace("device  1", "device  1\0"), source="run.log")
    assert found.reasons == {"what it says of its run is damaged: a NUL byte in it": 2}


def test_a_path_that_is_not_there_is_said_not_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (
        ["accuracy", str(tmp_path / "none")],
        ["calibrate", "--from", str(tmp_path / "none"), "--cluster", "dgx-h100"],
    ):
        assert main.main(command) == 2
        assert "found nothing: there is no file or folder of that name" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    with pytest.raises(MeasurementError, match="found none$"):
        tables.files(tmp_path / "empty")


def test_a_header_of_very_many_columns_is_refused_at_once() -> None:
    wide = ",".join([NCCL, *(f"c{place}" for place in range(200_000))])
    before = time.process_time()
    assert read_csv(f"{wide}\n1,2\n", source="a").reasons == {"CSV damaged: 200,006 columns, "
                                                              "more than 1,000": 1}
    assert time.process_time() - before < 3


def test_two_columns_of_one_name_are_refused_in_tables_of_collectives_too() -> None:
    assert read_csv(f"{NCCL},Time_us\n", source="a").reasons == {"CSV damaged: two columns "
                                                                 "'time_us'": 1}


def test_ranks_of_many_equal_values_take_no_longer_than_of_others() -> None:
    """By a mean of all its ties for each of them this takes minutes."""
    before = time.process_time()
    assert spearman([1.0] * 20_000 + [2.0], [2.0] * 20_000 + [1.0]) == pytest.approx(-1)
    assert time.process_time() - before < 3


def test_ties_share_the_middle_of_their_places() -> None:
    assert spearman([3, 1, 3, 2], [30, 10, 30, 20]) == pytest.approx(1)
    assert spearman([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486832980505138)


def test_a_copy_of_a_file_is_skipped_by_name_and_a_row_that_stands_twice_counts_twice(
    tmp_path: Path
) -> None:
    """Copies under any name, below folders too; measurements may be repeated and come out alike."""
    text = f"{NCCL}\n" + "all_reduce,A100,8,1,1073741824,8203.9\n" * 2
    (tmp_path / "below").mkdir()
    for name in ("a.csv", "b.csv", "below/a.txt"):
        (tmp_path / name).write_text(text)
    (tmp_path / "c.csv").write_text(text + "all_reduce,A100,8,1,1073741824,8203.9\n")
    found = accuracy.accuracy(tmp_path)
    assert [(row.source, row.line) for row in found.rows] == [
        ("a.csv", 2), ("a.csv", 3), ("c.csv", 2), ("c.csv", 3), ("c.csv", 4)
    ]
    reason = "holds the same as a.csv: counted once"
    assert found.skipped == tuple(
        Skipped(source=name, line=1, reason=reason) for name in ("b.csv", "below/a.txt")
    )


def test_a_copy_is_read_where_the_first_file_could_not_be(tmp_path: Path) -> None:
    """A log that does not say what it ran: the name of the second file does."""
    for name in ("a.log", "all_reduce.log"):
        (tmp_path / name).write_text(LOG.replace("all_reduce_perf", "perf"))
    found = accuracy.accuracy(tmp_path)
    assert [row.source for row in found.rows] == ["all_reduce.log"] * 2
    assert [row.source for row in found.skipped] == ["a.log"]
