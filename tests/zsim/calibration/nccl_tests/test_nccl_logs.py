"""Output of nccl-tests: rows are read, and contradictions are refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.calibration.data import measurements
from zsim.calibration.nccl_tests.checks import Rows
from zsim.calibration.nccl_tests.collective_names import UNNAMED
from zsim.calibration.nccl_tests.files import read_log
from zsim.calibration.nccl_tests.json_logs import read_json
from zsim.calibration.nccl_tests.log_prefixes import plain
from zsim.calibration.nccl_tests.text_logs import read_text
from zsim.calibration.records import Collective, decoded

GIB = 2**30


def read(path: Path) -> Rows:
    """The rows of a log as `zsim accuracy` reads them, before they are put on a cluster."""
    text = plain(decoded(path.read_bytes(), errors="replace"))
    return read_log(text, source=path.name)


def test_a_log_without_its_collective_is_read_by_its_file_s_name_or_the_option() -> None:
    unnamed = LOG.replace("all_reduce_perf", "perf")
    assert [
        row.op for row in read_text(unnamed, source="runs/AllReduce-2xH100.txt").rows
    ] == ["all_reduce", "all_reduce"]
    assert [
        row.op for row in read_text(unnamed, source="a", collective="all_gather").rows
    ] == []  # contradicts its bandwidths
    assert len(read_text(unnamed, source="a", collective="all_reduce").rows) == 2


LOG = """# nccl-tests version 2.17.0 nccl-headers=22707 nccl-library=22707
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 1073741824 maxBytes 2147483648 step: 2(factor) warmup iters: 5 \
iters: 20
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


def test_a_log_of_nccl_tests_gives_its_rows_and_what_they_ran_on() -> None:
    log = read_text(LOG, source="run.log")
    assert [(row.nbytes, row.microseconds) for row in log.rows] == [(GIB, 3000), (2 * GIB, 5990)]
    row = log.rows[0]
    assert (row.op, row.gpu, row.num_ranks, row.num_nodes) == (
        "all_reduce", "NVIDIA H100 80GB HBM3", 2, 1,
    )
    assert (row.nvls, row.line) == (True, 11)


@pytest.mark.parametrize("lines_kept", [11, 12, 13])
def test_a_log_that_was_cut_is_refused_with_the_number_of_its_rows(lines_kept: int) -> None:
    cut = "\n".join(LOG.splitlines()[:lines_kept])
    log = read_text(cut, source="cut.log")
    assert log.rows == ()
    assert log.reasons == {"log cut: no closing summary": min(2, lines_kept - 10)}


def test_a_log_whose_rows_have_another_operation_than_it_says_is_refused_by_name() -> None:
    """Each reduces or does not, whatever a line of its header has been made to say."""
    assert len(read_text(LOG, source="a").rows) == 2
    assert read_text(LOG.replace(" sum ", " none "), source="a").reasons == {
        "its operation is none, which contradicts all_reduce": 2
    }


def test_several_runs_in_one_log_are_read_one_by_one() -> None:
    """A run that was cut and started anew into the same file, and one collective after another:
    ranks are those of each run."""
    cut = "\n".join(LOG.splitlines()[:11]) + "\n"
    gathers = (
        LOG.replace("all_reduce_perf", "all_gather_perf")
        .replace(" 268435456 ", " 134217728 ")
        .replace(" 536870912 ", " 268435456 ")
    )
    for full, half in (
        ("357.91  357.91", "357.91  178.96"), ("358.51  358.51", "358.51  179.25"),
        (" sum ", " none "),
    ):
        gathers = gathers.replace(full, half)
    log = read_text(cut + LOG + gathers, source="both.log")
    assert [(row.op, row.num_ranks, row.line) for row in log.rows] == [
        ("all_reduce", 2, 22), ("all_reduce", 2, 23), ("all_gather", 2, 37), ("all_gather", 2, 38),
    ]
    assert log.reasons == {"log cut: no closing summary": 1}
    nameless = (LOG + LOG).replace("all_reduce_perf", "perf")
    assert [row.line for row in read_text(nameless, source="all_reduce_two.log").rows] == [
        11, 12, 26, 27
    ]
    assert read_text(nameless, source="two.log").reasons == {UNNAMED: 4}
    mixed = read_text(
        (LOG + gathers).replace("all_reduce_perf", "perf").replace("all_gather_perf", "perf"),
        source="all_reduce.log",
    )
    assert [row.line for row in mixed.rows] == [11, 12]
    assert {reason.split()[0] for reason in mixed.reasons} == {"size"}
    assert sum(mixed.reasons.values()) == 2


def test_a_collective_that_only_the_file_s_name_says_is_held_to_the_operation_of_its_rows() -> None:
    """A broadcast of 2 ranks has the bandwidths of an all-reduce, but nothing to sum."""
    log = read_text(LOG.replace("all_reduce_perf", "perf"), source="broadcast.txt")
    assert log.reasons == {"its operation is sum, which contradicts broadcast": 2}


@pytest.mark.parametrize("tag", [
    "0: ", "[1,0]<stdout>:", "[default0]:", "  3: ", "[node1:12] 2024-01-01T00:00:00.123Z ",
    "12:\t",
])
def test_what_a_launcher_puts_before_each_line_changes_nothing(tmp_path: Path, tag: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(tag + line + "\n" for line in LOG.splitlines()))
    assert [replace(row, source="a") for row in read(path).rows] == [
        replace(row, source="a") for row in read_text(LOG, source="a").rows
    ]
    assert len(measurements.rows(path)) == 2


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"])
def test_a_log_in_another_encoding_is_read(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "a.txt"
    marked = LOG if encoding.endswith(("16", "sig")) else "\ufeff" + LOG
    path.write_bytes(marked.encode(encoding))
    rows = [row for row in measurements.rows(path) if isinstance(row, Collective)]
    assert [1e6 * row.seconds for row in rows] == [pytest.approx(3000), pytest.approx(5990)]


def test_a_run_on_gpus_of_two_kinds_is_refused() -> None:
    mixed = LOG.replace("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", 1)
    reason = "GPUs contradict each other: NVIDIA A100-SXM4-80GB, NVIDIA H100 80GB HBM3"
    assert read_text(mixed, source="all_reduce.txt").reasons == {reason: 2}
    whole = report()
    whole["config"]["devices"][0]["device_info"] = "NVIDIA A100-SXM4-80GB"  # type: ignore[index]
    assert next(iter(read_json(json.dumps(whole), source="a.json").reasons)).startswith(
        "GPUs contradict each other"
    )


def test_rows_with_wrong_results_are_refused() -> None:
    wrong = LOG.replace("357.91       0  3000.00", "357.91      37  3000.00")
    assert [row.nbytes for row in read_text(wrong, source="a").rows] == [2 * GIB]
    assert read_text(wrong, source="a").reasons == {"wrong results": 1}
    whole = report()
    whole["results"][0]["out_of_place"]["nwrong"] = 5.0  # type: ignore[index]
    assert read_json(json.dumps(whole), source="a.json").reasons["wrong results"] == 1


def test_rows_with_wrong_results_in_place_are_refused_as_well() -> None:
    wrong = LOG.replace("357.91  357.91       0\n", "357.91  357.91       5\n")
    assert [row.nbytes for row in read_text(wrong, source="a").rows] == [2 * GIB]
    assert read_text(wrong, source="a").reasons == {"wrong results": 1}
    unchecked = LOG.replace("357.91  357.91       0\n", "357.91  357.91     N/A\n")
    assert len(read_text(unchecked, source="a").rows) == 2
    whole = report()
    whole["results"][0]["in_place"] = {"nwrong": 5.0}  # type: ignore[index]
    assert read_json(json.dumps(whole), source="a.json").reasons["wrong results"] == 1


def test_a_log_in_milliseconds_or_without_devices_is_refused() -> None:
    assert read_text(LOG.replace("(us)", "(ms)"), source="a").reasons == {"no time in us": 2}
    assert read_text(LOG.replace("#  Rank", "#  Runk"), source="a").reasons == {
        "no devices listed": 2
    }
    assert read_text(LOG.replace("all_reduce_perf", "perf"), source="a").reasons == {UNNAMED: 2}
    assert read_text("", source="a").reasons == {"log cut: no closing summary": 1}


def report() -> dict[str, object]:
    devices = [
        {"rank": rank, "hostname": f"n{rank // 2}", "device_info": "NVIDIA H100 80GB HBM3"}
        for rank in range(4)
    ]
    timed = {"time": 3000.0, "alg_bw": 357.91, "bus_bw": 536.87, "nwrong": 0.0}
    result = {
        "size": GIB, "count": GIB // 4, "type": "float", "out_of_place": timed,
        "experiment_name": "all_reduce_perf",
    }
    return {
        "nccl_version": 22707, "config": {"ngpus": 2, "devices": devices},
        "results": [result, {**result, "out_of_place": None}],
        "average_bus_bandwidth": {"bandwidth": 536.9},
    }


def test_the_json_of_nccl_tests_gives_the_same_fields() -> None:
    log = read_json(json.dumps(report()), source="run.json")
    row = log.rows[0]
    assert (row.op, row.num_ranks, row.num_nodes, row.nbytes, row.microseconds) == (
        "all_reduce", 4, 2, GIB, 3000,
    )
    assert log.reasons == {"no out-of-place time": 1}


def test_bandwidths_in_json_that_contradict_its_times_are_refused() -> None:
    """Each by itself; a file that leaves one out says it no less."""
    whole = report()
    for name in ("alg_bw", "bus_bw"):
        (timed,) = (each["out_of_place"] for each in whole["results"][:1])  # type: ignore[index]
        others = {key: value for key, value in timed.items() if key not in ("alg_bw", "bus_bw")}
        for change, taken in (({}, 1), ({name: timed[name]}, 1), ({name: 2 * timed[name]}, 0)):
            result = {
                **whole["results"][0],
                "out_of_place": others | {"bus_bw": timed["bus_bw"]} | change,
            }  # type: ignore[index]
            assert (
                len(read_json(json.dumps({**whole, "results": [result]}), source="a.json").rows)
                == taken
            )


def test_json_that_was_cut_or_is_something_else_is_refused() -> None:
    whole = json.dumps(report())
    assert read_json(whole[:-40], source="a").reasons == {"JSON cut or damaged": 1}
    assert read_json("{}", source="a").reasons == {"not a whole run of nccl-tests": 1}
    without = {key: value for key, value in report().items() if key != "average_bus_bandwidth"}
    assert read_json(json.dumps(without), source="a").reasons == {
        "not a whole run of nccl-tests": 2
    }


WRITTEN = st.text(alphabet='#01. ,-e"{}[]:usGB\n\r\x00', max_size=80)


@given(text=st.one_of(WRITTEN, WRITTEN.map(lambda more: LOG + more)))
def test_no_text_makes_a_reader_raise(text: str) -> None:
    for log in (read_text(text, source="x"), read_json(text, source="x")):
        assert isinstance(log, Rows)


@pytest.mark.parametrize("unit", ["KB", "MiB", "KiB"])
def test_a_log_with_sizes_in_another_unit_is_refused(unit: str) -> None:
    """1000 or 1024 of them, nobody knows; the bandwidths do not tell them apart."""
    log = read_text(LOG.replace("(B) ", f"({unit})"), source="log.txt")
    assert log.rows == ()
    assert list(log.reasons) == [f"sizes in another unit than B: {unit}"]
