"""Skips, expected failures, and tests that cannot run on ranks."""

from __future__ import annotations

import pytest

from tests.zreal.testing.conftest import RankSessions

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.gloo


def test_ranks_that_all_skip_for_the_same_reason_skip_the_test_and_others_fail_it(
    sessions: RankSessions
) -> None:
    reports = sessions.reports("""
pytestmark = pytest.mark.ranks(2)

def test_all(rank):
    pytest.skip("no such feature")

def test_some(rank):
    if rank.index:
        pytest.skip("no such feature")

def test_reasons(rank):
    pytest.skip(f"no feature {rank.index}")

def test_in_a_fixture(skipping):
    pass

@pytest.fixture
def skipping():
    pytest.skip("no such fixture")
""")
    assert {name: report.outcome for name, report in reports.items()} == {
        "test_all": "skipped", "test_some": "failed", "test_reasons": "failed",
        "test_in_a_fixture": "skipped",
    }
    longrepr = reports["test_all"].longrepr
    assert isinstance(longrepr, tuple)
    assert longrepr[2] == "Skipped: no such feature"
    assert str(longrepr[0]).endswith("test_user.py")
    assert reports["test_some"].longreprtext == (
        "ranks end the test in different ways\n  rank 0 passed\n  rank 1 skipped: no such feature"
    )


def test_marks_for_skip_and_expected_failure_are_judged_once_by_the_controller(
    sessions: RankSessions
) -> None:
    assert sessions.outcomes("""
pytestmark = pytest.mark.ranks(2)

@pytest.mark.skipif(True, reason="never here")
def test_skipped(rank): pass

@pytest.mark.xfail(strict=True)
def test_failing(rank):
    assert rank.index == 2

def test_expected(rank):
    pytest.xfail("not yet")
""") == {"test_skipped": "skipped", "test_failing": "xfailed", "test_expected": "xfailed"}


def test_devices_that_are_not_there_skip_a_test_or_fail_it_where_they_are_required(
    sessions: RankSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    source = """
@pytest.mark.ranks(2, backend="nccl")
def test_nccl(rank): pass

@pytest.mark.needs_gpus(2)
def test_gpus(): pass
"""
    assert set(sessions.outcomes(source).values()) == {"skipped"}
    plugin = ("-p", "zsim.testing.pytest_plugin")
    reports = sessions.reports(source, *plugin, "--zero-require-backend")
    assert [report.longreprtext for report in reports.values()] == [
        f"marker {which}: expected 2 CUDA devices, found 0 (--zero-require-backend)"
        for which in ("ranks: nccl", "needs_gpus")
    ]


def test_options_name_the_ranks_of_a_marker_without_and_torchs_debug_level(
    sessions: RankSessions
) -> None:
    assert sessions.outcomes("""
@pytest.mark.ranks
def test_it(rank):
    assert os.environ["TORCH_DISTRIBUTED_DEBUG"] == "INFO"
    assert dist.get_debug_level() == dist.DebugLevel.INFO

@pytest.mark.ranks(1)
def test_named(rank): pass
""", "-p", "zsim.testing.pytest_plugin", "--zero-world-size=1,2", "--zero-debug=info") == {
        "test_it[1-ranks]": "passed", "test_it[2-ranks]": "passed", "test_named": "passed",
    }


SIZES = "marker ranks: expected numbers of ranks from 1 to 64, as 4 or [2, 4], found"
MISTAKES = {
    "": "marker ranks: expected a number of ranks, timeout and backend, found nothing; ",
    "0": f"{SIZES} 0; ",
    "[2, 'x']": f"{SIZES} a list; ",
    "2, 4": "marker ranks: expected a number of ranks, timeout and backend, found 4; ",
    "2, size=4": 'marker ranks: expected a number of ranks, timeout and backend, found "size"; ',
    "2, timeout=0": "marker ranks: timeout: expected seconds, more than 0, found 0; ",
    "2, backend='mpi'": 'marker ranks: backend: expected gloo or nccl, found "mpi"; ',
    "2, backend='threads'": "marker ranks: backend: expected processes, of gloo or nccl, since "
                            "threads share torch's state and its crashes, found \"threads\"; ",
}


def test_a_mistake_in_a_marker_fails_its_test_alone(sessions: RankSessions) -> None:
    tests = [
        f"@pytest.mark.ranks({arguments})\ndef test_{number}(rank): pass\n"
        for number, arguments in enumerate(MISTAKES)
    ]
    reports = sessions.reports("\n".join(tests) + "\ndef test_other(): pass")

    assert reports.pop("test_other").passed
    texts = [report.longreprtext for report in reports.values()]
    example = '@pytest.mark.ranks(4, timeout=30, backend="gloo")'
    # of a list each number is a test
    of_lists = [2 if given.startswith("[") else 1 for given in MISTAKES]
    messages = zip(MISTAKES.values(), of_lists, strict=True)
    assert texts == [message + example for message, number in messages for _ in range(number)]


def test_coroutines_and_test_cases_are_refused(sessions: RankSessions) -> None:
    reports = sessions.reports("""
import unittest

@pytest.mark.ranks(2)
async def test_coroutine(rank): pass

class TestCase(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_method(self): pass

@pytest.mark.ranks(2)
@pytest.mark.zero(backend="sim")
def test_both(rank): pass

def test_without_the_marker(rank):
    rank.index
""")
    assert [report.longreprtext.splitlines()[-1][:80] for report in reports.values()][:3] == [
        "marker ranks: expected a plain function, found a coroutine; call asyncio.run in ",
        "marker ranks: expected a function or a method of a plain class, found one of a u",
        "marker ranks: expected no marker zero beside it, found both; make two tests: zer",
    ]
    assert (
        "rank.index: expected the marker ranks(n) at the test, found none; @pytest.mark.ranks(2)"
        in reports["test_without_the_marker"].longreprtext
    )
