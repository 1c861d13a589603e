"""Versions of torch that strategies follow, and what the older ones do otherwise than the newest.

Each difference is a name here, and the code of the strategy reads it; nothing else knows versions.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from zsim.models.training_options import Library

TorchVersion = Literal["2.11", "2.12", "2.13"]
SUPPORTED: tuple[TorchVersion, ...] = get_args(TorchVersion)
NEWEST = SUPPORTED[-1]


class Difference(NamedTuple):
    """Something that `versions` of torch do otherwise than NEWEST in strategies of a `library`."""

    versions: tuple[TorchVersion, ...]
    library: Library
    meaning: str


INPUT_BESIDE_THE_NEXT = Difference(
    versions=("2.12",), library="fully_shard",
    meaning="the input of a reduce-scatter lives until the next one's has been made",
)
INPUT_PAST_IDLE_UNITS = Difference(
    versions=("2.11",), library="fully_shard",
    meaning="a unit without gradients leaves the input of the last reduce-scatter alone",
)
RESHARD_ALONE = Difference(
    versions=("2.11",), library="fully_shard",
    meaning="a mesh is derived for an int reshard alone, and not for two axes",
)
BARRIER_STAYS = Difference(
    versions=("2.11",), library="deepspeed",
    meaning="the byte by which a barrier is dispatched lives until the next one (c10d)",
)
DIFFERENCES = (INPUT_BESIDE_THE_NEXT, INPUT_PAST_IDLE_UNITS, RESHARD_ALONE, BARRIER_STAYS)
"""Differences that Programs follow."""
IDLE_UNTIL_ALL_RAN = Difference(
    versions=("2.11", "2.12"), library="fully_shard",
    meaning="a group of which only some modules run keeps its parameters unsharded",
)
"""Real runs of such a scenario are refused with these versions."""


def version_of(text: str) -> TorchVersion:
    """The supported version that `text` belongs to, as torch writes its own; else NEWEST."""
    return next(
        (version for version in SUPPORTED if f"{text}.".startswith(f"{version}.")), NEWEST
    )


def apart(left: TorchVersion, right: TorchVersion, *, library: Library) -> tuple[Difference, ...]:
    """Differences between two versions in strategies of the `library`."""
    return tuple(
        each for each in DIFFERENCES
        if library == each.library and (left in each.versions) != (right in each.versions)
    )
