"""Logs as they are found: behind tags and times of launchers, of old versions, of launches that
wait; and CSVs that begin with remarks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.zsim.calibration.nccl_tests.test_nccl_logs import GIB, LOG, read, report
from zsim.calibration.data import measurements
from zsim.calibration.nccl_tests.files import is_json, read_log
from zsim.calibration.nccl_tests.json_logs import read_json
from zsim.calibration.nccl_tests.log_prefixes import plain
from zsim.calibration.nccl_tests.text_logs import read_text
from zsim.calibration.records import Skipped

LINES = LOG.splitlines()
ROW = LINES[10]
PREFIXES: dict[str, Callable[[int], str]] = {
    "mpirun --tag-output": lambda at: "[1,0]<stdout>:",
    "mpirun --timestamp-output": lambda at: f"Wed May  1 12:00:{at:02d} 2024<stdout>:",
    "date in brackets": lambda at: f"[2024-05-01 12:00:{at:02d}] ",
    "date": lambda at: f"2024-05-01 12:00:{at:02d} ",
    "date with a fraction": lambda at: f"2024-05-01 12:{at:02d}:00,{at * 41} INFO ",
    "kubectl --timestamps": lambda at: f"2024-05-01T12:00:{at:02d}.{at * 7919:09d}Z ",
    "time with a zone": lambda at: f"2024-05-01T12:00:{at:02d}+02:00 ",
    "pdsh": lambda at: "node-000: ", "docker-compose": lambda at: "worker-0  | ",
    "kubectl --prefix": lambda at: "[pod/nccl-test-launcher-x7k2p/launcher] ",
    "srun -l": lambda at: " 0: ", "torchrun": lambda at: "[rank0]: ",
    "torchrun --tee": lambda at: "[default0]:",
    "process and time": lambda at: f"[node1:{at}] 2024-01-01T00:00:00.{at:03d}Z ",
    "object": lambda at: f'{{"x": {at}}} ', "object in brackets": lambda at: f'{{"x": {at}}}: ',
    "grep -n": lambda at: f"runs/a.log:{at}:", "nl": lambda at: f"{at:6d}\t",
    "cat -n of two runs": lambda at: f"{at:6d}\t{at + 3:6d}\t", "quoted": lambda at: "> ",
    "colours": lambda at: f"\x1b[3{at % 8}m\x1b[1mworker\x1b[0m | ",
    "colours of the text": lambda at: "\x1b[0m",
    "syslog": lambda at: f"May  {at % 9 + 1} 12:00:{at:02d} node-7 prog[{at}]: ",
}


def behind(prefix: Callable[[int], str], text: str = LOG) -> str:
    return "".join(f"{prefix(at)}{line}\n" for at, line in enumerate(text.splitlines(), start=1))


@pytest.mark.parametrize("name", PREFIXES)
def test_what_stands_before_every_line_changes_nothing(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text(behind(PREFIXES[name]))
    expected = [replace(row, source="a.txt") for row in read_text(LOG, source="a.txt").rows]
    assert len(expected) == 2
    assert len(measurements.rows(path)) == 2
    assert list(read(path).rows) == expected
    assert list(read_text(path.read_text(), source="a.txt").rows) == expected


@given(
    prefix=st.lists(st.text(alphabet="ab09 -:[]|<>./,#{}\t%", max_size=6), max_size=4),
    numbers=st.lists(st.sampled_from(["", "at", "7 ", "at: "]), max_size=3),
    bare=st.sets(st.integers(1, 14)),
)
def test_no_prefix_is_ever_taken_for_data(
    prefix: list[str], numbers: list[str], bare: set[int]
) -> None:
    """Whatever stands before lines, of which some may have nothing: a row is read as it is, or not
    at all."""
    padded = [*numbers, "", "", "", ""]
    parts = [part for pair in zip(prefix, padded, strict=False) for part in pair]
    text = behind(lambda at: (
        "" if at in bare else "".join(str(at) if part == "at" else part for part in parts)
    ))
    expected = {
        (row.line, row.nbytes, row.microseconds, row.num_ranks)
        for row in read_text(LOG, source="a").rows
    }
    assert {
        (row.line, row.nbytes, row.microseconds, row.num_ranks)
        for row in read_log(text, source="a").rows
    } <= expected


def test_a_row_alone_behind_a_number_is_no_other_row() -> None:
    """A number, a size and a count are no size, count and dtype."""
    log = read_text(LOG.replace(ROW, f"512 {ROW}"), source="a")
    assert log.skipped == (Skipped(source="a", line=11, reason="expected a size in bytes where "
                                                                 "its line begins, found '512'"),)
    other = read_text(behind(lambda at: "" if at == 11 else "7 "), source="a")
    assert ([row.line for row in other.rows], other.skipped[0].line) == ([12], 11)


def test_a_remark_that_cites_one_line_of_nccl_tests_is_no_prefix() -> None:
    table = 'gpu,notes\nA100,"as # nThread 1"\nH100,"as # nThread 1"\n'
    assert plain(table) == table
    assert plain("12: # nThread 1 nGpus 2\n12: # Using devices\n12 B\n") == (
        "# nThread 1 nGpus 2\n# Using devices\n12 B\n"
    )


def test_shapes_are_as_few_and_as_short_as_prefixes_are() -> None:
    many = "".join(f"{'x' * at}: # nThread 1\n{'x' * at}: # Using devices\n" for at in range(1, 40))
    assert plain(many).count("\n# ") + plain(many).startswith("# ") == 32
    for glued in ("7", "A", "rank0"):
        text = f"{glued}# nThread 1\n{glued}# Using devices\n{glued}1073741824 1 float\n"
        assert plain(text) == text
    long = "y" * 300
    assert plain(f"{long}: # nThread 1\n{long}: # Using devices\n").startswith(long)


@pytest.mark.parametrize(("text", "is_one"), [
    ('{"version": 2, "results": [', True), ("{}", True), ("[]", True), ("[1, 0]", True),
    ('["no", "run"', True), ("[" * 100_000, True), ("[1,0]<stdout>:hello", False),
    ("[2024-05-01 12:00:00] hello", False), ("{x} hello", False), ('{"x": 1} hello', True),
    ("[rank0]: hello", False), ("hello", False),
])
def test_json_is_what_parses_or_begins_as_it_does(text: str, is_one: bool) -> None:
    assert is_json(text) == is_one


def test_words_that_begin_as_json_does_are_none_of_it(tmp_path: Path) -> None:
    for before in ('{"event": "start"}\n', '[{"event": "start"}]\n', "[rank0]: starting\n"):
        assert [row.line for row in read_log(before + LOG, source="a").rows] == [12, 13]
    assert read_log('{"version": 2, "results": [{"size": 8,', source="a").reasons == {
        "JSON cut or damaged": 1
    }
    assert read_log("[1,0]<stdout>:hello\n", source="a").reasons == {
        "log cut: no closing summary": 1
    }
    path = tmp_path / "a.log"
    path.write_text("[1,0]<stdout>:hello\n")
    (skipped,) = measurements.rows(path)
    assert isinstance(skipped, Skipped)
    assert skipped.reason.startswith("no measurements: ")


NAMES_ABOVE = (
    "#       size         count      type{0}     time   algbw   busbw  error     time   algbw   "
    "busbw  error\n"
)
OLD = (
    """# nThread 1 nGpus 8 minBytes 1073741824 maxBytes 2147483648 step: 2(factor) warmup iters: \
5 iters: 20 validation: 1
#
# Using devices
"""
    + "".join(
        f"#   Rank  {rank} Pid  28888 on     node-a device  {rank} [0x{rank:02x}] NVIDIA "
        f"A100-SXM4-80GB\n"
        for rank in range(8)
    )
    + """#
#                                                       out-of-place                       in-place
"""
    + NAMES_ABOVE
    + """#        (B)    (elements)                       (us)  (GB/s)  (GB/s)            (us)  \
(GB/s)  (GB/s)
{1}
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 229.4
#
"""
)
OLD_ROWS = {
    "all_reduce": ("   redop", "1073741824     268435456     float     sum   8203.9  130.88  "
                               "229.04  {0}  8203.9  130.88  229.04  {0}"),
    "reduce_scatter": ("   redop", "1073741824   33554432     float     sum   4101.9  261.76  "
                                   "229.04  {0}  4101.9  261.76  229.04  {0}"),
    "all_gather": ("", "1073741824      33554432     float   4101.9  261.76  229.04  {0}  4101.9 "
                       " 261.76  229.04  {0}"),
    "broadcast": ("    root", "1073741824     268435456     float       0   4687.9  229.04  "
                              "229.04  {0}  4687.9  229.04  229.04  {0}"),
}
"""The columns and the lines that each program printed before 2.11, from `print_header` and
`print_line_header` of each."""


def old(collective: str, error: str = "0e+00") -> str:
    columns, row = OLD_ROWS[collective]
    return OLD.format(columns, "  " + row.format(error))


@pytest.mark.parametrize("error", ["0e+00", "5e-07", "N/A"])
@pytest.mark.parametrize("collective", OLD_ROWS)
def test_a_table_of_before_2_11_is_read_by_the_names_of_its_columns(
    collective: str, error: str
) -> None:
    log = read_text(old(collective, error), source=f"{collective}.txt")
    assert [(row.op, row.num_ranks, row.nbytes, row.gpu) for row in log.rows] == [
        (collective, 8, GIB, "NVIDIA A100-SXM4-80GB")
    ], log.reasons
    assert log.rows[0].microseconds == float(OLD_ROWS[collective][1].split()[-8])


@pytest.mark.parametrize("asked", OLD_ROWS)
@pytest.mark.parametrize("collective", OLD_ROWS)
def test_a_table_of_before_2_11_contradicts_a_collective_that_has_other_columns(
    collective: str, asked: str
) -> None:
    has = {"all_gather": "no redop and no root", "broadcast": "root"}.get(collective, "redop")
    reasons = list(read_text(old(collective), source="a.txt", collective=asked).reasons)
    if OLD_ROWS[asked][0] != OLD_ROWS[collective][0]:
        first = next(reason for reason in reasons)
        assert first == f"its table has {has}, which contradicts {asked}" or first.startswith(
            "size "
        )
    else:
        assert (reasons == []) == (asked == collective)


def test_a_run_of_before_2_11_that_was_cut_before_its_table_and_started_anew_is_two() -> None:
    begun = old("all_reduce").partition("#\n#    ")[0]
    log = read_text(begun + old("all_reduce"), source="all_reduce.txt")
    assert (len(log.rows), log.reasons) == (1, {"log cut: no closing summary": 1})


def test_wrong_results_of_before_2_11_are_those_of_its_summary() -> None:
    """Errors of such a table are how far results are off, which sums of floats always are."""
    text = old("all_reduce", "5e-07").replace(": 0 OK", ": 16 FAILED")
    assert read_text(text, source="all_reduce.txt").reasons == {"wrong results: out of bounds "
                                                                "values": 1}


def test_the_first_versions_print_the_bus_bandwidth_of_an_all_gather_twice() -> None:
    twice = old("all_gather").replace("261.76", "229.04")
    assert len(read_text(twice, source="all_gather.txt").rows) == 1
    wrong = old("all_gather").replace("261.76", "231.04")
    assert read_text(wrong, source="all_gather.txt").reasons == {"time, size and bus bandwidth "
                                                                 "contradict one another": 1}


def test_a_table_in_milliseconds_or_with_fewer_cells_than_columns_is_refused_as_before() -> None:
    assert read_text(
        old("all_reduce").replace("(us)", "(ms)"), source="all_reduce.txt"
    ).reasons == {"no time in us": 1}
    blank = old("all_reduce").replace("  sum ", "      ")
    assert read_text(blank, source="alltoall_is_not_all_reduce/all_reduce.txt").reasons == {
        "fewer fields than the table has": 1
    }
    assert (
        read_text(LOG.replace("algbw", "other"), source="a").rows == read_text(LOG, source="a").rows
    )
    unnamed = LOG.replace("     time   algbw", "     when   algbw")
    (reason,) = read_text(unnamed, source="a").reasons
    assert reason.startswith("no names of its columns: expected a line '# size count type ... "
                             "time algbw busbw' above the rows, found size")


@pytest.mark.parametrize("option", [
    "wait for completion and barrier after each collective ",
    "wait for completion after each collective (no barrier) ",
])
def test_launches_that_wait_are_refused_by_name(option: str) -> None:
    text = LOG.replace("# Using devices", f"# Blocking Enabled: {option}\n#\n# Using devices")
    reason = (
        "blocking launches (-z 1): times with the host's launch and wait of each collective, not "
        "of the collective"
    )
    assert read_text(text, source="a").reasons == {reason: 2}
    whole = report()
    for value in ("true", True, 1, 2):
        whole["config"]["blocking_collectives"] = value  # type: ignore[index]
        assert read_json(json.dumps(whole), source="a.json").reasons == {reason: 2}
    for value in ("false", False, 0):
        whole["config"]["blocking_collectives"] = value  # type: ignore[index]
        assert len(read_json(json.dumps(whole), source="a.json").rows) == 1


def test_times_of_the_host_in_json_are_refused_as_those_of_text() -> None:
    whole = report()
    timed = whole["results"][0]["out_of_place"]  # type: ignore[index]
    timed["cpu_time"] = timed.pop("time")
    assert (
        "times of the host (-C 1), not of the collective"
        in read_json(json.dumps(whole), source="a.json").reasons
    )


def test_an_unnamed_log_whose_results_are_checked_out_of_place_alone_is_of_none_of_ours() -> None:
    """An all-to-all's rows are those of an all-gather but for its results in place, which
    nccl-tests never checks."""
    gathers = LOG.replace("all_reduce_perf", "perf").replace("    sum ", "   none ")
    for old_cell, new_cell in (
        (" 268435456 ", " 134217728 "), (" 536870912 ", " 268435456 "),
        ("357.91  357.91", "357.91  178.96"),
    ):
        gathers = gathers.replace(old_cell, new_cell)
    gathers = gathers.replace("358.51  358.51", "358.51  179.25")
    assert len(read_text(gathers, source="a", collective="all_gather").rows) == 2
    exchanges = (
        "\n".join(
            line[:-1] + "N/A" if line.endswith(" 0") else line for line in gathers.splitlines()
        )
        + "\n"
    )
    assert exchanges.count("N/A") == 2
    reason = (
        "its results are checked out of place alone, as of alltoall and sendrecv, which "
        "contradicts all_gather"
    )
    assert read_text(exchanges, source="a", collective="all_gather").reasons == {reason: 2}
    named = exchanges.replace("starting: perf", "starting: all_gather_perf")
    assert len(read_text(named, source="a").rows) == 2
    unchecked = exchanges.replace("       0  3", "     N/A  3").replace(
        "       0  5", "     N/A  5"
    )
    assert unchecked.count("N/A") == 4
    assert len(read_text(unchecked, source="a", collective="all_gather").rows) == 2


def test_a_count_of_wrong_results_that_is_none_is_refused() -> None:
    log = read_text(
        LOG.replace("357.91       0\n", '357.91       0","stream":"out"}\n'), source="a"
    )
    assert list(log.reasons) == ["#wrong: expected a number or N/A, found "
                                   "'0\",\"stream\":\"out\"}'"]
