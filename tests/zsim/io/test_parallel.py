"""Cases on several processes: the same results, order and errors as one after another."""

import os
import threading
from collections.abc import Iterator

import pytest

import zsim
from zsim.errors import ProgramError
from zsim.io.system import parallel


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers for any work, and a process that may fork, whatever other tests have loaded."""
    monkeypatch.setattr(parallel, "WORTH_S", -1.0)
    monkeypatch.setattr(parallel, "_cores", lambda: 2)
    monkeypatch.setattr(parallel, "_may_fork", lambda: True)


def _squared(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def _fails_from_three(number: int) -> int:
    if number >= 3:
        raise ProgramError(where=f"case {number}", expected="less than 3", found=str(number))
    return number


@pytest.mark.usefixtures("two_cores")
def test_results_come_in_the_order_of_the_cases_from_other_processes() -> None:
    results = parallel.mapped(_squared, range(20))
    assert [square for square, _ in results] == [number**2 for number in range(20)]
    first, *others = [process for _, process in results]
    assert first == os.getpid()
    assert os.getpid() not in others


@pytest.mark.parametrize("worth_s", [-1.0, float("inf")])
@pytest.mark.usefixtures("two_cores")
def test_a_case_is_taken_when_the_result_so_many_ahead_has_been_used(
    worth_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same cases, on one core or on two."""
    monkeypatch.setattr(parallel, "WORTH_S", worth_s)
    squares = list[int]()

    def cases() -> Iterator[int]:
        for number in range(9):
            assert squares == [other**2 for other in range(number - 2)]
            yield number

    for square, process in parallel.in_turn(_squared, cases(), ahead=3):
        squares.append(square)
        assert (process == os.getpid()) == (worth_s > 0)
    assert squares == [number**2 for number in range(9)]


@pytest.mark.usefixtures("two_cores")
def test_cases_known_to_be_worth_it_are_all_done_in_other_processes(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "WORTH_S", float("inf"))
    results = parallel.mapped(_squared, range(4), at_once=True)
    assert [square for square, _ in results] == [0, 1, 4, 9]
    assert os.getpid() not in {process for _, process in results}


def test_little_work_forks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "WORTH_S", float("inf"))
    results = parallel.mapped(_squared, range(20))
    assert {process for _, process in results} == {os.getpid()}


@pytest.mark.usefixtures("two_cores")
def test_the_error_of_the_first_case_is_raised_as_it_is() -> None:
    with pytest.raises(ProgramError, match=r"^case 3: expected less than 3, found 3$"):
        parallel.mapped(_fails_from_three, range(8))


def test_a_process_with_another_thread_forks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "WORTH_S", -1.0)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        results = parallel.mapped(_squared, range(8))
    finally:
        stop.set()
        thread.join()
    assert {process for _, process in results} == {os.getpid()}


@pytest.mark.usefixtures("two_cores")
def test_fit_is_equal_from_processes_and_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = zsim.Scenario(
        model={"preset": "gpt-small"}, batch={"micro_batch": 1, "sequence_length": 128},
        cluster={"preset": "dgx-h100", "nodes": 1}, strategy={"name": "fsdp2"},
    )
    together = zsim.fit(scenario)
    monkeypatch.setattr(parallel, "_cores", lambda: 1)
    assert together == zsim.fit(scenario)
