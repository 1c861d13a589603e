"""What went wrong with ranks, in words: which of them died, raised or hung, at which collective,
and what only followed from it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from zreal.processes.fork_server import CLOSING_S, killed, server_end
from zreal.processes.rank_status import RECENT_S, REFERENCE, Rank, roll, stuck
from zsim.errors import RankError

UNTOLD = 255
"""What Python gives as the exit code of a process whose fork server cannot tell any more how it
ended."""


class LaunchError(RankError):
    """A rank that failed; `results` holds what each rank had reported by then, by rank: its result
    or the last part of it."""

    def __init__(
        self, *, where: str, expected: str, found: str, remedy: str = "", results: dict[int, Any]
    ) -> None:
        super().__init__(where=where, expected=expected, found=found, remedy=remedy)
        self.results = results


def not_started(error: Exception) -> LaunchError:
    """This machine refuses a process, a pipe or a socket: too many are open, or the path of
    temporary files is too long."""
    return LaunchError(
        where="launch",
        expected="processes, pipes and sockets for every rank",
        found=f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}",
        remedy="look at `ulimit -n`, at TMPDIR (sockets take short paths only) and at free memory",
        results={},
    )


def unguarded() -> LaunchError:
    """A script has called us while a process that it started was reading it again."""
    return LaunchError(
        where="launch",
        expected='a script that starts ranks below `if __name__ == "__main__":`',
        found="one that starts them wherever it is read, and each rank's process reads it again",
        remedy="move the call below that line",
        results={},
    )


def verdict(ranks: list[Rank], bad: list[Rank], timeout_s: float) -> LaunchError:
    """The first to die of its own is the headline; a lost connection to it is a consequence."""
    died = [rank for rank in bad if rank.ended_at and not rank.error]
    raised = [rank for rank in bad if rank.error and not _is_consequence(rank.error)]
    results = {rank.rank: rank.result for rank in ranks if rank.result is not None}
    roots = [*died, *raised] or [rank for rank in bad if rank.error]
    if (
        died
        and not raised
        and all(rank.process.exitcode == UNTOLD for rank in died)
        and (end := server_end(patience_s=CLOSING_S))
    ):
        return server_ended(end, ranks, f"and ranks {[rank.rank for rank in died]} with it; "
                                        f"{roll(ranks)}")
    if not roots:
        return _hang(ranks, timeout_s, results)
    first = min(roots, key=lambda rank: rank.ended_at)
    others = [rank.rank for rank in bad if rank is not first]
    consequence = f"; ranks {others} were stopped or failed after it" if others else ""
    return LaunchError(
        where=f"rank {first.rank}",
        expected="every rank to finish",
        found=f"{_cause(first)}, last collective: {first.last}{consequence}",
        results=results,
    )


def _is_consequence(error: str) -> bool:
    return any(
        word in error
        for word in (
            "Connection closed", "Connection reset", "Broken pipe", "Read error", "Timed out"
        )
    )


def _cause(rank: Rank) -> str:
    if rank.error:
        said, _, place = rank.error.partition("\n")
        return f"{said[:300]} ({place})"
    code = rank.process.exitcode
    return (
        killed(-code)
        if code is not None and code < 0
        else f"exited with code {code} without a result"
    )


def _hang(ranks: list[Rank], timeout_s: float, results: dict[int, Any]) -> LaunchError:
    """A roll-call: ranks grouped by their last collective, those furthest behind first: the others
    wait for them.

    A rank says which collective it enters before it is in it, so one that stops in between looks
    like those that wait for it. One that the system shows as stopped is named; where all that are
    left stand at the same place, nobody can tell which it was, and none is.
    """
    stopped = [rank for rank in ranks if not rank.done and _is_stopped(rank.process.pid)]
    waiting, where_all_are = [rank for rank in ranks if not rank.done], roll(ranks)
    alone = [rank for rank in waiting if rank.last == REFERENCE]
    if alone and len(alone) == len(waiting) and not stopped:
        return LaunchError(
            where="ranks " + str([rank.rank for rank in waiting]),
            expected=f"every rank to finish within {timeout_s:g} s",
            found=f"a run that is slow and does not hang: its steps are over, and ranks are at "
                  f"{REFERENCE}; {where_all_are}",
            remedy="raise --timeout, or take fewer steps",
            results=results,
        )
    if not stopped and all(rank.gets_on for rank in waiting):
        return LaunchError(
            where="ranks " + str([rank.rank for rank in waiting]),
            expected=f"every rank to finish within {timeout_s:g} s",
            found=f"a run that is slow and does not hang: each entered another collective within "
                  f"the last {RECENT_S:g} s; {where_all_are}",
            remedy="raise --timeout, or take fewer steps",
            results=results,
        )
    groups = stuck(ranks)
    first = groups[0][1]
    named = [rank.rank for rank in stopped] or first
    where = (
        f"rank {named[0]}"
        if len(named) == 1 or (len(groups) > 1 and not stopped)
        else f"ranks {named}"
    )
    cause = f"{_stopped_words(stopped)}; " if stopped else ""
    unknown = (
        "; which of them did not arrive cannot be told"
        if where.startswith("ranks") and not stopped
        else ""
    )
    return LaunchError(
        where=where,
        expected=f"every rank to finish within {timeout_s:g} s",
        found=f"a hang: {cause}{where_all_are}{unknown}",
        remedy="raise --timeout if the run is only slow",
        results=results,
    )


def _stopped_words(stopped: list[Rank]) -> str:
    last = ", ".join(dict.fromkeys(rank.last for rank in stopped))
    verb = "it is" if len(stopped) == 1 else "they are"
    return f"{verb} stopped (as by SIGSTOP or a debugger), last collective: {last}"


def server_ended(end: str, ranks: list[Rank], when: str) -> LaunchError:
    """The process that ranks are forked from has ended; `end` and `when` say how."""
    return LaunchError(
        where="the fork server",
        expected="the process that starts ranks, and that tells how they end, to live until all "
                 "are done",
        found=f"{end}, {when}",
        remedy="look who ended it; by itself it only loads torch, as `python -c 'import torch'` "
               "does",
        results={rank.rank: rank.result for rank in ranks if rank.result is not None},
    )


def _is_stopped(pid: int) -> bool:
    """Whether the system shows the process as stopped; False where it does not tell."""
    with (
        suppress(OSError, IndexError),
        open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat,
    ):
        return stat.read().rpartition(")")[2].split()[0] in ("T", "t")
    return False
