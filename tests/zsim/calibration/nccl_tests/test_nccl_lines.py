"""Lines of an nccl-tests log: none that holds a row is lost, whatever was written before it or into
it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.zsim.calibration.nccl_tests.test_nccl_logs import GIB, LOG, report
from zsim.calibration.nccl_tests.json_logs import read_json
from zsim.calibration.nccl_tests.log_lines import why_not_its_count
from zsim.calibration.nccl_tests.text_logs import read_text
from zsim.calibration.records import Skipped
from zsim.cli import main

ROWS = LOG.splitlines()[10:12]


def with_second(line: str) -> str:
    return LOG.replace(ROWS[1], line)


@pytest.mark.parametrize(("line", "reason"), [
    ("node0: NCCL WARN foo" + ROWS[1],
     "expected a size in bytes where its line begins, found 'node0:'"),
    ("+ " + ROWS[1], "expected a size in bytes where its line begins, found '+'"),
    ("# " + ROWS[1], "expected a size in bytes where its line begins, found '#'"),
    (ROWS[1].replace("2147483648", "2G"),
     "expected a size in bytes where its line begins, found '2G'"),
    ("2G " + ROWS[1], "expected a size in bytes where its line begins, found '2G'"),
    (ROWS[1].replace("2147483648", "2.1e9"),
     "expected a size in bytes where its line begins, found '2.1e9'"),
    (ROWS[1].replace("2147483648", "2,147,483,648"),
     "expected a size in bytes where its line begins, found '2,147,483,648'"),
    ("2G 536870912 float sum", "expected a size in bytes where its line begins, found '2G'"),
    (ROWS[1][:50], "fewer fields than the table has"),
    (ROWS[1].replace(" 5990.00", " node0: NCCL WARN foo 5990.00", 1),
     "time: expected a number of at least 0, found 'node0:'"),
    (" 5990.00 358.51 358.51 0 5990.00 358.51 358.51 0",
     "expected a size in bytes where its line begins, found '5990.00'"),
])
def test_a_line_that_holds_a_row_and_is_none_is_skipped_by_its_line(
    tmp_path: Path, line: str, reason: str
) -> None:
    log = read_text(with_second(line), source="a.log")
    assert [row.nbytes for row in log.rows] == [GIB]
    assert log.skipped == (Skipped(source="a.log", line=12, reason=reason),)


@pytest.mark.parametrize("line", [
    "node0:12:34 [0] NCCL INFO Channel 00/24 :    0   1   2   3   4   5   6   7",
    "node0:12:34 [0] NCCL INFO === System : maxBw 20.0 totalBw 160.0 ===",
    "node0:12:34 [3] NCCL WARN Timeout after 1800 s",
    "node0:12:34 [0] NCCL INFO Trees [0] 1/-1/-1->0->-1 [1] 2/-1/-1->0->-1",
    "# Out of bounds values : 0 OK", "",
])
def test_what_nccl_itself_reports_is_no_row(line: str) -> None:
    log = read_text(LOG.replace(ROWS[1], f"{line}\n{ROWS[1]}"), source="a.log")
    assert ([row.line for row in log.rows], log.skipped) == ([11, 13], ())


def test_lines_that_hold_rows_count_where_a_log_was_cut() -> None:
    cut = with_second("+ " + ROWS[1]).partition("# Out of bounds")[0]
    assert read_text(cut, source="a.log").reasons == {"log cut: no closing summary": 2}
    only = LOG.replace(ROWS[0] + "\n", "").replace(ROWS[1], "+ " + ROWS[1])
    assert list(read_text(only, source="a.log").reasons) == ["expected a size in bytes where its "
                                                             "line begins, found '+'"]


def test_a_skipped_line_is_explained_by_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.log").write_text(with_second("node0: NCCL WARN foo" + ROWS[1]))
    assert main.main(["accuracy", str(tmp_path), "--explain", "a.log:12"]) == 0
    assert capsys.readouterr().out == (
        "# skipped: expected a size in bytes where its line begins, found 'node0:'\n"
    )


def test_a_size_is_that_of_its_elements() -> None:
    reason = "size 2147483648 contradicts 536870913 elements of float, which are 2147483652 bytes"
    log = read_text(LOG.replace(" 536870912 ", " 536870913 "), source="a.log")
    assert ([row.nbytes for row in log.rows], log.reasons) == ([GIB], {reason: 1})
    whole = report()
    whole["results"][0]["count"] = GIB  # type: ignore[index]
    reason = f"size {GIB} contradicts {GIB} elements of float, which are {4 * GIB} bytes"
    assert read_json(json.dumps(whole), source="a.json").reasons[reason] == 1


@pytest.mark.parametrize(("collective", "count", "dtype", "fits"), [
    ("all_gather", "32768", "float", True), ("all_gather", "262144", "float", False),
    ("all_gather", "65536", "bfloat16", True), ("all_gather", "131072", "int8", True),
    ("reduce_scatter", "16384", "double", True), ("reduce_scatter", "16385", "double", False),
    ("all_reduce", "262144", "float", True), ("broadcast", "32768", "float", False),
    ("broadcast", "1", "float4", True),
])
def test_a_count_is_that_of_a_part_where_each_rank_has_one(
    collective: str, count: str, dtype: str, fits: bool
) -> None:
    """1 MiB of 8 ranks; of a dtype that nobody knows nothing is said."""
    assert (why_not_its_count(collective, ["1048576", count, dtype], ranks=8) == "") == fits


@pytest.mark.parametrize(("old", "new", "reason"), [
    ("nThread 1 nGpus 2", "nThread 1 nGpus 8", "devices of 2 ranks are listed, where each "
                                               "process has 8 (nThread 1, nGpus 8)"),
    ("nThread 1 nGpus 2", "nThread 4 nGpus 1", "devices of 2 ranks are listed, where each "
                                               "process has 4 (nThread 4, nGpus 1)"),
    ("Rank  1", "Rank  2", "devices of 2 ranks are listed, and none of rank 1"),
    ("Rank  1", "Rank 9999999", "devices of 2 ranks are listed, and none of rank 1"),
    ("Rank  1", "Rank  0", "devices of 2 ranks are listed, some of them twice"),
])
def test_a_run_that_does_not_list_all_its_ranks_is_skipped(old: str, new: str, reason: str) -> None:
    log = read_text(LOG.replace(old, new), source="a.log")
    assert (log.rows, log.reasons) == ((), {reason: 2})


def test_processes_of_fewer_gpus_are_several() -> None:
    assert len(read_text(LOG.replace("nGpus 2", "nGpus 1"), source="a.log").rows) == 2


@pytest.mark.parametrize(("key", "value"), [("ngpus", 8), ("nthreads", 3)])
def test_so_is_one_in_json(key: str, value: int) -> None:
    whole = report()
    assert len(read_json(json.dumps(whole), source="a.json").rows) == 1
    whole["config"][key] = value  # type: ignore[index]
    assert next(iter(read_json(json.dumps(whole), source="a.json").reasons)).startswith(
        "devices of 4 ranks are listed, where each"
    )


@pytest.mark.parametrize("count", [1, 2, 10])
@pytest.mark.parametrize(("header", "key", "fewest", "message"), [
    ("agg iters: 1 validation: 1 graph: {}", "graph", 1,
     "launched as CUDA graphs (graph: {}), taken for"),
    ("agg iters: {} validation: 1 graph: 0", "aggregated_iterations", 2,
     "{} collectives in one launch (agg iters: {}), taken for"),
])
def test_launches_that_are_not_one_by_one_are_named_and_widen_the_band(
    header: str, key: str, fewest: int, message: str, count: int
) -> None:
    plain = read_text(
        LOG.replace("iters: 20\n", "iters: 20 agg iters: 1 validation: 1 graph: 0\n"),
        source="a.log",
    ).rows[0]
    row = read_text(
        LOG.replace("iters: 20\n", f"iters: 20 {header.format(count)}\n"), source="a.log"
    ).rows[0]
    assert plain.caveats == ()
    starts = [each.text.startswith(message.format(count, count)) for each in row.caveats]
    assert starts == [True] * (count >= fewest)
    assert sum(each.widens for each in row.caveats) == (0.5 if count >= fewest else 0.0)
    whole = report()
    whole["config"][key] = count  # type: ignore[index]
    assert read_json(json.dumps(whole), source="a.json").rows[0].caveats == row.caveats


def test_of_a_run_that_is_skipped_its_own_lines_are() -> None:
    cut = LOG.partition("# Out of bounds")[0]
    (whole,) = read_text(LOG + cut, source="a.log").skipped
    count = len(LOG.splitlines())
    assert (whole.first, whole.last) == (count + 1, count + len(cut.splitlines()))


def test_a_line_of_a_run_or_a_table_that_is_skipped_as_a_whole_is_explained_by_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.log").write_text(LOG + LOG.partition("# Out of bounds")[0])
    (tmp_path / "c.csv").write_text("what,who\n1,2\n")
    for where, message in (
        ("a.log:27", "log cut: no closing summary (2 rows)"),
        ("c.csv:1", "no measurements: a table has columns that begin with measured., and a log "
                    "nccl-tests' own lines"),
    ):
        assert main.main(["accuracy", str(tmp_path), "--explain", where]) == 0
        assert capsys.readouterr().out == f"# skipped: {message}\n"
    assert main.main(["accuracy", str(tmp_path), "--explain", "a.log:11"]) == 0
    assert "collective: all_reduce" in capsys.readouterr().out
    for where in ("c.csv:3", "a.log:99", "a.log:" + "9" * 5000):
        assert main.main(["accuracy", str(tmp_path), "--explain", where]) == 2


@pytest.mark.parametrize("count", ["7", "1e+06", "1.23457e+06", "inf", "nan"])
@pytest.mark.parametrize("column", [8, 12])
def test_wrong_results_are_refused_however_many_they_are(count: str, column: int) -> None:
    cells = ROWS[1].split()
    cells[column] = count
    log = read_text(with_second("  ".join(cells)), source="a.log")
    assert ([row.nbytes for row in log.rows], log.reasons) == ([GIB], {"wrong results": 1})


def test_a_run_that_has_failed_without_a_row_to_blame_is_refused_whole() -> None:
    failed = LOG.replace("values : 0 OK", "values : 16 FAILED")
    assert read_text(failed, source="a.log").reasons == {"wrong results: out of bounds values": 2}


def test_times_of_the_host_are_none_of_a_collective() -> None:
    header = next(line for line in LOG.splitlines() if "#wrong" in line)
    on_the_host = LOG.replace(header, header.replace("  time", "cputime"))
    assert read_text(on_the_host, source="a.log").reasons == {"times of the host (-C 1), not of "
                                                              "the collective": 2}


def test_runs_of_several_communicators_at_once_are_refused_by_name() -> None:
    split = read_text(LOG.replace("Rank  1 Group  0", "Rank  1 Group  1"), source="a.log")
    assert list(split.reasons) == ["2 communicators at once (NCCL_TESTS_SPLIT): no model of what "
                                   "they take from one another"]
    whole = report()
    whole["config"]["devices"][3]["group"] = 1  # type: ignore[index]
    assert list(read_json(json.dumps(whole), source="a.json").reasons) == [
        "2 communicators at once (NCCL_TESTS_SPLIT): no model of what they take from one another"
    ]


def test_the_environment_in_json_counts_as_variables_of_a_log_do() -> None:
    forced = read_json(
        json.dumps({**report(), "env": ["PATH=/usr/bin", "NCCL_ALGO=Tree"]}), source="a.json"
    )
    assert "NCCL_ALGO=Tree: no model of it" in forced.reasons
    assert read_json(json.dumps({**report(), "env": ["NCCL_DEBUG=INFO"]}), source="a.json").rows


@pytest.mark.parametrize("summary", [{"count": 3, "okay": False}, {"count": 3}, {"okay": False}])
def test_json_that_has_failed_without_a_row_to_blame_is_refused_whole_as_text_is(
    summary: dict[str, object]
) -> None:
    run = report() | {"out_of_bounds": summary}
    assert read_json(json.dumps(run), source="run.json").reasons == {
        "wrong results: out of bounds values": 2
    }


def test_json_in_bounds_is_kept_and_rows_that_are_to_blame_are_refused_alone() -> None:
    assert len(
        read_json(
            json.dumps(report() | {"out_of_bounds": {"count": 0, "okay": True}}), source="run.json",
        ).rows
    ) == 1
    failed = report() | {"out_of_bounds": {"count": 3, "okay": False}}
    (good, _) = results = failed["results"]  # type: ignore[misc]
    results[1] = {**good, "out_of_place": {**good["out_of_place"], "nwrong": 3}}  # type: ignore[index]
    log = read_json(json.dumps(failed), source="run.json")
    assert (len(log.rows), log.reasons) == (1, {"wrong results": 1})
