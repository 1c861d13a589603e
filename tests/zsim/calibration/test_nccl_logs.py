"""Output of nccl-tests: rows are read, and what contradicts itself is skipped by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.calibration.data import measurements
from zsim.calibration.nccl_tests.log_row import LogRow
from zsim.calibration.nccl_tests.logs import read_log
from zsim.calibration.records import Collective, Skipped
from zsim.cli import main

GIB = 2**30
LOG = """# nccl-tests version 2.17.0 nccl-headers=22707 nccl-library=22707
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 1073741824 maxBytes 2147483648 step: 2(factor) warmup iters: 5 \
iters: 20 agg iters: 1 validation: 1 graph: 0
# Using devices
#  Rank  0 Group  0 Pid   1234 on  node-a device  0 [0000:07:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   1234 on  node-a device  1 [0000:0f:00] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                       \
in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   \
algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  \
(GB/s)  (GB/s)
  1073741824     268435456     float     sum      -1  3000.00  357.91  357.91       0  3000.00  \
357.91  357.91       0
  2147483648     536870912     float     sum      -1  5990.00  358.51  358.51       0  5990.00  \
358.51  358.51       0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 358.2
#
"""
ROWS = LOG.splitlines()[10:12]
GATHERS = LOG
for before, after in (
    ("all_reduce_perf", "all_gather_perf"), (" 268435456 ", " 134217728 "),
    (" 536870912 ", " 268435456 "), ("357.91  357.91", "357.91  178.96"),
    ("358.51  358.51", "358.51  179.25"), (" sum ", " none "),
):
    GATHERS = GATHERS.replace(before, after)
UNNAMED = LOG.replace("# Collective test starting: all_reduce_perf\n", "")
NO_COLLECTIVE = "no collective named: --collective says it, or the file's name, as all_gather.txt"


def read(text: str, source: str = "a.log", collective: str = "") -> list[LogRow]:
    log = read_log(text, source=source, collective=collective)
    return [row for row in log if isinstance(row, LogRow)]


def reasons(text: str, source: str = "a.log", collective: str = "") -> dict[str, int]:
    log = read_log(text, source=source, collective=collective)
    return {row.reason: row.count for row in log if isinstance(row, Skipped)}


def report(**changes: Any) -> str:
    """A run as nccl-tests writes it with -J, with changes of its `config` and of its first result's
    `timed`."""
    devices = [
        {"rank": rank, "hostname": f"n{rank // 2}", "device_info": "NVIDIA H100 80GB HBM3"}
        for rank in range(4)
    ]
    timed = {"time": 3000.0, "alg_bw": 357.91, "bus_bw": 536.87} | changes.pop("timed", {})
    result = {"size": GIB, "count": GIB // 4, "type": "float", "redop": "sum",
              "out_of_place": timed, "experiment_name": "all_reduce_perf"}
    return json.dumps({
        "nccl_version": 22707, "config": {"devices": devices} | changes.pop("config", {}),
        "results": [result], "average_bus_bandwidth": {"bandwidth": 536.9}, **changes,
    })


def test_a_log_gives_its_rows_and_what_they_ran_on() -> None:
    rows = read(LOG)
    assert [(row.nbytes, row.microseconds, row.line) for row in rows] == [
        (GIB, 3000, 11), (2 * GIB, 5990, 12),
    ]
    row = rows[0]
    assert (row.op, row.gpu, row.num_ranks, row.num_nodes, row.nvls, row.caveats) == (
        "all_reduce", "NVIDIA H100 80GB HBM3", 2, 1, True, ()
    )


def test_json_gives_the_same_fields() -> None:
    (row,) = read(report())
    assert (row.op, row.gpu, row.num_ranks, row.num_nodes, row.nbytes, row.microseconds) == (
        "all_reduce", "NVIDIA H100 80GB HBM3", 4, 2, GIB, 3000
    )


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_a_log_in_another_encoding_is_read(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(LOG.encode(encoding))
    rows = [row for row in measurements.rows(path) if isinstance(row, Collective)]
    assert [1e6 * row.seconds for row in rows] == [pytest.approx(3000), pytest.approx(5990)]


@pytest.mark.parametrize("lines_kept", [11, 12, 13])
def test_a_log_that_was_cut_is_skipped_with_the_number_of_its_rows(lines_kept: int) -> None:
    cut = "\n".join(LOG.splitlines()[:lines_kept])
    assert read(cut) == []
    assert reasons(cut) == {"log cut: no closing summary": min(2, lines_kept - 10)}


def test_several_runs_in_one_log_are_read_one_by_one() -> None:
    """A run that was cut and started anew into the same file, then another collective."""
    cut = "\n".join(LOG.splitlines()[:11]) + "\n"
    assert [(row.op, row.line) for row in read(cut + LOG + GATHERS)] == [
        ("all_reduce", 22), ("all_reduce", 23), ("all_gather", 37), ("all_gather", 38),
    ]
    assert reasons(cut + LOG + GATHERS) == {"log cut: no closing summary": 1}
    assert [row.line for row in read(UNNAMED + UNNAMED, "all_reduce.log")] == [10, 11, 24, 25]


@pytest.mark.parametrize(("source", "asked"), [("a.log", "all_reduce"), ("all_reduce.txt", "")])
def test_a_log_without_its_collective_is_of_that_of_the_option_or_of_its_name(
    source: str, asked: str
) -> None:
    assert [row.op for row in read(UNNAMED, source, asked)] == ["all_reduce"] * 2
    assert reasons(UNNAMED) == {NO_COLLECTIVE: 2}


def test_a_log_is_never_of_a_collective_that_it_contradicts() -> None:
    assert reasons(LOG, collective="broadcast") == {
        "collectives contradict each other: the log says all_reduce, --collective broadcast": 2
    }
    assert reasons(report(), collective="broadcast") == {
        "collectives contradict each other: the log says all_reduce, --collective broadcast": 1
    }
    # A broadcast of 2 ranks has the bandwidths of an all-reduce, but nothing to sum.
    assert list(reasons(UNNAMED, "broadcast.txt")) == [
        "operation sum contradicts broadcast"
    ]


def test_nothing_is_calibrated_on_a_collective_without_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "all_reduce.log"
    path.write_text(LOG.replace("all_reduce_perf", "sendrecv_perf"))
    assert main.main(["calibrate", "--from", str(path), "--cluster", "dgx-h100"]) == 2
    assert "sendrecv has no model (2 rows)" in capsys.readouterr().err


@pytest.mark.parametrize(("old", "new", "reason"), [
    ("(us)", "(ms)", "expected sizes in B and times in us, found (B)"),
    ("(B) ", "(KiB)", "expected sizes in B and times in us, found (KiB)"),
    ("   redop", "", "expected the columns that nccl-tests prints since 2.11, size count"),
    ("  time   algbw", "cputime   algbw", "expected the columns that nccl-tests prints since 2.11"),
    ("#  Rank", "#  Runk", "expected each rank's device once, found 0 devices"),
    ("Rank  1", "Rank  2", "expected each rank's device once, found 2 devices"),
    ("Rank  1", "Rank  0", "expected each rank's device once, found 2 devices"),
    ("Rank  1 Group  0", "Rank  1 Group  1", "2 communicators at once (NCCL_TESTS_SPLIT)"),
    ("[0000:07:00] NVIDIA H100 80GB HBM3", "[0000:07:00] NVIDIA A100-SXM4-80GB",
     "GPUs contradict each other: NVIDIA A100-SXM4-80GB, NVIDIA H100 80GB HBM3"),
    ("0 OK", "16 FAILED", "wrong results: out of bounds values"),
    ("# Using", "# Blocking Enabled: wait for completion\n# Using", "blocking launches (-z 1)"),
    ("# Using", "mpirun -x NCCL_ALGO=Tree\n# Using", "NCCL_ALGO=Tree: no model of what it forces"),
    ("# Using", "n0: NCCL_IB_DISABLE set by environment to 1.\n# Using", "NCCL_IB_DISABLE=1: no"),
])
def test_a_run_that_ran_in_a_way_without_a_model_is_skipped_by_name(
    old: str, new: str, reason: str
) -> None:
    assert read(LOG.replace(old, new)) == []
    ((given, count),) = reasons(LOG.replace(old, new)).items()
    assert (given.startswith(reason), count) == (True, 2)


@pytest.mark.parametrize(("changes", "reason"), [
    ({"config": {"blocking_collectives": 1}}, "blocking launches (-z 1)"),
    ({"out_of_bounds": {"count": 3, "okay": False}}, "wrong results: out of bounds values"),
    ({"env": ["PATH=/usr/bin", "NCCL_PROTO=LL"]}, "NCCL_PROTO=LL: no model of what it forces"),
    ({"config": {}}, ""), ({"env": ["NCCL_DEBUG=INFO", "NCCL_P2P_DISABLE=0"]}, ""),
    ({"timed": {"bus_bw": 800.0}}, "time, size and bus bandwidth contradict one another"),
    ({"timed": {"time": None}},
     "not a whole run of nccl-tests: results[0].out_of_place.time: expected a number, found null"),
])
def test_so_is_one_in_json(changes: dict[str, Any], reason: str) -> None:
    given = [*reasons(report(**changes)), ""][0]
    assert (given.startswith(reason), bool(given)) == (True, bool(reason))


@pytest.mark.parametrize("whole", [
    '{"version": 2, "results": [{"size": 8,', "{}", '{"results": []}', report()[:-40],
])
def test_json_that_was_cut_or_is_something_else_is_skipped(whole: str) -> None:
    (reason,) = reasons(whole)
    assert reason.startswith("not a whole run of nccl-tests: ")


@pytest.mark.parametrize(("row", "reason"), [
    (ROWS[1][:55], "in place of 9 or 13"),
    (f"512 {ROWS[1]}", "found one of 14 fields"),
    (ROWS[1].replace("2147483648", "2G"), "found one of invalid literal for int()"),
    (ROWS[1].replace("536870912", "536870913"),
     "size 2147483648 contradicts 536870913 elements of float, which are 2147483652 bytes"),
    (ROWS[1].replace("5990.00", "nan", 1), "size or time is not above 0"),
    (ROWS[1].replace("5990.00", "7000.00", 1), "time, size and bus bandwidth contradict"),
    (ROWS[1].replace("sum", "none"), "operation none contradicts all_reduce"),
])
def test_a_row_that_contradicts_itself_is_skipped_alone(row: str, reason: str) -> None:
    log = LOG.replace(ROWS[1], row)
    assert [each.nbytes for each in read(log)] == [GIB]
    (skipped,) = (each for each in read_log(log, source="a.log") if isinstance(each, Skipped))
    assert (skipped.line, reason in skipped.reason) == (12, True)


@pytest.mark.parametrize(("count", "fits"), [("134217728", True), ("268435456", False)])
def test_a_count_is_that_of_a_part_where_each_rank_has_one(count: str, fits: bool) -> None:
    log = GATHERS.replace(" 134217728 ", f" {count} ")
    assert (len(read(log)) == 2) == fits


@pytest.mark.parametrize("line", [
    "node0:12:34 [0] NCCL INFO Channel 00/24 :    0   1   2   3   4   5   6   7",
    "# Out of bounds values : 0 OK", "", "node0:12:34 [3] NCCL WARN Timeout after 1800 s",
])
def test_lines_of_nccl_itself_are_no_rows(line: str) -> None:
    log = LOG.replace(ROWS[1], f"{line}\n{ROWS[1]}")
    assert ([row.line for row in read(log)], reasons(log)) == ([11, 13], {})


@pytest.mark.parametrize(("old", "new", "config", "message"), [
    ("graph: 0", "graph: 2", {"graph": 2}, "launched as CUDA graphs (graph: 2), taken for"),
    ("agg iters: 1", "agg iters: 4", {"aggregated_iterations": 4},
     "4 collectives in one launch (agg iters: 4), taken for"),
])
def test_launches_that_are_not_one_by_one_are_named_and_widen_the_band(
    old: str, new: str, config: dict[str, int], message: str
) -> None:
    (caveat,) = read(LOG.replace(old, new))[0].caveats
    assert (caveat.text.startswith(message), caveat.widens) == (True, 0.5)
    assert read(report(config=config))[0].caveats == (caveat,)


def test_variables_of_unknown_effect_widen_the_band_and_nvls_can_be_off() -> None:
    rows = read("NCCL_DEBUG=INFO NCCL_NVLS_ENABLE=0 NCCL_BUFFSIZE=8388608\n" + LOG)
    assert [row.nvls for row in rows] == [False, False]
    (caveat,) = rows[0].caveats
    assert caveat.text == "NCCL_BUFFSIZE=8388608 is taken to change nothing"


def test_lines_behind_what_a_launcher_writes_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"[1,0]<stdout>:{line}\n" for line in LOG.splitlines()))
    (skipped,) = measurements.rows(path)
    assert isinstance(skipped, Skipped)
    assert skipped.reason == (
        "expected the lines of nccl-tests as it prints them, found them behind what a launcher "
        "writes before each; take that off"
    )


def test_a_line_that_is_skipped_is_explained_by_its_reason(
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


WRITTEN = st.text(alphabet='#01. ,-e"{}[]:usGB\n\r\x00', max_size=80)


@given(text=st.one_of(WRITTEN, WRITTEN.map(lambda more: LOG + more)))
def test_no_text_makes_the_reader_raise(text: str) -> None:
    assert all(isinstance(row, LogRow | Skipped) for row in read_log(text, source="x"))
