"""Sends and receives are held to each other, and ranks that wait for none are told at once."""

from __future__ import annotations

import pytest

from tests.zreal.testing.conftest import RankSessions
from zreal.testing.judgement import waits

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.gloo


def test_messages_that_match_pass_by_tags_in_batches_and_from_any_rank(
    sessions: RankSessions
) -> None:
    assert set(sessions.outcomes("""
@pytest.mark.ranks(2)
def test_it(rank):
    other, values = 1 - rank.index, [torch.ones(2), torch.ones(3)]
    group = dist.new_group([0, 1])
    if rank.index:
        sent = [dist.isend(values[0], other, tag=5), dist.isend(values[1], other, group=group)]
        dist.send(values[0], other)
        dist.send(values[1], other)
        [work.wait() for work in sent]
    else:
        dist.recv(values[1], other, group=group)
        dist.recv(values[0], other, tag=5)
        dist.recv(values[0])
        dist.recv(values[1], other)
    batch = [dist.P2POp(dist.isend, values[0], other), dist.P2POp(dist.irecv, values[0], other)]
    [work.wait() for work in dist.batch_isend_irecv(batch)]
""").values()) == {"passed"}


@pytest.mark.parametrize(
    ("receive", "told"),
    [("torch.ones(5)", "5 float32"), ("torch.ones(4, dtype=torch.int32)", "4 int32")],
    ids=["size", "dtype"],
)
def test_a_message_of_another_size_or_dtype_fails_at_once_on_either_rank(
    sessions: RankSessions, receive: str, told: str
) -> None:
    """gloo itself aborts a rank that gets more bytes, and returns other numbers for a dtype."""
    report = sessions.failure(f"""
@pytest.mark.ranks(3)
def test_it(rank):
    if rank.index == 1:
        dist.send(torch.ones(4), 2)
    if rank.index == 2:
        dist.recv({receive}, 1)
""")
    assert report.splitlines()[:3] == [
        "ranks send and receive different messages",
        "  rank 1: send #0 of 4 float32 from rank 1 to rank 2",
        f"  rank 2: receive #0 of {told} from rank 1 to rank 2",
    ]
    assert "site-packages" not in report


def test_ranks_that_wait_for_a_message_of_a_rank_that_has_ended_are_told_without_a_timeout(
    sessions: RankSessions
) -> None:
    reports = sessions.reports("""
@pytest.mark.ranks(2, timeout=3600)
def test_send(rank):
    if rank.index == 0:
        dist.send(torch.ones(4), 1, tag=2)

@pytest.mark.ranks(3, timeout=3600)
def test_any(rank):
    if rank.index == 0:
        dist.recv(torch.ones(4))
        dist.recv(torch.ones(4))
    if rank.index == 1:
        dist.send(torch.ones(4), 0)

@pytest.mark.ranks(2, timeout=3600)
def test_nobody_waits(rank):
    if rank.index == 0:
        dist.isend(torch.ones(4), 1)
""")
    told = "ranks were left waiting: the test has ended on ranks that they wait for\n"
    assert {name: report.longreprtext.partition("\nlook for")[0]
            for name, report in reports.items()} == {
        "test_send": f"{told}rank 0 waits in send #0 of 4 float32 from rank 0 to rank 1 with tag 2 "
                     "for rank 1",
        "test_any": f"{told}rank 0 waits in receive #1 of 4 float32 from any rank to rank 0 for "
                    "ranks 1, 2",
        "test_nobody_waits": "ranks end the test with messages that were not received\n"
                             "  from rank 0 to rank 1: 1 sent, 0 received",
    }


def test_ranks_that_all_wait_are_told_without_a_timeout(
    sessions: RankSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "STILL_S", 0.0)
    monkeypatch.setattr(waits, "IDLE_S", 0.0)
    reports = sessions.reports("""
@pytest.mark.ranks(2, timeout=3600)
def test_messages(rank):
    dist.recv(torch.ones(4), 1 - rank.index)

@pytest.mark.ranks(3, timeout=3600)
def test_groups(rank):
    pair = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(4), group=pair if rank.index == 1 else None)
""")
    assert {name: report.longreprtext.splitlines()[:3] for name, report in reports.items()} == {
        "test_messages": [
            "all ranks wait, and none can go on",
            "rank 0 waits in receive #0 of 4 float32 from rank 1 to rank 0 for rank 1",
            "rank 1 waits in receive #0 of 4 float32 from rank 0 to rank 1 for rank 0",
        ],
        "test_groups": [
            "all ranks wait, and none can go on",
            "rank 0 waits in all_reduce #0 of 4 float32 over world for rank 1",
            "rank 1 waits in all_reduce #0 of 4 float32 over ranks [0, 1] for rank 0",
        ],
    }


def test_a_rank_that_executes_another_program_is_told_without_a_timeout(
    sessions: RankSessions
) -> None:
    report = sessions.failure("""
@pytest.mark.ranks(2, timeout=3600)
def test_it(rank):
    if rank.index:
        os.execvp("sleep", ["sleep", "3600"])
    dist.barrier()
""")
    assert report.splitlines() == [
        "rank 1 of 2 executes another program in its place, sleep 3600, last collective: no "
        "collective yet",
        "rank 0 waited, last collective: barrier #0 over world",
    ]
