"""The roll-call of a real run: ranks by their last collective."""

from __future__ import annotations

from zreal.processes.rank_status import RankStatus, unfinished_by_collective


def roll_call(ranks: list[RankStatus]) -> str:
    """The last collective of every rank, as text."""
    finished = [rank.rank for rank in ranks if rank.done]
    groups = [*unfinished_by_collective(ranks), *([("finished", finished)] if finished else [])]
    return "; ".join(f"ranks {members} at {last}" for last, members in groups)
