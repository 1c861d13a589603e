"""Examples of hypothesis on ranks, and ranks that stay for calls of functions."""

from __future__ import annotations

import pytest

from tests.zreal.testing.conftest import RankSessions
from zreal.testing import RankPool, RanksFailed
from zsim.errors import ArgumentError

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.gloo

HYPOTHESIS = ("-p", "_hypothesis_pytestplugin", "-p", "no:cacheprovider")


def test_hypothesis_draws_in_the_controller_and_all_ranks_run_the_same_example(
    sessions: RankSessions
) -> None:
    reports = sessions.reports("""
from hypothesis import assume, given, settings, strategies as st

some = settings(max_examples=20, database=None, derandomize=True)

@pytest.mark.ranks(2)
class TestClass:
    @pytest.mark.parametrize("dtype", ["int64"])
    @some
    @given(data=st.lists(st.integers(0, 9), min_size=1))
    def test_passing(self, rank, data, dtype):
        assume(len(data) < 5)
        total = torch.tensor(data, dtype=getattr(torch, dtype))
        dist.all_reduce(total)
        assert total.tolist() == [2 * value for value in data]

@some
@given(size=st.integers(1, 1000))
@pytest.mark.ranks(2)
def test_failing(rank, size):
    shard = torch.ones(-(-size // rank.world_size))
    total = torch.empty(len(shard) * rank.world_size)
    dist.all_gather_into_tensor(total, shard)
    assert len(total) == size
""", *HYPOTHESIS)

    assert reports["TestClass::test_passing[int64]"].passed
    report = reports["test_failing"].longreprtext
    assert report.splitlines()[0] == (
        "ranks 0, 1 of 2 failed alike: AssertionError: assert 2 == 1 (test_user.py:27)"
    )
    assert "    rank=rank,\n    size=1,\n)" in report


def test_values_that_cannot_be_sent_to_ranks_are_refused_by_name(sessions: RankSessions) -> None:
    report = sessions.failure("""
from hypothesis import given, settings, strategies as st

@settings(max_examples=1, database=None)
@given(data=st.data())
@pytest.mark.ranks(1)
def test_it(rank, data):
    data.draw(st.integers())
""", *HYPOTHESIS)
    assert "a call of ranks: expected a function at the top of a module, and values that pickle" \
        in report


def test_a_pool_calls_functions_of_the_test_module_in_the_same_processes_until_they_fail(
    sessions: RankSessions
) -> None:
    reports = sessions.reports("""
from zreal.testing import RanksFailed

def process(offset, *, rank):
    return os.getpid(), rank.index + offset

def failing(limit):
    print("printed by", dist.get_rank())
    value = dist.get_rank()
    assert value < limit

def test_first(rank_pool):
    pool = rank_pool(2)
    first, second = pool.run(process, 5)
    assert (first[1], second[1]) == (5, 6)
    assert pool.run(process, 5) == [first, second]
    with pytest.raises(RanksFailed, match="rank 1 of 2 failed first: AssertionError") as failure:
        pool.run(failing, 1)
    assert "E       assert 1 < 1" in str(failure.value)
    assert "[rank 1] stdout:\\nprinted by 1" in str(failure.value)
    anew = pool.run(process, 5)
    assert not {pid for pid, _ in anew} & {first[0], second[0]}
    os.environ["POOL"] = str(anew)

def test_second(rank_pool):
    assert str(rank_pool(2).run(process, 5)) == os.environ.pop("POOL")
""")
    assert [report.longreprtext for report in reports.values()] == ["", ""]


def _place() -> str:
    return __name__


def _raising() -> None:
    raise ValueError("in a function")


def test_a_pool_outside_of_a_session_calls_any_function_that_can_be_imported() -> None:
    with RankPool(2) as pool:
        assert pool.run(_place) == [__name__] * 2
        with pytest.raises(RanksFailed, match="ranks 0, 1 of 2 failed alike: ValueError: in a fu"):
            pool.run(_raising)
        with pytest.raises(ArgumentError, match="expected a function at the top of a module"):
            pool.run(lambda: 1)
        assert pool.run(_place) == [__name__] * 2
