"""A rank that dies, raises or never arrives is named with its last collective, and no process is
left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.folders import ROOT
from tests.zreal.conftest import TimeOutWhen
from zreal.processes import fork_server
from zreal.processes import launch as launching
from zreal.processes.launch import launch
from zreal.processes.rank_status import REFERENCE, RankStatus
from zreal.processes.reports.failure_report import LaunchError
from zsim.io.system.processes import is_stopped

pytestmark = pytest.mark.gloo

BODIES = "tests.zreal.processes.rank_bodies"
FAR_S = 600.0
"""Timeout that no launch here reaches: the suite's own limit comes first, and ranks wait longer."""


def have_begun(ranks: list[RankStatus]) -> bool:
    """Every rank has said its first collective."""
    return all("#" in rank.last_collective for rank in ranks)


@pytest.fixture(autouse=True)
def _no_rank_is_left() -> Iterator[None]:
    """Children of this process that were there before, as loky's idle workers, are of others."""
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) <= before


def test_every_rank_returns_its_result_in_order() -> None:
    results = launch(f"{BODIES}:fine", {"given": 5}, world_size=3, timeout_s=FAR_S)

    assert results == [{"rank": rank, "world_size": 3, "given": 5} for rank in range(3)]


def test_a_killed_rank_is_named_with_its_signal_and_last_collective_before_the_timeout() -> None:
    with pytest.raises(LaunchError) as error:
        launch(f"{BODIES}:killed", {}, world_size=3, timeout_s=FAR_S)

    assert error.value.where == "rank 1"
    assert error.value.found == (
        "killed by SIGKILL (often the system's out-of-memory killer), "
        "last collective: reduce_scatter #1 of 64 B over dp_shard; ranks [0, 2] were stopped or "
        "failed after it"
    )
    assert error.value.exit_code == 1


def test_folders_of_a_killed_rank_and_of_its_siblings_go_with_them(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="killed by SIGKILL"):
        launch(
            f"{BODIES}:killed_with_files", {"names": str(tmp_path)}, world_size=2, timeout_s=FAR_S
        )

    folders = [Path((tmp_path / rank).read_text()) for rank in ("0", "1")]
    assert [folder for folder in folders if folder.exists()] == []


def test_an_exception_on_one_rank_is_named_with_its_text_and_last_collective() -> None:
    with pytest.raises(LaunchError) as error:
        launch(f"{BODIES}:raising", {}, world_size=3, timeout_s=FAR_S)

    assert error.value.where == "rank 1"
    assert error.value.found.startswith("ValueError: a wrong shard")
    assert "last collective: all_gather #7 of 128 B over dp_shard" in error.value.found


def test_a_rank_that_never_arrives_is_the_minority_of_the_roll_call(
    time_out_when: TimeOutWhen
) -> None:
    time_out_when(have_begun)
    with pytest.raises(LaunchError) as error:
        launch(f"{BODIES}:absent", {}, world_size=4, timeout_s=4)

    assert error.value.where == "rank 2"
    report, frame = error.value.found.split("; rank 2 in ")
    assert report == (
        "a hang: ranks [2] at all_reduce #3 of 8 B over world; ranks [0, 1, 3] at all_reduce #4 "
        "of 8 B over world"
    )
    assert frame.startswith('File "')
    assert frame.endswith(", in wait_to_be_ended")


def test_a_stopped_rank_is_named_though_it_had_announced_the_collective_that_all_wait_in(
    time_out_when: TimeOutWhen
) -> None:
    time_out_when(lambda ranks: have_begun(ranks) and is_stopped(ranks[2].process.pid))
    with pytest.raises(LaunchError) as error:
        launch(f"{BODIES}:stopped", {}, world_size=3, timeout_s=4)

    assert error.value.where == "rank 2"
    assert error.value.found == (
        "a hang: it is stopped (as by SIGSTOP or a debugger), last collective: all_reduce #4 of "
        "8 B over world; "
        "ranks [0, 1, 2] at all_reduce #4 of 8 B over world"
    )


def test_every_stopped_rank_is_named(time_out_when: TimeOutWhen) -> None:
    time_out_when(
        lambda ranks: have_begun(ranks) and all(is_stopped(rank.process.pid) for rank in ranks[1:])
    )
    with pytest.raises(LaunchError) as error:
        launch(f"{BODIES}:stopped", {"ranks": [1, 2, 3]}, world_size=4, timeout_s=3)

    assert error.value.where == "ranks [1, 2, 3]"
    assert error.value.found == (
        "a hang: they are stopped (as by SIGSTOP or a debugger), last collective: all_reduce #4 "
        "of 8 B over world; "
        "ranks [0, 1, 2, 3] at all_reduce #4 of 8 B over world"
    )


def test_ranks_that_get_on_until_the_timeout_are_slow_and_do_not_hang(
    time_out_when: TimeOutWhen
) -> None:
    time_out_when(lambda ranks: all(rank.is_progressing for rank in ranks))
    with pytest.raises(LaunchError) as error:
        launch(f"{BODIES}:slow", {}, world_size=2, timeout_s=4)

    assert error.value.where == "ranks [0, 1]"
    assert error.value.found.startswith(
        "a run that is slow and does not hang: each entered another collective within the last 3 "
        "s; ranks ["
    )
    assert error.value.remedy == "raise timeout_s, or take fewer steps"


def test_a_killed_fork_server_is_what_is_named_and_the_next_launch_starts_another() -> None:
    with pytest.raises(LaunchError) as error:
        launch(f"{BODIES}:ending_the_server", {"signal": 9}, world_size=2, timeout_s=FAR_S)

    assert error.value.where == "the fork server"
    assert error.value.found == (
        "a server killed by SIGKILL (often the system's out-of-memory killer), and ranks [0, 1] "
        "with it; "
        "ranks [0, 1] at all_reduce #4 of 8 B over world"
    )
    assert launch(f"{BODIES}:fine", {"given": 1}, world_size=1, timeout_s=FAR_S)[0]["given"] == 1


def test_a_stopped_fork_server_is_named_before_it_starts_a_rank_and_replaced() -> None:
    launch(f"{BODIES}:fine", {"given": 0}, world_size=1, timeout_s=FAR_S)
    server = fork_server.server_pid()
    assert server is not None
    os.kill(server, signal.SIGSTOP)
    with pytest.raises(LaunchError) as error:
        launch(f"{BODIES}:fine", {"given": 0}, world_size=2, timeout_s=FAR_S)

    assert error.value.where == "the fork server"
    assert error.value.found == (
        "a server stopped (as by SIGSTOP or a debugger), and ended, before rank 0 of 2 was "
        "started"
    )
    assert launch(f"{BODIES}:fine", {"given": 1}, world_size=1, timeout_s=FAR_S)[0]["given"] == 1


def test_a_fork_server_that_is_stopped_while_ranks_run_is_named_with_the_roll_call() -> None:
    """Rank 0 ends then, which a stopped server cannot tell."""
    with pytest.raises(LaunchError) as error:
        launch(f"{BODIES}:ending_the_server", {"signal": 19}, world_size=2, timeout_s=FAR_S)

    assert error.value.where == "the fork server"
    assert error.value.found == (
        "a server stopped (as by SIGSTOP or a debugger), and ended, and ranks [0, 1] with it; "
        "ranks [0, 1] at all_reduce #4 of 8 B over world"
    )


def test_a_fork_server_that_does_not_get_to_the_ranks_is_ended_at_a_limit(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is made anew loads torch, which takes longer than this limit."""
    server = fork_server.server_pid()
    if server is not None:
        os.kill(server, signal.SIGKILL)
        os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
    monkeypatch.setattr(fork_server, "START_S", 0.0)
    with pytest.raises(LaunchError, match="did not start all ranks within 0 s") as error:
        launch(f"{BODIES}:fine", {"given": 0}, world_size=2, timeout_s=FAR_S)

    assert error.value.where == "the fork server"


SEGFAULT = """
import os, signal, threading, time
from multiprocessing import forkserver
from zreal.processes import fork_server

def end_the_server():
    while fork_server.server_pid() is None:
        time.sleep(0.001)
    os.kill(fork_server.server_pid(), signal.SIGSEGV)

if __name__ == "__main__":
    threading.Thread(target=end_the_server).start()
    from zsim.cli.main import main
    raise SystemExit(main(["validate", "scenarios/parity/fsdp2-mlp-2.toml"]))
"""


def test_a_fork_server_that_crashes_before_it_has_started_a_rank_is_named_with_its_signal(
    tmp_path: Path
) -> None:
    """The server crashes as it loads torch. Nothing was ended by then, and nothing is said of what
    could be kept."""
    script = tmp_path / "controller.py"
    script.write_text(SEGFAULT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, env=environment, capture_output=True, text=True
    )

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "zsim: the fork server: expected the process that starts ranks to live until all are "
        "done, found a server killed by SIGSEGV, before rank 0 of 2 was started; "
        "find out what stopped or ended it; by itself it only loads torch, as `python -c "
        "'import torch'` does"
    )


def test_a_fork_server_that_ends_between_two_ranks_is_named_though_python_starts_another(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(f"{BODIES}:fine", {"given": 0}, world_size=1, timeout_s=FAR_S)
    start = launching._start

    def start_and_end_the_server(*arguments: Any, rank: int, **more: Any) -> Any:
        started = start(*arguments, rank=rank, **more)
        if rank == 0:
            server = fork_server.server_pid()
            assert server is not None
            os.kill(server, signal.SIGKILL)
            os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
        return started

    monkeypatch.setattr(launching, "_start", start_and_end_the_server)
    with pytest.raises(LaunchError, match="ended, before rank 1 of 3 was started") as error:
        launch(f"{BODIES}:all_waiting", {}, world_size=3, timeout_s=FAR_S)

    assert error.value.where == "the fork server"


def test_ranks_that_train_the_reference_are_slow_and_do_not_hang(
    time_out_when: TimeOutWhen
) -> None:
    time_out_when(lambda ranks: all(rank.last_collective == REFERENCE for rank in ranks))
    with pytest.raises(LaunchError) as error:
        launch(f"{BODIES}:alone", {}, world_size=2, timeout_s=4)
    assert error.value.where == "ranks [0, 1]"
    assert error.value.found.startswith("a run that is slow and does not hang: steps are "
                                        "over, and ranks are at the single-process")


def test_where_all_ranks_stand_at_one_place_none_is_blamed() -> None:
    """Ranks that say nothing, as they do on the slowest machine until the clock itself ends them.
    """
    with pytest.raises(LaunchError) as error:
        launch(f"{BODIES}:silent", {}, world_size=3, timeout_s=1)

    assert error.value.where == "ranks [0, 1, 2]"
    report, frame = error.value.found.split("; ranks [0, 1, 2] in ")
    assert report.endswith("which of them did not arrive cannot be told")
    assert frame.endswith(", in wait_to_be_ended")


@pytest.mark.parametrize("body", [pytest.param("absent", marks=pytest.mark.slow), "stopped"])
def test_ranks_end_when_their_controller_is_killed_though_one_of_them_is_stopped(
    tmp_path: Path, body: str
) -> None:
    marker = tmp_path / "controller.py"
    marker.write_text(
        textwrap.dedent(f"""
        from zreal.processes.launch import launch
        if __name__ == "__main__":
            launch("{BODIES}:{body}", {{}}, world_size=3, timeout_s={FAR_S})
        """)
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    controller = subprocess.Popen([sys.executable, str(marker)], cwd=ROOT, env=environment)
    ranks = _descendants_when(controller.pid, at_least=5)
    while body == "stopped" and not any(is_stopped(pid) for pid in ranks):
        time.sleep(0.1)
    controller.kill()
    controller.wait()
    _until_ended(ranks)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGTERM, "ended by SIGTERM"),
        pytest.param(signal.SIGINT, "interrupted", marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_command_ends_its_ranks_and_is_said(
    number: signal.Signals, said: str, tmp_path: Path
) -> None:
    scenario = tmp_path / "long.toml"
    text = (ROOT / "scenarios/parity/fsdp2-mlp-2.toml").read_text()
    scenario.write_text(text.replace("steps = 3", "steps = 1000"))
    command = [
        sys.executable, "-m", "zsim", "run", "--backend", "gloo", "--timeout", str(FAR_S),
        str(scenario),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # who runs this in the background may have SIGINT ignored
    heard = partial(signal.signal, number, signal.SIG_DFL)
    controller = subprocess.Popen(command, cwd=ROOT, env=environment, preexec_fn=heard, **pipes)
    ranks = _descendants_when(controller.pid, at_least=4)
    time.sleep(0.5)
    controller.send_signal(number)
    _, err = controller.communicate()

    assert (controller.returncode, err.splitlines()[-1]) == (128 + number, f"zsim: {said}")
    _until_ended(ranks)


def test_what_ranks_themselves_had_started_ends_with_them(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="over"):
        launch(f"{BODIES}:parent", {"folder": str(tmp_path)}, world_size=2, timeout_s=FAR_S)

    children = [int(file.name) for file in tmp_path.iterdir()]
    assert len(children) == 2
    _until_ended(children)


def _state(pid: int) -> str:
    """Letter of the process's state as in /proc; Z where it has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def _until_ended(pids: list[int]) -> None:
    """Return when all have ended; that some do not end is told by the suite's limit, which shows
    this line."""
    while any(_state(pid) != "Z" for pid in pids):
        time.sleep(0.05)


def _descendants_when(pid: int, *, at_least: int) -> list[int]:
    """All processes below `pid` once there are enough: the resource tracker, the fork server and
    the ranks."""
    descendants: list[int] = []
    while len(descendants) < at_least:
        time.sleep(0.1)
        assert _state(pid) != "Z", "the controller has ended by itself"
        descendants, parents = [], [pid]
        while parents:
            parents = [child for parent in parents for child in _children(parent)]
            descendants += parents
    return descendants


def _children(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            children += map(int, task.read_text().split())
    return children


def test_a_result_that_json_cannot_say_is_an_error_with_its_text() -> None:
    with pytest.raises(LaunchError, match="TypeError: Object of type object is not JSON "
                                          "serializable"):
        launch(f"{BODIES}:unspeakable", {}, world_size=1, timeout_s=FAR_S)


@pytest.mark.parametrize(("number", "name"), [(11, "SIGSEGV"), (40, "signal 40")])
def test_a_rank_killed_by_any_signal_is_named_with_it(number: int, name: str) -> None:
    with pytest.raises(LaunchError, match=f"killed by {name}"):
        launch(f"{BODIES}:killed_by", {"number": number}, world_size=1, timeout_s=FAR_S)


def test_a_script_that_starts_ranks_as_it_is_read_is_read_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from zreal.processes.launch import launch\n"
        "print('read', __spec__, '__file__' in globals())\n"
        f"launch('{BODIES}:fine', {{'given': 0}}, world_size=2, timeout_s={FAR_S})\n"
        "print('done', __spec__, '__file__' in globals())\n"
    )
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=paths, check=True
    )
    first, last = done.stdout.splitlines()
    assert first.removeprefix("read") == last.removeprefix("done")


@pytest.mark.parametrize("names", [{}, {"__file__": "script.py"}])
def test_a_script_keeps_the_file_that_it_has_or_has_not(
    names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read from standard input has none."""
    script, spec = ModuleType("__main__"), object()
    vars(script).update(names, __spec__=spec)
    monkeypatch.setitem(sys.modules, "__main__", script)
    before = dict(vars(script))
    with fork_server.without_main():
        assert "__file__" not in vars(script)
        assert script.__spec__ is None
    assert vars(script) == before


def test_a_rank_that_stops_in_the_middle_of_its_result_is_a_hang_and_not_waited_for(
    time_out_when: TimeOutWhen
) -> None:
    time_out_when(
        lambda ranks: ranks[0].done and bool(ranks[1].unread) and is_stopped(ranks[1].process.pid)
    )
    with pytest.raises(LaunchError, match="a hang") as error:
        launch(f"{BODIES}:half_sent", {}, world_size=2, timeout_s=2)

    assert error.value.where == "rank 1"
    assert error.value.results == {0: "a result"}


def test_a_result_larger_than_a_pipe_arrives_whole() -> None:
    text = "é" * 5_000_000

    (result,) = launch(f"{BODIES}:fine", {"given": text}, world_size=1, timeout_s=FAR_S)
    assert result["given"] == text


def test_the_first_to_fail_is_the_headline_with_the_first_line_of_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = tmp_path / "heard"
    receive = RankStatus.receive

    def receive_and_tell(rank: RankStatus) -> None:
        if rank.error:
            heard.touch()
        receive(rank)

    monkeypatch.setattr(RankStatus, "receive", receive_and_tell)
    with pytest.raises(LaunchError, match="RuntimeError: the real cause") as error:
        launch(f"{BODIES}:raising_at_length", {"heard": str(heard)}, world_size=3, timeout_s=FAR_S)

    assert error.value.where == "rank 1"


def test_a_machine_that_refuses_sockets_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("AF_UNIX path too long")

    monkeypatch.setattr("zreal.processes.launch._start", refuse)
    with pytest.raises(LaunchError, match="found OSError: AF_UNIX path too long; look at `ulimit "
                                          "-n`"):
        launch(f"{BODIES}:fine", {"given": 0}, world_size=1, timeout_s=FAR_S)


def test_a_rank_that_ignores_the_request_to_end_is_killed(time_out_when: TimeOutWhen) -> None:
    time_out_when(have_begun)
    with pytest.raises(LaunchError, match="a hang"):
        launch(f"{BODIES}:deaf", {}, world_size=2, timeout_s=3)



def test_a_rank_that_raises_is_named_before_the_timeout_though_its_siblings_notice_nothing() -> (
    None
):
    with pytest.raises(LaunchError, match="ValueError: alone") as error:
        launch(f"{BODIES}:raising_alone", {}, world_size=3, timeout_s=FAR_S)

    assert error.value.where == "rank 1"
