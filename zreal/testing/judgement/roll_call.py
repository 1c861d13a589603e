"""Roll-call of ranks that do not end: those at the same place of the code together, the minority
first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zreal.processes.rank_status import RankStatus
from zreal.processes.reports.stacks import Frame, stacks
from zreal.testing.names import named
from zsim.io.system.processes import is_stopped

BELOW = ("/zreal/testing/on_rank/bodies.py", "/zreal/testing/on_rank/rank_plugin.py", "/pluggy/")
"""Parts of the names of files from which the body of a test, or a fixture, is called."""
OWN = ("/zreal/testing/on_rank/", "/zreal/torch_private.py")
"""Parts of the names of files that watch collectives."""
TORCH = "-packages/torch/"
"""Part of the names of files between whose frames nothing is told."""
MOST_FRAMES = 12


def roll_call(ranks: Sequence[RankStatus]) -> str:
    """The ranks that have not ended, by stack and last collective, and those that have."""
    waiting = [rank for rank in ranks if not rank.done]
    frames = stacks(waiting)
    alike: dict[tuple[str, tuple[Frame, ...]], list[RankStatus]] = {}
    for rank in waiting:
        alike.setdefault((rank.last_collective, body_frames(frames.get(rank.rank, ()))), []).append(
            rank
        )
    lines = []
    for (last, body), members in sorted(alike.items(), key=_minority_first):
        lines.append(f"{named([rank.rank for rank in members])}, last collective: {last}")
        if any(is_stopped(rank.process.pid) for rank in members):
            lines.append("    stopped, as by SIGSTOP or a debugger")
        lines += [f"    {frame}" for frame in body[:MOST_FRAMES]]
    ended: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.done:
            ended.setdefault(rank.result["outcome"], []).append(rank.rank)
    return "\n".join([*lines, *(f"{named(which)} {how}" for how, which in ended.items())])


def _minority_first(group: tuple[tuple[str, tuple[Frame, ...]], list[RankStatus]]) -> Any:
    """The order of groups of ranks: the fewest first, and of two of a size one that waits last."""
    (_, body), members = group
    return len(members), bool(body) and body[0].waits


def body_frames(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Frames of the body of a test, the innermost first, without what called it.

    Of torch's own that call each other it is the innermost, so that the user's are not cut off.
    """
    calls = (frame for frame in frames if any(part in frame.file for part in BELOW))
    below = next(calls, None)
    called = frames if below is None else frames[: frames.index(below)]
    own = [frame for frame in called if not any(part in frame.file for part in OWN)]
    pairs = zip([None, *own], own, strict=False)
    return tuple(
        frame for inner, frame in pairs
        if inner is None or TORCH not in inner.file or TORCH not in frame.file
    )
