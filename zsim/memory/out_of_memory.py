"""A device that has less than a step reserves: whether torch's allocator gets by when it gives back
what it has cached.

The allocator is replayed with the room that there is (zsim.memory.reserved). Reserved bytes are
what it takes where nothing is short; where something is, it gives back all that it has cached and
asks again, and it fails only when that is not enough.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.ir.program import RankProgram
from zsim.memory import reserved
from zsim.memory.caching_allocator import DeviceFullError


@dataclass(frozen=True, slots=True, kw_only=True)
class Releases:
    """How often in a step the device is full and all cached memory is given back to it, for which
    it waits."""

    first: int
    steady: int

    @property
    def words(self) -> str:
        """For a sentence: "giving cached memory back twice a steady step"; nothing where none is
        given back."""
        if not self.steady and not self.first:
            return ""
        times, when = (
            (self.steady, "a steady step") if self.steady else (self.first, "in the first step")
        )
        return (
            f"giving cached memory back {({1: 'once', 2: 'twice'}).get(times, f'{times} times')} "
            f"{when}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """What a step does where it would reserve more than there is: None where it fails.

    `best`: with the largest capacity and the least outside torch's reserved bytes; None too where
    it runs as `expected`, as it is not asked then. More room can be worse: with another layout of
    the segments more of them is in pieces. `full_at` is where the device is full in spite of all
    releases: as expected, or, where it never runs, at best.
    """

    expected: Releases | None
    best: Releases | None = None
    full_at: str = ""

    @property
    def runs(self) -> Releases | None:
        """As expected, or else at best; None where it never runs."""
        return self.expected or self.best


def pressure(
    program: RankProgram, *, room: int, most: int, workspace_bytes: int, expandable_segments: bool
) -> Pressure:
    """What a rank with `program` does with `room` bytes for the allocator, and, where that is not
    enough, with the `most` there may be."""

    def releases(capacity: int) -> Releases | str:
        """Or where the device is full."""

        def replay(part: RankProgram) -> Releases:
            records = reserved.replay(
                part,
                capacity=capacity,
                workspace_bytes=workspace_bytes,
                expandable_segments=expandable_segments,
                empty_cache=True,
            )
            return Releases(
                first=records["first"].num_releases, steady=records["steady"].num_releases
            )

        here = program
        try:
            replay(replace(program, first=(), steady=()))
        except DeviceFullError:  # only its building is too large: then it is built elsewhere
            here = reserved.built_elsewhere(program)
        try:
            return replay(here)
        except DeviceFullError as error:
            return error.where

    expected = releases(room)
    if isinstance(expected, Releases):
        return Pressure(expected=expected)
    best = releases(most)
    return (
        Pressure(expected=None, best=best, full_at=expected)
        if isinstance(best, Releases)
        else Pressure(expected=None, full_at=best)
    )
