"""Report of a failed launch: which rank died, raised or hung, and at which collective.

The first rank to fail of its own is the headline. Errors of other ranks that lost their connection
to it are consequences.
"""

from __future__ import annotations

import signal
from typing import Any

from zreal.processes.fork_server import (
    CLOSING_S,
    STOPPED,
    is_stopped,
    killed_by,
    server_end,
)
from zreal.processes.rank_status import (
    RECENT_S,
    REFERENCE,
    RankStatus,
    roll_call,
    unfinished_by_collective,
)
from zsim.errors import RankError

UNKNOWN_EXIT_CODE = 255
"""Exit code that Python reports once its fork server can no longer tell how a process ended."""
LOST_CONNECTION = (
    "Connection closed", "Connection reset", "Broken pipe", "Read error", "Timed out"
)
"""Texts of errors on a rank whose peer has failed."""
MAX_ERROR_CHARS = 300


class LaunchError(RankError):
    """A failed launch. `results` holds, by rank, each result or the last part of it that arrived.
    """

    def __init__(
        self, *, where: str, expected: str, found: str, remedy: str = "", results: dict[int, Any]
    ) -> None:
        super().__init__(where=where, expected=expected, found=found, remedy=remedy)
        self.results = results


def not_started(error: Exception) -> LaunchError:
    """This machine refuses a process, a pipe or a socket."""
    first_line = str(error).splitlines()[0][:200] if str(error) else ""
    return LaunchError(
        where="launch",
        expected="processes, pipes and sockets for every rank",
        found=f"{type(error).__name__}: {first_line}",
        remedy="look at `ulimit -n`, at TMPDIR (sockets take short paths only) and at free memory",
        results={},
    )


def server_ended(end: str, ranks: list[RankStatus], when: str) -> LaunchError:
    """The fork server has ended; `end` and `when` are texts of how and when."""
    return LaunchError(
        where="the fork server",
        expected="the process that starts ranks, and that tells how they end, to live until all "
                 "are done",
        found=f"{end}, {when}",
        remedy="find out what stopped or ended it; by itself it only loads torch, as "
               "`python -c 'import torch'` does",
        results=_results(ranks),
    )


def launch_error(ranks: list[RankStatus], timeout_s: float) -> LaunchError:
    """The report of a launch in which some ranks are not done."""
    bad = [rank for rank in ranks if not rank.done]
    died = [rank for rank in bad if rank.ended_at and not rank.error]
    raised = [rank for rank in bad if rank.error and not _is_consequence(rank.error)]
    codes_unknown = all(rank.process.exitcode == UNKNOWN_EXIT_CODE for rank in died)
    if died and not raised and codes_unknown and (end := server_end(patience_s=CLOSING_S)):
        with_it = f"and ranks {[rank.rank for rank in died]} with it; {roll_call(ranks)}"
        return server_ended(end, ranks, with_it)
    candidates = [*died, *raised] or [rank for rank in bad if rank.error]
    if not candidates:
        return _not_in_time(ranks, timeout_s)
    first = min(candidates, key=lambda rank: rank.ended_at)
    others = [rank.rank for rank in bad if rank is not first]
    consequence = f"; ranks {others} were stopped or failed after it" if others else ""
    return LaunchError(
        where=f"rank {first.rank}",
        expected="every rank to finish",
        found=f"{_cause(first)}, last collective: {first.last_collective}{consequence}",
        remedy="where memory ran out, take fewer ranks, a smaller model or a smaller batch"
               if first.process.exitcode == -signal.SIGKILL and not first.error else "",
        results=_results(ranks),
    )


def _results(ranks: list[RankStatus]) -> dict[int, Any]:
    return {rank.rank: rank.result for rank in ranks if rank.result is not None}


def _is_consequence(error: str) -> bool:
    return any(text in error for text in LOST_CONNECTION)


def _cause(rank: RankStatus) -> str:
    if rank.error:
        first_line, _, raised_at = rank.error.partition("\n")
        return f"{first_line[:MAX_ERROR_CHARS]} ({raised_at})"
    code = rank.process.exitcode
    is_signal = code is not None and code < 0
    return killed_by(-code) if is_signal else f"exited with code {code} without a result"


def _not_in_time(ranks: list[RankStatus], timeout_s: float) -> LaunchError:
    """The report at the timeout: a hang, or a run that is only slow.

    A rank announces a collective before it enters it, so one that stops in between looks like those
    that wait for it.
    """
    expected = f"every rank to finish within {timeout_s:g} s"
    waiting = [rank for rank in ranks if not rank.done]
    stopped = [rank for rank in waiting if is_stopped(rank.process.pid)]
    progress = "" if stopped else _slow_progress(waiting)
    if progress:
        return LaunchError(
            where="ranks " + str([rank.rank for rank in waiting]),
            expected=expected,
            found=f"a run that is slow and does not hang: {progress}; {roll_call(ranks)}",
            remedy="raise timeout_s, or take fewer steps",
            results=_results(ranks),
        )
    where, cause = _hung(ranks, stopped)
    return LaunchError(
        where=where, expected=expected, found=f"a hang: {cause}",
        remedy="raise timeout_s if the run is only slow", results=_results(ranks),
    )


def _slow_progress(waiting: list[RankStatus]) -> str:
    """Progress of ranks that do not hang, as text; "" where any of them may."""
    if all(rank.last_collective == REFERENCE for rank in waiting):
        return f"its steps are over, and ranks are at {REFERENCE}"
    if all(rank.is_progressing for rank in waiting):
        return f"each entered another collective within the last {RECENT_S:g} s"
    return ""


def _hung(ranks: list[RankStatus], stopped: list[RankStatus]) -> tuple[str, str]:
    """The ranks that a hang is blamed on, and its cause, as texts.

    Ranks that the system shows as stopped are blamed, else those furthest behind, since the others
    wait for them. Where all stand at the same collective, none can be blamed.
    """
    groups = unfinished_by_collective(ranks)
    blamed = [rank.rank for rank in stopped] or groups[0][1]
    if stopped:
        where = f"rank {blamed[0]}" if len(blamed) == 1 else f"ranks {blamed}"
        return where, f"{_stopped_text(stopped)}; {roll_call(ranks)}"
    if len(blamed) == 1 or len(groups) > 1:
        return f"rank {blamed[0]}", roll_call(ranks)
    unknown = "; which of them did not arrive cannot be told"
    return f"ranks {blamed}", f"{roll_call(ranks)}{unknown}"


def _stopped_text(stopped: list[RankStatus]) -> str:
    last = ", ".join(dict.fromkeys(rank.last_collective for rank in stopped))
    verb = "it is" if len(stopped) == 1 else "they are"
    return f"{verb} {STOPPED}, last collective: {last}"
