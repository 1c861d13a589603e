"""Ranks at fault, told from what each rank of a launcher wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from zsim.runs.launch.launched_failure import ABSENT, UNFINISHED, RankFailure, error_of, told_in

CLOSED = "RuntimeError: Connection closed by peer"
HANG = "no end within 9 s: a hang"
LATE = "no end within 9 s: a run that is slow and does not hang"
CHECK = "RuntimeError: sizes differ (/lib/torch/distributed/utils.py, line 286)"


def planned(rank: int, number: int) -> str:
    """The Program's collectives, all alike."""
    return "all_gather of 64 B over dp" if number >= 0 else ""


def end(
    reason: str, number: int = 3, *, nbytes: int = 64, outside: str = "", before: int = 64
) -> RankFailure:
    last, earlier = (
        f"all_gather #{each} of {size} B over dp" for each, size in (
            (number, nbytes), (number - 1, before)
        )
    )
    return RankFailure(reason=reason, last=last, before=(earlier,), outside=outside)


@pytest.mark.parametrize(
    ("failures", "where", "found"),
    [
        ({0: end(CLOSED), 1: end("ValueError: bad")}, "rank 1", "ValueError: bad, last "),
        ({0: RankFailure(reason=UNFINISHED), 1: end(CLOSED)}, "rank 0", UNFINISHED),
        ({0: end(CLOSED), 2: RankFailure(reason=ABSENT)}, "rank 2", ABSENT),
        ({0: RankFailure(reason=UNFINISHED), 1: end(CLOSED, nbytes=128)}, "rank 1",
         "all_gather #3 of 128 B over dp; the Program has all_gather of 64 B over dp"),
        ({0: RankFailure(reason=UNFINISHED), 1: end(CLOSED, before=128)}, "rank 1",
         "all_gather #2 of 128 B over dp; the Program has all_gather of 64 B over dp"),
        ({0: end(CHECK), 1: end(CLOSED, before=128)}, "rank 1", "all_gather #2 of 128 B over dp"),
        ({0: end("ValueError: bad"), 1: end(CLOSED, before=128)}, "rank 0", "ValueError: bad"),
        ({0: end(HANG), 1: end("ended by SIGTERM", 2)}, "rank 1", "a hang, last collective: "
                                                                   "all_gather #2"),
        ({0: end(HANG), 1: end(HANG, outside="File x")}, "rank 1", "in File x"),
        ({0: end(HANG), 1: end(HANG)}, "ranks 0, 1", HANG),
        ({0: end(LATE), 1: end(LATE, 4), 2: end("ended by SIGTERM", 4)}, "ranks 0, 1",
         f"{LATE}, last collective: all_gather #3 of 64 B over dp; it takes a longer --timeout"),
        ({0: end(LATE), 1: end(HANG)}, "ranks 0, 1", "a hang, last collective: all_gather #3"),
        ({0: end(LATE), 1: RankFailure(reason=UNFINISHED)}, "rank 1", UNFINISHED),
        ({0: end(HANG), 1: end(HANG, nbytes=32), 2: end(HANG, nbytes=32)}, "ranks 1, 2",
         "all_gather #3 of 32 B over dp; the Program has"),
        ({0: end(HANG, nbytes=32), 1: end(HANG, nbytes=32)}, "ranks 0, 1", HANG),
    ],
)
def test_the_rank_at_fault_is_the_headline(
    failures: dict[int, RankFailure], where: str, found: str
) -> None:
    error = error_of(failures, planned)
    assert error.where == where
    assert error.found.startswith(found) or found in error.found.partition("; rank")[0]


@pytest.mark.parametrize("where", ["rank 1", "ranks 1, 3", "ranks 0, 2 and 5 more"])
def test_what_a_meeting_of_ranks_has_told_to_all_is_said_once(where: str) -> None:
    told = f"{where}: expected the fingerprint of rank 0, a1, found b2; start all ranks alike"
    alone = RankFailure(reason=told)
    assert str(error_of({0: alone, 1: alone}, planned)) == told
    apart = error_of({0: RankFailure(reason=told), 1: end("ValueError: bad")}, planned)
    assert "ValueError: bad" in str(apart)


def test_a_log_says_why_before_it_says_how(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert told_in(log) == ""
    log.write_text("fine\nsrun: error: task 1: Killed\n")
    assert told_in(log) == "srun: error: task 1: Killed"
    log.write_text("EADDRINUSE: address already in use\nexitcode: 1\x1b[2J\n")
    assert told_in(log) == "EADDRINUSE: address already in use"
