"""Reports of ranks that wait for one another: the ranks to blame, and their place in the code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zreal.processes.rank_status import (
    RECENT_S,
    REFERENCE,
    RankStatus,
    different_collectives,
    unfinished_by_collective,
)
from zreal.processes.reports.roll_call import roll_call
from zreal.processes.reports.stacks import Frame, innermost_frames
from zsim.io.system.processes import STOPPED, is_stopped
from zsim.runs.launch.planned_collectives import Deviation


def slow_progress(ranks: list[RankStatus]) -> str:
    """Progress of ranks that do not hang, as text; "" where any of them may."""
    waiting = [rank for rank in ranks if not rank.done]
    if any(is_stopped(rank.process.pid) for rank in waiting):
        return ""
    if all(rank.last_collective == REFERENCE for rank in waiting):
        return f"steps are over, and ranks are at {REFERENCE}"
    if all(rank.is_progressing for rank in waiting):
        return f"each entered another collective within the last {RECENT_S:g} s"
    return ""


def deviation(ranks: list[RankStatus], deviating: Mapping[int, Deviation]) -> tuple[str, str]:
    """The ranks that entered another collective than the Program has, and the report, as texts."""
    texts = [
        f"{_named([rank])} entered {each.issued}, where the Program has {each.planned}"
        for rank, each in deviating.items()
    ]
    return _named(list(deviating)), f"{', '.join(texts)}; {roll_call(ranks)}"


def mismatch(ranks: list[RankStatus]) -> tuple[str, str] | None:
    """The ranks that entered another collective than the others at the same number, and the report,
    as texts; None where none did. The smaller number of them is blamed; of as many, all."""
    report = f"different collectives: {roll_call(ranks)}"
    different = different_collectives(ranks)
    if not different:
        return None
    fewest, *larger = sorted(different.values(), key=len)
    members = sorted(rank for group in different.values() for rank in group)
    return _named(sorted(fewest) if len(fewest) < len(larger[0]) else members), report


def hang(ranks: list[RankStatus]) -> tuple[str, str]:
    """The ranks that a hang is blamed on, and its cause, as texts.

    Ranks that the system shows as stopped are blamed, else those furthest behind, since the others
    wait for them. Of these it is the ranks whose stack is outside the announced collective.
    """
    waiting = [rank for rank in ranks if not rank.done]
    if stopped := [rank for rank in waiting if is_stopped(rank.process.pid)]:
        return _named([rank.rank for rank in stopped]), f"{_stopped(stopped)}; {roll_call(ranks)}"
    groups = unfinished_by_collective(ranks)
    last = [rank for rank in waiting if rank.rank in groups[0][1]]
    frames = innermost_frames(last)
    outside = {rank: frame for rank, frame in frames.items() if not frame.waits}
    if outside and len(outside) < len(waiting):
        return _named(list(outside)), f"{roll_call(ranks)}; {_frames_text(outside)}"
    blamed = [rank.rank for rank in last]
    unknown = "; which of them did not arrive cannot be told"
    only_group = len(blamed) > 1 and len(groups) == 1
    return _named(blamed), (
        f"{roll_call(ranks)}{unknown * only_group}{'; ' * bool(frames)}{_frames_text(frames)}"
    )


def _frames_text(frames: dict[int, Frame]) -> str:
    """The frames with their ranks, alike ones together."""
    alike: dict[Frame, list[int]] = {}
    for rank, frame in frames.items():
        alike.setdefault(frame, []).append(rank)
    return ", ".join(f"{_named(members)} in {frame}" for frame, members in alike.items())


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


def _stopped(ranks: list[RankStatus]) -> str:
    last = ", ".join(dict.fromkeys(rank.last_collective for rank in ranks))
    verb = "it is" if len(ranks) == 1 else "they are"
    return f"{verb} {STOPPED}, last collective: {last}"
