"""Forked processes: errors where they belong, the end of a killed one, and none that is left."""

import os
import signal
import subprocess
import sys
import time

import pytest

from zsim.errors import ProgramError, ZsimError
from zsim.io.system.forked import Workers

SLEEPERS = """
import os, signal, time
from zsim.io.system import parallel

# a shell's background jobs ignore it
signal.signal(signal.SIGINT, signal.default_int_handler)

def case(number):
    os.write(1, f"{os.getpid()}\\n".encode())  # whole, though the other writes too
    time.sleep(600)

parallel._cores = lambda: 2
parallel.mapped(case, range(4), at_once=True)
"""


def _process(number: int) -> tuple[int, int]:
    return number, os.getpid()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_process_is_asked_again_when_it_has_answered_and_ends_with_the_context() -> None:
    with Workers(_process, count=2) as workers:
        results = [result() for result in [workers.ask(number) for number in range(9)]]
        processes = {process for _, process in results}
        assert all(_is_alive(process) for process in processes)
    assert [number for number, _ in results] == [*range(9)]
    assert len(processes) <= 2
    assert os.getpid() not in processes
    assert not any(_is_alive(process) for process in processes)


def test_a_case_that_fails_is_done_again_where_its_error_can_be_traced() -> None:
    def fails(number: int) -> int:
        raise ProgramError(where=f"{number}", expected="a parent", found=f"{os.getpid()}")

    with (
        Workers(fails, count=1) as workers,
        pytest.raises(ProgramError, match=f"^7: expected a parent, found {os.getpid()}$") as error,
    ):
        workers.ask(7)()
    assert error.traceback[-1].name == "fails"


def test_a_result_that_cannot_be_pickled_is_made_here() -> None:
    with Workers(lambda number: (lambda: number), count=1) as workers:
        assert workers.ask(3)()() == 3


def test_a_killed_process_is_told() -> None:
    def killed(number: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with (
        Workers(killed, count=1) as workers,
        pytest.raises(ZsimError, match="^a forked process: expected the result of its case"),
    ):
        workers.ask(0)()


def test_a_process_that_was_killed_while_idle_is_told() -> None:
    with Workers(_process, count=1) as workers:
        _, process = workers.ask(0)()
        os.kill(process, signal.SIGKILL)
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ZsimError, match="^a forked process: expected the result of its case"):
            workers.ask(1)()


def test_long_results_of_many_cases_hold_nobody_up() -> None:
    with Workers(lambda number: bytes(10**6) + bytes([number]), count=2) as workers:
        waiting = [workers.ask(number) for number in range(20)]
        assert [result()[-1] for result in waiting] == [*range(20)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_leaves_no_process(number: signal.Signals) -> None:
    command = subprocess.Popen(
        [sys.executable, "-c", SLEEPERS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, start_new_session=True,
    )
    assert command.stdout is not None
    processes = [int(command.stdout.readline()) for _ in range(2)]
    os.killpg(command.pid, number)
    assert command.wait(timeout=60) != 0
    end = time.monotonic() + 60
    while any(map(_is_alive, processes)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(map(_is_alive, processes))
    command.stdout.close()
