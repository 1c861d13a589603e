"""The failure of ranks that a launcher has started: whose fault it is, by what each of them wrote.

A rank writes its last collective, and its place in the code where that is outside of torch. One
that the system killed writes nothing, and the others lose their connection to it. gloo also ends a
rank that gets more bytes than it awaits, so the Program is asked first who sent something else.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from zsim.errors import RankError, visible
from zsim.runs.launch.planned_collectives import BY_TORCH, Planned, deviations, number_of

UNFINISHED = "no end, and no reason"
ABSENT = "no result"
HANG = "a hang"
SLOW = "a run that is slow and does not hang"
CONSEQUENCES = (
    "ended by SIGTERM", "Connection closed", "Connection reset", "Broken pipe", "Read error",
    "Timed out",
)
"""Texts of failures that follow from another rank's."""
LAST, BEFORE, OUTSIDE = "last collective", "collectives before it", "outside of torch"
"""Provenance of a failed rank's Run: its last collective, some before it, and the place in the code
at which it was then."""
SEPARATOR = "; "
AGREED = re.compile(
    r"(?P<where>ranks? \d[\d, ]*(?: and \d+ more)?): expected (?P<expected>.*?), "
    r"found (?P<found>.*?); (?P<remedy>.*)"
)
"""The statement of a meeting of ranks about some of them, which all tell alike."""
ENDS = (
    re.compile(r"address already in use|room for [\d,]+ B|no space left", re.IGNORECASE),
    re.compile(r"exit ?code|signal \d|killed", re.IGNORECASE),
)
"""Words of systems on a cause, then those of launchers on the end of a process."""
LOG_END, MOST_OF_A_LINE = 20_000, 300
"""Bytes of a log that are searched, and characters that a message shows of a line."""
MOST_NAMED = 12
"""Most ranks that a message lists of those that ended alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """The end of one rank: the reason that it told, its last collective and its place."""

    reason: str
    last: str = ""
    before: tuple[str, ...] = ()
    """Collectives before the last one, oldest first."""
    outside: str = ""

    @property
    def told(self) -> bool:
        """True where the rank itself said how it ended."""
        return self.reason not in (UNFINISHED, ABSENT)

    @property
    def waited(self) -> bool:
        """True where it waited for others, or followed another's failure."""
        return any(text in self.reason for text in (HANG, SLOW, *CONSEQUENCES))

    def __str__(self) -> str:
        is_new = number_of(self.last) >= 0 and LAST not in self.reason
        last = f", last collective: {self.last}" if is_new else ""
        return f"{self.reason}{last}{f', in {self.outside}' if self.outside else ''}"


def error_of(failures: Mapping[int, RankFailure], planned: Planned) -> RankError:
    """The failure of the ranks at fault as the headline, and how the others ended; the statement
    itself where all make the same one."""
    reason, *others_say = {end.reason for end in failures.values()}
    if not others_say and (agreed := AGREED.fullmatch(reason)):
        return RankError(**agreed.groupdict())
    at_fault, expected, cause = _at_fault(failures, planned)
    others = {rank: end for rank, end in failures.items() if rank not in at_fault}
    rest = "; ".join(_roll_call(others))
    return RankError(
        where=_named(at_fault), expected=expected, found=f"{cause}; {rest}" if rest else cause,
        remedy="see what the launcher printed",
    )


def told_in(log: Path) -> str:
    """The last line of a launcher's log that says why a process ended, else how; "" for none."""
    try:
        text = log.read_bytes()[-LOG_END:].decode(errors="replace")
    except OSError:
        return ""
    for end in ENDS:
        if lines := [line.strip() for line in text.splitlines() if end.search(line)]:
            return visible(lines[-1][-MOST_OF_A_LINE:])
    return ""


def _at_fault(
    failures: Mapping[int, RankFailure], planned: Planned
) -> tuple[Collection[int], str, str]:
    """The ranks that others failed after, what was expected of them, and what was found."""
    every = "every rank to finish"
    own = [
        rank for rank, end in failures.items()
        if end.told and not end.waited and not _blames_another(rank, end.reason)
    ]
    issued = {rank: (*end.before, end.last) for rank, end in failures.items()}
    deviating = deviations(issued, planned)
    if deviating and all(
        BY_TORCH in failures[rank].reason and rank not in deviating for rank in own
    ):
        first = deviating[min(deviating)]
        cause = f"{first.issued}; the Program has {first.planned}"
        return sorted(deviating), "the same collectives on every rank", cause
    if own:
        return [min(own)], every, str(failures[min(own)])
    silent = [rank for rank, end in failures.items() if not end.told]
    if silent and len(silent) < len(failures):
        return sorted(silent), every, failures[silent[0]].reason
    slow = [rank for rank, end in failures.items() if SLOW in end.reason]
    if slow and not any(HANG in end.reason for end in failures.values()):
        return slow, f"{every} in time", f"{failures[slow[0]]}; it takes a longer --timeout"
    behind = _furthest_behind(failures)
    ends = [failures[rank] for rank in behind]
    if any(HANG in end.reason for end in failures.values()):  # which ended those that held it up
        ends = [replace(end, reason=HANG) if HANG not in end.reason else end for end in ends]
    return behind, every, "; ".join(dict.fromkeys(map(str, ends)))


def _blames_another(rank: int, reason: str) -> bool:
    """True where the failure of `rank` begins with another rank."""
    blamed = re.match(r"ranks? (\d+)", reason)
    return blamed is not None and int(blamed[1]) != rank


def _furthest_behind(failures: Mapping[int, RankFailure]) -> list[int]:
    """The ranks with the lowest number; of these, those whose place is outside of torch, if any.
    """
    lowest = min(number_of(end.last) for end in failures.values())
    behind = [rank for rank, end in failures.items() if number_of(end.last) == lowest]
    outside = [rank for rank in behind if failures[rank].outside]
    return sorted(outside or behind)


def _roll_call(failures: Mapping[int, RankFailure]) -> Iterator[str]:
    """Ranks that ended alike, and how."""
    alike: dict[str, list[int]] = {}
    for rank, end in failures.items():
        alike.setdefault(str(end), []).append(rank)
    for text, ranks in alike.items():
        yield f"{_named(ranks)}: {text}"


def _named(ranks: Collection[int]) -> str:
    """"rank 3", or "ranks 0, 2, 3" with a number of further ones."""
    shown = ", ".join(map(str, sorted(ranks)[:MOST_NAMED]))
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
