"""The collective of a log of nccl-tests: what the log says itself, and never one that it
contradicts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.zsim.calibration.nccl_tests.test_nccl_logs import LOG, report
from zsim.calibration.data import measurements
from zsim.calibration.nccl_tests.collective_names import PROGRAMS, UNNAMED, said_by, said_by_name
from zsim.calibration.nccl_tests.json_logs import read_json
from zsim.calibration.nccl_tests.text_logs import read_text
from zsim.calibration.records import Skipped
from zsim.cli import main

COMMAND = "mpirun -np 8 ./build/{} -b 1M -e 8G"


@pytest.mark.parametrize(
    "source",
    ["run.log", "all_reduce.log", "AllReduce-2xH100/run.txt", "all_reduce_and_all_gather.txt"],
)
@pytest.mark.parametrize("asked", ["", "all_reduce"])
def test_a_log_that_says_its_collective_is_of_that_one(source: str, asked: str) -> None:
    assert [row.op for row in read_text(LOG, source=source, collective=asked).rows] == [
        "all_reduce"
    ] * 2


@pytest.mark.parametrize(("source", "asked", "others"), [
    ("all_gather.txt", "", "the file's name says all_gather"),
    ("a.txt", "broadcast", "--collective says broadcast"),
    ("reduce-scatter/a.txt", "broadcast",
     "--collective says broadcast; the file's name says reduce_scatter"),
])
def test_a_log_that_the_option_or_its_name_contradicts_is_skipped_with_both(
    source: str, asked: str, others: str
) -> None:
    log = read_text(LOG, source=source, collective=asked)
    assert (log.rows, log.reasons) == ((), {f"collectives contradict each other: the log says "
                                                f"all_reduce; {others}": 2})
    whole = read_json(json.dumps(report()), source=source, collective=asked)
    assert whole.rows == ()
    assert (
        whole.reasons[f"collectives contradict each other: the log says all_reduce; {others}"] == 1
    )


@pytest.mark.parametrize("name", [
    name for name in PROGRAMS
    if name not in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
])
@pytest.mark.parametrize("asked", ["", "all_reduce"])
def test_a_log_of_a_collective_without_a_model_is_skipped_as_that_whatever_it_is_called(
    name: str, asked: str
) -> None:
    """The rows are those of an all-reduce, so nothing but the name could say it."""
    other = LOG.replace("all_reduce_perf", f"{name}_perf")
    apart = (
        f"collectives contradict each other: the log says {name}; --collective says all_reduce; "
        if asked
        else ""
    )
    assert read_text(other, source="a.log", collective=asked).reasons == {
        f"{apart}{name} has no model": 2
    }
    old = other.replace(f"# Collective test starting: {name}_perf", COMMAND.format(f"{name}_perf"))
    assert read_text(old, source="a.log", collective=asked).reasons == {
        f"{apart}{name} has no model": 2
    }


def test_a_program_that_nobody_knows_has_no_model() -> None:
    assert read_text(LOG.replace("all_reduce_perf", "alltoallv_perf"), source="a.log").reasons == {
        "alltoallv has no model": 2
    }


def test_a_command_behind_a_summary_is_that_of_the_next_run() -> None:
    """Shells echo what they start, and launchers say what has ended. nccl-tests names no collective
    there."""
    unnamed = LOG.replace("# Collective test starting: all_reduce_perf\n", "")
    text = "".join(
        f"+ {COMMAND.format(name)}\n{unnamed}"
        for name in ("all_reduce_perf", "sendrecv_perf", "all_reduce_perf")
    )
    log = read_text(text + "srun: all_reduce_perf exited\n", source="three.log")
    assert [row.op for row in log.rows] == ["all_reduce"] * 4
    assert log.reasons == {"sendrecv has no model": 2}


def test_a_name_of_several_collectives_names_none() -> None:
    unnamed = LOG.replace("all_reduce_perf", "perf")
    assert read_text(unnamed, source="all_reduce_all_gather.log").reasons == {
        "the file's name names several collectives: all_reduce, all_gather": 2
    }
    assert read_text(unnamed, source="run.log").reasons == {UNNAMED: 2}
    assert (
        len(read_text(unnamed, source="all_reduce_all_gather.log", collective="all_reduce").rows)
        == 2
    )


@pytest.mark.parametrize(("text", "names"), [
    ("/opt/nccl_all_gather_perf -b 8", ("all_gather",)),
    ("my_perf ./reduce_scatter_perf", ("reduce_scatter",)),
    ("# Collective test starting: gather_perf\nall_gather_perf", ("gather",)),
    ("srun all_reduce_perf_mpi -b 512M", ("all_reduce",)), ("perf", ()),
])
def test_the_longest_program_that_fits_is_meant_and_lines_of_nccl_tests_own_come_first(
    text: str, names: tuple[str, ...]
) -> None:
    assert said_by(text) == names


def test_a_file_is_named_by_itself_before_its_folder() -> None:
    assert said_by_name("all_reduce/all_gather.txt") == ("all_gather",)
    assert said_by_name("all_reduce/run.txt") == ("all_reduce",)
    assert said_by_name("all-to-all/sendrecv.txt") == ("sendrecv",)


def test_nothing_is_calibrated_on_a_log_of_another_collective(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "all_reduce.log"
    path.write_text(LOG.replace("all_reduce_perf", "sendrecv_perf"))
    message = (
        "collectives contradict each other: the log says sendrecv; the file's name says "
        "all_reduce; sendrecv has no model"
    )
    assert measurements.rows(path) == [
        Skipped(source="all_reduce.log", line=15, reason=f"{message} (2 rows)")
    ]
    assert main.main(["calibrate", "--from", str(path), "--cluster", "dgx-h100"]) == 2
    assert message in capsys.readouterr().err
