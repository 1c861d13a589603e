"""A device with less memory than a step reserves: torch's allocator releases its cache and tries
again, or raises OutOfMemoryError.

The allocator is replayed with the room that the device has (zsim.memory.allocator.reserved). It
fails only where an allocation has no room after all cached memory is given back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from zsim.ir.ops import DriverCalls
from zsim.ir.program import RankProgram
from zsim.memory.allocator import reserved
from zsim.memory.allocator.caching_allocator import DeviceFullError


@dataclass(frozen=True, slots=True, kw_only=True)
class Releases:
    """Times in a step that the device is full and the allocator gives all cached memory back, for
    which the host waits. `driver_calls` are those of the steady step, by the index of the op."""

    first: int
    steady: int
    driver_calls: Mapping[int, DriverCalls] = field(default_factory=dict, compare=False)

    @property
    def sentence(self) -> str:
        """Part of a sentence: "flushing cached memory twice a steady step"; "" where none is
        given back."""
        if not self.steady and not self.first:
            return ""
        times, when = (
            (self.steady, "a steady step") if self.steady else (self.first, "in the first step")
        )
        return (
            f"flushing cached memory {({1: 'once', 2: 'twice'}).get(times, f'{times} times')} "
            f"{when}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """Releases of a step that would reserve more than the device has; None where the step fails.

    `best`: with the largest capacity and the least non-torch memory; None too where the step runs
    as `expected`, since `best` is not computed then. More room can be worse, since another layout
    of the segments can be more fragmented. `full_at`: the op at which the device is full in spite
    of all releases, as expected, or at best where the step never runs.
    """

    expected: Releases | None
    best: Releases | None = None
    full_at: str = ""
    repeats: bool = field(default=False, compare=False)
    """True where more micro-batches than these five change nothing."""

    @property
    def runs(self) -> Releases | None:
        """Releases as expected, or else at best; None where it never runs."""
        return self.expected or self.best


def pressure(
    program: RankProgram, *, room: int, most: int, workspace_bytes: int, expandable_segments: bool
) -> Pressure:
    """Releases of a rank with `program` and `room` bytes for the allocator, and, where it fails
    with those, with `most` bytes."""

    def releases(capacity: int) -> tuple[Releases | str, bool]:
        """Or where the device is full; and whether micro-batches repeat."""

        def replay(part: RankProgram) -> tuple[Releases, bool]:
            records = reserved.replay(
                part,
                capacity=capacity,
                workspace_bytes=workspace_bytes,
                expandable_segments=expandable_segments,
                empty_cache="first",
            )
            steady = records["steady"]
            counted = Releases(
                first=records["first"].num_releases, steady=steady.num_releases,
                driver_calls=steady.driver_calls,
            )
            return counted, steady.repeats

        here = program
        try:
            replay(replace(program, first=(), steady=()))
        except DeviceFullError:  # only its building is too large: then it is built elsewhere
            here = reserved.built_elsewhere(program)
        try:
            return replay(here)
        except DeviceFullError as error:
            return error.where, error.repeats

    expected, repeats = releases(room)
    if isinstance(expected, Releases):
        return Pressure(expected=expected, repeats=repeats)
    best, also = releases(most)
    return (
        Pressure(expected=None, best=best, full_at=expected, repeats=repeats and also)
        if isinstance(best, Releases)
        else Pressure(expected=None, full_at=best, repeats=repeats and also)
    )
