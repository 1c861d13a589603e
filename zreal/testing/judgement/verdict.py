"""The verdict on a call of all ranks: every rank is judged, and the first to fail is the headline.

What follows from that failure is folded under it: lost connections, ranks that waited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NoReturn

import pytest

from zreal.processes.fork_server import CLOSING_S, killed_by, server_end
from zreal.processes.rank_status import RankStatus
from zreal.processes.reports.failure_report import UNKNOWN_EXIT_CODE, is_consequence
from zreal.processes.reports.hang_report import slow_progress
from zreal.testing.judgement.roll_call import roll_call
from zreal.testing.judgement.waits import deadlock, held_up, stranded, unmatched
from zreal.testing.names import is_member, named, without_nth
from zreal.testing.requirements import skip
from zsim.runs.launch.planned_collectives import number_of

Outcome = Literal["passed", "failed", "skipped", "xfailed", "rejected", "died", "waiting"]


class RanksFailed(Exception):  # noqa: N818 - as pytest names its outcomes
    """The report of ranks that failed, died or hung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """End of a call on a rank."""

    rank: int
    outcome: Outcome
    text: str
    """Report of the failure as pytest shows it, or of the rank's death."""
    line: str
    """Type, first line and place of the error; the reason of a skip."""
    at: float
    """Time of the failure, by the monotonic clock that all processes share."""
    last: str
    """The last collective that the rank entered."""
    counts: dict[str, int]
    """Collectives that it has entered, by group."""
    messages: dict[str, int]
    """Sends and receives of it, by channel."""
    differs: bool
    """True where it failed since its last collective differs from another rank's."""
    messages_differ: str
    """The send and the receive whose difference failed it."""


def end_of(rank: RankStatus) -> RankEnd:
    """End of the last call on a rank, which may still be waiting."""
    ended: dict[str, Any] = rank.result if isinstance(rank.result, dict) else {}
    text, line, at = ended.get("text", ""), ended.get("line", ""), ended.get("at") or rank.ended_at
    outcome: Outcome = "waiting"
    code = rank.process.exitcode
    if rank.done or "outcome" in ended:
        outcome = ended.get("outcome", "passed")
    elif rank.replaced:
        how = rank.replaced
        outcome, text, line = "died", f"{how}, last collective: {rank.last_collective}", how
    elif rank.error:
        outcome, text, line = "failed", rank.error, rank.error.splitlines()[0]
    elif code is not None:
        how = killed_by(-code) if code < 0 else f"exited with code {code}"
        outcome, text, line = "died", f"{how}, last collective: {rank.last_collective}", how
    return RankEnd(
        rank=rank.rank, outcome=outcome, text=text, line=line, at=at, last=rank.last_collective,
        counts=ended.get("counts", {}), messages=ended.get("messages", {}),
        differs=ended.get("differs", False), messages_differ=ended.get("messages_differ", ""),
    )


def judge(
    ranks: list[RankStatus], *, timeout_s: float, activity: str, is_deadlock: bool = False
) -> None:
    """Return where a call has passed on all ranks.

    Else it raises RanksFailed; pytest's skip or xfail, where all ranks ask for it alike; or
    hypothesis' rejection of an example, likewise.
    """
    ends = [end_of(rank) for rank in ranks]
    outcomes = {end.outcome for end in ends}
    bad = [end for end in ends if end.outcome in ("failed", "died")]
    if bad:
        raise RanksFailed(_failure(ends, bad, activity))
    if "waiting" in outcomes:
        waiting = [end.rank for end in ends if end.outcome == "waiting"]
        raise RanksFailed(stranded(ranks) or (is_deadlock and deadlock(ranks)) or (
            f"{activity} did not end on {named(waiting)} within {timeout_s:g} s\n"
            f"{_slow(ranks)}{held_up(ranks)}{roll_call(ranks)}"
        ))
    if len(outcomes) > 1 or len({end.line for end in ends}) > 1:
        raise RanksFailed(f"ranks end {activity} in different ways\n{_ways(ends)}")
    if len({tuple(sorted(end.counts.items())) for end in ends}) > 1 and (
        counts := _uneven_counts(ends)
    ):
        raise RanksFailed(f"ranks end {activity} after different numbers of collectives\n{counts}")
    if lines := unmatched([end.messages for end in ends]):
        report = "\n".join(lines)
        raise RanksFailed(f"ranks end {activity} with messages that were not received\n{report}")
    _ask_for(ends[0])


def _failure(ends: Sequence[RankEnd], bad: Sequence[RankEnd], activity: str) -> str:
    """The report of the first failure, and a line for each other rank's end."""
    if (text := _server_text(bad)):
        return text
    roots = [end for end in bad if end.outcome == "died" or not is_consequence(end.text)] or bad
    first = min(roots, key=lambda end: end.at)
    alike = [end.rank for end in roots if end.line == first.line]
    others = [end for end in ends if end.rank not in alike]
    head = f"{named(alike)} of {len(ends)}"
    if first.differs or first.messages_differ:
        return f"{first.messages_differ or _different(ends, first)}\n\n{first.text}"
    if first.outcome == "died":
        verb = "was " if len(alike) == 1 else "were "
        head = f"{head} {verb * first.text.startswith('killed')}{first.text}"
    else:
        head = f"{head} failed {'first' if others else 'alike'}: {first.line}\n\n{first.text}\n"
    return "\n".join([head, *_others(others, first)])


def _different(ends: Sequence[RankEnd], first: RankEnd) -> str:
    """The ranks by the collective that they enter at this number; a minority is called so."""
    entered: dict[str, list[int]] = {}
    for end in ends:
        if _meeting(end.last) == _meeting(first.last):
            entered.setdefault(end.last, []).append(end.rank)
    (most, majority), *others = sorted(entered.items(), key=lambda item: -len(item[1]))
    lines = ["ranks enter different collectives", f"  {named(majority)}: {most}"]
    for last, ranks in others:
        minority = "  <- the minority" * (len(ranks) < len(majority))
        lines.append(f"  {named(ranks)}: {last}{minority}")
    return "\n".join(lines)


def _meeting(last: str) -> tuple[int, str]:
    """The number and the ranks of a collective, which are alike on ranks that meet in it."""
    return number_of(last), without_nth(last.partition(" over ")[2])


def _server_text(bad: Sequence[RankEnd]) -> str:
    """The end of the fork server, where it took ranks with it."""
    unknown = f"exited with code {UNKNOWN_EXIT_CODE}"
    if all(end.line == unknown for end in bad) and (how := server_end(patience_s=CLOSING_S)):
        return f"the process that starts ranks has ended, and ranks with it: found {how}"
    return ""


def _others(ends: Sequence[RankEnd], first: RankEnd) -> list[str]:
    """Lines for the ranks that are not the headline, alike ones together."""
    texts: dict[str, list[int]] = {}
    for end in ends:
        texts.setdefault(_line(end, first), []).append(end.rank)
    return [f"{named(ranks)} {text}" for text, ranks in texts.items()]


def _line(end: RankEnd, first: RankEnd) -> str:
    if end.outcome == "waiting":
        return f"waited, last collective: {end.last}"
    if end.outcome not in ("failed", "died"):
        return end.outcome if end.outcome == "passed" else f"{end.outcome}: {end.line}"
    follows = is_consequence(end.text) and end.outcome == "failed"
    return f"{'failed after it' if follows else 'failed too'}: {end.line}"


def _slow(ranks: list[RankStatus]) -> str:
    progress = slow_progress(ranks)
    return f"slow, and not a hang: {progress}\n" if progress else ""


def _ways(ends: Sequence[RankEnd]) -> str:
    texts: dict[str, list[int]] = {}
    for end in ends:
        text = f"{end.outcome}: {end.line}" if end.line else end.outcome
        texts.setdefault(text, []).append(end.rank)
    return "\n".join(f"  {named(ranks)} {text}" for text, ranks in texts.items())


def _uneven_counts(ends: Sequence[RankEnd]) -> str:
    """Numbers of collectives in the groups whose ranks entered differently many of them."""
    lines = []
    for group in sorted({name for end in ends for name in end.counts}):
        members = [end for end in ends if is_member(end.rank, group)]
        counts = [(end.counts.get(group, 0), end.rank) for end in members]
        if len({count for count, _ in counts}) > 1:
            for count, each in groupby(sorted(counts), key=lambda pair: pair[0]):
                lines.append(f"  {named([rank for _, rank in each])}: {count} over {group}")
    return "\n".join(lines)


def _ask_for(end: RankEnd) -> None:
    """Raise what all ranks ask for."""
    if end.outcome == "skipped":
        skip(end.line)
    if end.outcome == "xfailed":
        raise pytest.xfail.Exception(end.line)
    if end.outcome == "rejected":
        _reject()


def _reject() -> NoReturn:
    from hypothesis import reject  # the test that asks for it has imported it

    reject()
