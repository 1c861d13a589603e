"""Tables that are broken, empty or huge: what is wrong with them is said, and in a time that grows with their size alone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.zsim.test_measurements import FOUNDRY, table
from zsim import accuracy, cli, measurements
from zsim.accuracy import spearman
from zsim.measurements import MeasurementError, Skipped
from zsim.measurements.nccl_files import read_csv

NCCL = "collective,gpu,n_ranks,n_nodes,size_bytes,time_us"


def between(path: Path, separator: str, row: dict[str, str]) -> str:
    """Why a row is skipped whose fields are joined without quotes."""
    path.write_text("".join(separator.join(cells) + "\n" for cells in (row.keys(), row.values())))
    (skipped,) = measurements.rows(path)
    assert isinstance(skipped, Skipped)
    return skipped.reason


@pytest.mark.parametrize(("separator", "name"), [(",", "commas"), (";", "semicolons"), ("\t", "tabs")])
def test_a_line_that_does_not_fit_its_header_says_what_its_fields_are_between(tmp_path: Path, separator: str, name: str) -> None:
    """A separator inside a field that is not quoted is one field more."""
    count, row = len(FOUNDRY), FOUNDRY | {"model": f"mpt-125m{separator} tuned"}
    expected = f"more or fewer fields than the header: expected {count} between {name}, found {count + 1}"
    assert between(tmp_path / "a.csv", separator, row) == expected


@pytest.mark.parametrize(("separator", "name"), [(";", "semicolons"), ("\t", "tabs")])
def test_lines_between_other_separators_than_their_header_say_which(tmp_path: Path, separator: str, name: str) -> None:
    reason = f"more or fewer fields than the header: expected {len(FOUNDRY)} between commas, found 1 with {len(FOUNDRY) - 1} {name} in them"
    path = tmp_path / "a.csv"
    path.write_text(",".join(FOUNDRY) + "\n" + separator.join(FOUNDRY.values()) + "\n")
    assert measurements.rows(path) == [Skipped(source="a.csv", line=2, reason=reason)]
    row = separator.join(["all_reduce", "A100", "8", "1", "1073741824", "8203.9"])
    reason = f"more or fewer fields than the header: expected 6 between commas, found 1 with 5 {name} in them"
    assert read_csv(f"{NCCL}\n{row}\n", source="a").reasons == {reason: 1}


@pytest.mark.parametrize("header", [",".join(FOUNDRY), "gpu,dtype,tflops,shape_mxnxk", NCCL])
def test_a_header_without_rows_is_skipped_by_name(tmp_path: Path, header: str) -> None:
    (tmp_path / "empty.csv").write_text(header + "\n")
    reason = Skipped(source="empty.csv", line=1, reason="no rows under its header")
    assert measurements.rows(tmp_path / "empty.csv") == [reason]
    table(tmp_path / "full.csv", FOUNDRY)
    found = accuracy.accuracy(tmp_path)
    assert (len(found.rows), found.skipped) == (1, (reason,))


def test_a_path_that_is_not_there_is_said_not_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["accuracy", str(tmp_path / "none")], ["calibrate", "--from", str(tmp_path / "none"), "--cluster", "dgx-h100"]):
        assert cli.main(command) == 2
        assert "found nothing: there is no file or folder of that name" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    with pytest.raises(MeasurementError, match="found none$"):
        measurements.files(tmp_path / "empty")


def test_a_header_of_very_many_columns_is_refused_at_once() -> None:
    wide = ",".join([NCCL, *(f"c{place}" for place in range(200_000))])
    before = time.process_time()
    assert read_csv(f"{wide}\n1,2\n", source="a").reasons == {"CSV damaged: 200,006 columns, more than 1,000": 1}
    assert time.process_time() - before < 3


def test_two_columns_of_one_name_are_refused_in_tables_of_collectives_too() -> None:
    assert read_csv(f"{NCCL},Time_us\n", source="a").reasons == {"CSV damaged: two columns 'time_us'": 1}


def test_ranks_of_many_equal_values_take_no_longer_than_of_others() -> None:
    """By a mean of all its ties for each of them this takes minutes."""
    before = time.process_time()
    assert spearman([1.0] * 20_000 + [2.0], [2.0] * 20_000 + [1.0]) == pytest.approx(-1)
    assert time.process_time() - before < 3


def test_ties_share_the_middle_of_their_places() -> None:
    assert spearman([3, 1, 3, 2], [30, 10, 30, 20]) == pytest.approx(1)
    assert spearman([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486832980505138)
