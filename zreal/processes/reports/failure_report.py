"""Report of a failed launch: the rank that died, raised or hung, and its collective.

The first rank to fail of its own is the headline. Errors of other ranks that lost their connection
to it are consequences.
"""

from __future__ import annotations

import signal
from typing import Any

from zreal.processes.fork_server import CLOSING_S, killed_by, server_end
from zreal.processes.rank_status import RankStatus
from zreal.processes.reports.hang_report import deviation, hang, mismatch, slow_progress
from zreal.processes.reports.roll_call import roll_call
from zsim.errors import RankError
from zsim.runs.launch.planned_collectives import BY_TORCH, Planned, deviations

UNKNOWN_EXIT_CODE = 255
"""Exit code that Python reports once its fork server can no longer tell how a process ended."""
LOST_CONNECTION = (
    "Connection closed", "Connection reset", "Broken pipe", "Read error", "Timed out"
)
"""Texts of errors on a rank whose peer has failed."""
NO_MEMORY = ("can't allocate memory", "MemoryError", "OutOfMemoryError", "out of memory")
"""Texts of errors where memory ran out."""
LESS_MEMORY = "where memory ran out, take fewer ranks, a smaller model or a smaller batch"
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
        expected="the process that starts ranks to live until all are done",
        found=f"{end}, {when}",
        remedy="find out what stopped or ended it; by itself it only loads torch, as "
               "`python -c 'import torch'` does",
        results=_results(ranks),
    )


def launch_error(
    ranks: list[RankStatus], timeout_s: float, program: Planned | None = None
) -> LaunchError:
    """The report of a launch in which some ranks are not done. `program` has what each rank should
    have issued, as far as that is known."""
    bad = [rank for rank in ranks if not rank.done]
    died = [rank for rank in bad if rank.ended_at and not rank.error]
    raised = [rank for rank in bad if rank.error and not is_consequence(rank.error)]
    codes_unknown = all(rank.process.exitcode == UNKNOWN_EXIT_CODE for rank in died)
    if died and not raised and codes_unknown and (end := server_end(patience_s=CLOSING_S)):
        with_it = f"and ranks {[rank.rank for rank in died]} with it; {roll_call(ranks)}"
        return server_ended(end, ranks, with_it)
    candidates = [*died, *raised] or [rank for rank in bad if rank.error]
    if differing := _different(ranks, died=died, raised=raised, program=program):
        where, cause = differing
        return LaunchError(
            where=where, expected="the same collectives on every rank", found=cause,
            remedy="look for a condition on the rank, or on data that differs between ranks",
            results=_results(ranks),
        )
    if not candidates:
        return _not_in_time(ranks, timeout_s)
    first = min(candidates, key=lambda rank: rank.ended_at)
    others = [rank.rank for rank in bad if rank is not first]
    consequence = f"; ranks {others} were stopped or failed after it" if others else ""
    return LaunchError(
        where=f"rank {first.rank}",
        expected="every rank to finish",
        found=f"{_cause(first)}, last collective: {first.last_collective}{consequence}",
        remedy=LESS_MEMORY if _may_lack_memory(first) else "",
        results=_results(ranks),
    )


def _results(ranks: list[RankStatus]) -> dict[int, Any]:
    return {rank.rank: rank.result for rank in ranks if rank.result is not None}


def _different(
    ranks: list[RankStatus], *, died: list[RankStatus], raised: list[RankStatus],
    program: Planned | None,
) -> tuple[str, str] | None:
    """The ranks at fault and the report where collectives differ; None where that is no cause.

    gloo aborts a rank that gets other bytes than it awaits, and DDP's check raises on it. That rank
    is not the one at fault.
    """
    if any(rank.process.exitcode != -signal.SIGABRT for rank in died):
        return None
    issued = {rank.rank: rank.progress.recent() for rank in ranks}
    deviating = deviations(issued, program) if program else {}
    if deviating and all(
        BY_TORCH in rank.error and rank.rank not in deviating for rank in raised
    ):
        where, report = deviation(ranks, deviating)
        return where, "; ".join([report, *(f"rank {rank.rank}: {_cause(rank)}" for rank in raised)])
    return None if raised else mismatch(ranks)


def is_consequence(error: str) -> bool:
    """True for the text of an error on a rank whose peer has failed."""
    return any(text in error for text in LOST_CONNECTION)


def _may_lack_memory(rank: RankStatus) -> bool:
    if rank.error:
        return any(text in rank.error for text in NO_MEMORY)
    return bool(rank.process.exitcode == -signal.SIGKILL)


def _cause(rank: RankStatus) -> str:
    if rank.error:
        first_line, _, raised_at = rank.error.partition("\n")
        return f"{first_line[:MAX_ERROR_CHARS]}{f' ({raised_at})' * bool(raised_at)}"
    code = rank.process.exitcode
    is_signal = code is not None and code < 0
    return killed_by(-code) if is_signal else f"exited with code {code} without a result"


def _not_in_time(ranks: list[RankStatus], timeout_s: float) -> LaunchError:
    """The report at the timeout: a hang, or a run that is only slow."""
    expected = f"every rank to finish within {timeout_s:g} s"
    if progress := slow_progress(ranks):
        return LaunchError(
            where="ranks " + str([rank.rank for rank in ranks if not rank.done]),
            expected=expected,
            found=f"a run that is slow and does not hang: {progress}; {roll_call(ranks)}",
            remedy="raise timeout_s, or take fewer steps",
            results=_results(ranks),
        )
    where, cause = hang(ranks)
    return LaunchError(
        where=where, expected=expected, found=f"a hang: {cause}",
        remedy="raise timeout_s if the run is only slow", results=_results(ranks),
    )
