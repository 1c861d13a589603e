"""Names of ranks and groups in reports."""

from __future__ import annotations

from collections.abc import Sequence


def named(ranks: Sequence[int]) -> str:
    """Ranks as text: `rank 2`, `ranks 0-3`, `ranks 0, 2`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    is_run = len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    return f"ranks {f'{ranks[0]}-{ranks[-1]}' if is_run else ', '.join(map(str, ranks))}"


def group_name(ranks: Sequence[int], *, world_size: int) -> str:
    """The group of these ranks as text: `world`, or `ranks [0, 2]`."""
    return "world" if len(ranks) == world_size else f"ranks {list(ranks)}"


def nth_group(number: int, name: str) -> str:
    """The name of a group, with its number among those of the same ranks: `group 2 of world`."""
    return name if number == 1 else f"group {number} of {name}"


def without_nth(group: str) -> str:
    """The name that all groups of the same ranks share."""
    return group.rpartition(" of ")[2]


def is_member(rank: int, group: str) -> bool:
    """True for a rank of the group with this name."""
    return group == "world" or str(rank) in group.partition("[")[2].rstrip("]").split(", ")
