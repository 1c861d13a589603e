"""Every rank is judged: the first to fail is the headline, and what follows stands below it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from tests.zreal.testing.conftest import RankSessions
from zreal.processes.rank_status import RankStatus
from zreal.processes.reports.stacks import Frame
from zreal.testing.judgement.roll_call import body_frames, roll_call
from zreal.testing.judgement.waits import held_up

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.gloo


def test_an_assertion_on_a_rank_shows_its_values_and_the_other_ranks_ends(
    sessions: RankSessions
) -> None:
    report = sessions.failure("""
@pytest.mark.ranks(3)
def test_it(rank):
    value = rank.index
    assert value != 1
""")
    head, *_, passed = report.splitlines()

    assert head == "rank 1 of 3 failed first: AssertionError: assert 1 != 1 (test_user.py:8)"
    assert ">       assert value != 1\nE       assert 1 != 1\n" in report
    assert passed == "ranks 0, 2 passed"


def test_the_same_failure_on_all_ranks_is_shown_once(sessions: RankSessions) -> None:
    report = sessions.failure("""
@pytest.mark.ranks(3)
def test_it(rank):
    sys.exit(0)
""")
    assert report.splitlines()[0] == "ranks 0-2 of 3 failed alike: SystemExit: 0 (test_user.py:7)"
    assert report.count("SystemExit: 0") == 2


def test_the_first_rank_to_fail_by_time_is_the_headline(sessions: RankSessions) -> None:
    sessions.end_when(lambda ranks: all(rank.error for rank in ranks))
    report = sessions.failure("""
@pytest.mark.ranks(2)
def test_it(rank, tmp_path):
    if rank.index == 1:
        (tmp_path / "failed").touch()
        raise ValueError("first")
    while not (tmp_path / "failed").exists():
        time.sleep(0.01)
    time.sleep(0.05)
    raise ValueError("second")
""")
    head, *_, other = report.splitlines()

    assert head == "rank 1 of 2 failed first: ValueError: first (test_user.py:9)"
    assert other == "rank 0 failed too: ValueError: second (test_user.py:13)"


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)",
         "was killed by SIGKILL (often the system's out-of-memory killer)"),
        ("os._exit(3)", "exited with code 3"),
    ],
    ids=["SIGKILL", "exit"],
)
def test_a_rank_that_dies_is_named_and_lost_connections_are_consequences(
    sessions: RankSessions, end: str, how: str
) -> None:
    sessions.end_when(lambda ranks: all(rank.error for rank in (ranks[0], ranks[2])))
    report = sessions.failure(f"""
@pytest.mark.ranks(3)
def test_it(rank):
    dist.all_reduce(torch.ones(2))
    if rank.index == 1:
        {end}
    dist.all_reduce(torch.ones(2))
""")
    head, *others = report.splitlines()

    assert head == f"rank 1 of 3 {how}, last collective: all_reduce #0 of 2 float32 over world"
    assert all("failed after it: RuntimeError: " in line for line in others), others
    named = " ".join(line.partition(" failed")[0] for line in others)
    assert re.findall(r"\d", named) == ["0", "2"]


@pytest.mark.parametrize(
    ("first", "second", "texts"),
    [
        ("all_reduce(torch.ones(4))", "all_reduce(torch.ones(4, dtype=torch.int64))",
         ("all_reduce #1 of 4 float32", "all_reduce #1 of 4 int64")),
        ("all_reduce(torch.ones(4))", "all_reduce(torch.ones(5))",
         ("all_reduce #1 of 4 float32", "all_reduce #1 of 5 float32")),
        ("broadcast(torch.ones(4), 0)", "broadcast(torch.ones(4), 1)",
         ("broadcast #1 of 4 float32, root 0", "broadcast #1 of 4 float32, root 1")),
        ("all_reduce(torch.ones(4))", "all_reduce(torch.ones(4), op=dist.ReduceOp.MAX)",
         ("all_reduce #1 of 4 float32", "all_reduce #1 of 4 float32, MAX")),
        ("barrier()", "all_reduce(torch.ones(4))", ("barrier #1", "all_reduce #1 of 4 float32")),
    ],
    ids=["dtype", "size", "root", "reduction", "op"],
)
def test_different_collectives_fail_at_once_with_the_minority_named(
    sessions: RankSessions, first: str, second: str, texts: tuple[str, str]
) -> None:
    """gloo itself returns wrong numbers for other dtypes, and waits or aborts for the others."""
    sessions.end_when(
        lambda ranks: all("#1" in rank.last_collective for rank in ranks)
        and any(rank.error for rank in ranks)
    )
    report = sessions.failure(f"""
@pytest.mark.ranks(3)
def test_it(rank):
    dist.barrier()
    if rank.index == 1:
        dist.{second}
    else:
        dist.{first}
""")
    assert report.splitlines()[:3] == [
        "ranks enter different collectives",
        f"  ranks 0, 2: {texts[0]} over world",
        f"  rank 1: {texts[1]} over world  <- the minority",
    ]
    assert "site-packages" not in report


def test_two_groups_of_the_same_ranks_in_opposite_order_fail_at_once(
    sessions: RankSessions
) -> None:
    report = sessions.failure("""
@pytest.mark.ranks(3, timeout=3600)
def test_it(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups[::1 if rank.index else -1] if rank.index < 2 else []:
        dist.all_reduce(torch.ones(4), group=group)
""")
    told, *ranks = report.splitlines()[:3]
    assert told == "ranks enter different collectives"
    assert sorted(ranks) == [
        "  rank 0: all_reduce #0 of 4 float32 over group 2 of ranks [0, 1]",
        "  rank 1: all_reduce #0 of 4 float32 over ranks [0, 1]",
    ]


def test_a_hang_shows_the_ranks_by_their_place_in_the_code_the_minority_first(
    sessions: RankSessions
) -> None:
    others = "ranks 0, 1, 3, last collective: all_reduce #1 of 2 float32 over world"
    sessions.end_when(lambda ranks: others in roll_call(ranks))
    report = sessions.failure("""
@pytest.mark.ranks(4)
def test_it(rank):
    dist.all_reduce(torch.ones(2))
    if rank.index == 2:
        absent()
    dist.all_reduce(torch.ones(2))

def absent():
    time.sleep(3600)
""")
    head, waits, first, sleeping, caller, majority, *frames = report.splitlines()

    assert head == "the test did not end on ranks 0-3 within 60 s"
    assert waits == "ranks 0, 1, 3 wait in all_reduce #1 of 2 float32 over world for rank 2"
    assert first == "rank 2, last collective: all_reduce #0 of 2 float32 over world"
    assert sleeping.endswith('test_user.py", line 13, in absent')
    assert caller.endswith('test_user.py", line 9, in test_it')
    assert majority == others
    assert frames[-1].endswith('test_user.py", line 10, in test_it')
    assert "in all_reduce" in frames[0]


LOOPING = """
@pytest.mark.ranks(2)
def test_it(rank):
    while rank.index == 1:
        pass
    dist.all_reduce(torch.ones(2))
"""
PLACES = (
    "rank 0 waits in all_reduce #0 of 2 float32 over world for rank 1",
    "rank 1, last collective: no collective yet",
    "rank 0, last collective: all_reduce #0 of 2 float32 over world",
)


def test_a_shorter_limit_of_pytest_timeout_tells_what_each_rank_does(
    sessions: RankSessions
) -> None:
    def limit(ranks: Sequence[RankStatus]) -> bool:
        if "rank 1" in held_up(ranks):
            pytest.fail("Timeout (>1.0s) from pytest-timeout.")
        return False

    sessions.end_when(limit)
    report = sessions.failure(LOOPING).splitlines()
    assert report[0] == "the test: Timeout (>1.0s) from pytest-timeout."
    assert tuple(line for line in report[1:] if not line.startswith("    ")) == PLACES


def test_who_interrupts_a_hang_is_told_what_each_rank_does(sessions: RankSessions) -> None:
    def interrupt(ranks: Sequence[RankStatus]) -> bool:
        if "rank 1" in held_up(ranks):
            raise KeyboardInterrupt
        return False

    sessions.end_when(interrupt)
    assert set(PLACES[:2]) <= {*sessions.interrupted(LOOPING)}


def test_frames_of_torch_that_call_each_other_are_told_as_one() -> None:
    torch, user = "/env/site-packages/torch", Frame("train.py", 3, "train")
    inner, outer = Frame(f"{torch}/c10d.py", 1, "wait"), Frame(f"{torch}/module.py", 2, "call")
    assert body_frames((inner, outer, outer, user, outer)) == (inner, user, outer)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("all_reduce(torch.ones(2), group=pair)", "all_reduce #0 of 2 float32"),
        ("monitored_barrier(pair)", "monitored_barrier #0"),
    ],
    ids=["in c10d", "in its kernel"],
)
def test_a_body_that_leaves_a_rank_in_a_collective_is_told_without_a_timeout(
    sessions: RankSessions, call: str, told: str
) -> None:
    report = sessions.failure(f"""
@pytest.mark.ranks(3, timeout=3600)
def test_it(rank):
    pair = dist.new_group([0, 1])
    if rank.index != 1:
        dist.{call}
""")
    assert report.splitlines()[:2] == [
        "ranks were left waiting: the test has ended on ranks that they wait for",
        f"rank 0 waits in {told} over ranks [0, 1] for rank 1",
    ]
    assert 'test_user.py", line 9, in test_it' in report
    assert "/zreal/" not in report
    assert report.splitlines()[-1] == "ranks 1, 2 passed"


def test_a_fork_that_comes_out_of_the_body_is_no_rank_and_is_told(sessions: RankSessions) -> None:
    report = sessions.failure("""
@pytest.mark.ranks(2)
def test_it(rank):
    dist.barrier()
    if rank.index == 1:
        fork = os.fork()
        if fork == 0:
            raise ValueError("in the fork")
        os.waitpid(fork, 0)
""")
    head, remedy, *text = report.splitlines()
    assert head == "the fork of rank 1 came out of the test as well, and was ended there"
    assert remedy == "end a fork by os._exit in the body"
    assert "E               ValueError: in the fork" in text
    assert "test_user.py:11: ValueError" in text


def test_a_fork_is_told_at_the_call_of_a_pool_that_made_it(sessions: RankSessions) -> None:
    report = sessions.failure("""
def forks(rank):
    fork = os.fork()
    if fork:
        os.waitpid(fork, 0)

def test_it(rank_pool):
    rank_pool(2).run(forks)
""")
    assert "RanksFailed: the fork of ranks 0, 1 came out of the test as well, and was" in report


def test_a_collective_that_nobody_waits_for_is_missed_on_the_other_rank(
    sessions: RankSessions
) -> None:
    assert sessions.failure("""
@pytest.mark.ranks(2)
def test_it(rank):
    if rank.index:
        dist.all_reduce(torch.ones(2), async_op=True)
""") == (
        "ranks end the test after different numbers of collectives\n"
        "  rank 0: 0 over world\n"
        "  rank 1: 1 over world"
    )


@pytest.mark.parametrize(
    ("source", "head"),
    [
        ("raise ValueError('before')\n    yield", "failed first: ValueError: before"),
        ("yield\n    raise ValueError('after')", "failed alike: ValueError: after"),
    ],
    ids=["set-up", "teardown"],
)
def test_fixtures_that_fail_on_ranks_are_reported(
    sessions: RankSessions, source: str, head: str
) -> None:
    condition = "if rank.index == 1: " if "before" in source else ""
    report = sessions.failure(f"""
@pytest.fixture
def failing(rank):
    {condition}{source}

@pytest.mark.ranks(2)
def test_it(rank, failing):
    pass
""")
    assert head in report.splitlines()[0]


def test_a_module_that_only_ranks_cannot_import_is_reported(sessions: RankSessions) -> None:
    report = sessions.failure("""
if dist.is_initialized():
    raise ValueError("on a rank")

@pytest.mark.ranks(2)
def test_it(rank):
    pass
""")
    assert report.splitlines()[0] == "ranks 0, 1 of 2 failed alike: ValueError: on a rank"
