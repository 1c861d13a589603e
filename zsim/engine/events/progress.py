"""The progress of ranks, and of collectives as their members arrive, in one round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from zsim.engine.contention.max_min_fairness import Usage
from zsim.engine.events.rank_schedule import Arrival, Frontier, RankSchedule
from zsim.engine.timeline import Delays


class Durations(NamedTuple):
    """The durations of a schedule's events, in ns, by event."""

    durations: list[int]
    """Durations of ops; 0 for those that share links and for the host's events."""
    offsets: list[int]
    """The host's work before each event: from its last event to the issue of an op, or to its next
    event."""
    longer: Mapping[int, int]
    """Additions to the time alone, by op."""
    start: int
    """Time at which the host begins the step."""


def durations_of(
    schedule: RankSchedule, alone: tuple[list[int], list[int]], delays: Delays
) -> Durations:
    """The durations of `schedule` with `delays`; `alone`: the ns of its ops and of their issue."""
    durations, offsets = ([0] * schedule.num_events for _ in range(2))
    durations[: len(schedule.ops)] = alone[0]
    for index, extra in delays.longer.items():
        durations[index] += extra if index not in schedule.arrivals else 0
    clock, host_event = 0, len(schedule.ops)
    for index, issue in enumerate(alone[1]):
        if schedule.host_events[index] != host_event:
            host_event = schedule.host_events[index]
            offsets[host_event], clock = clock, 0
        clock += issue
        offsets[index] = clock
        clock += delays.later.get(index, 0)
    return Durations(durations, offsets, delays.longer, delays.start)


@dataclass(slots=True)
class CollectiveProgress:
    """One collective of one communicator, as its members arrive."""

    signature: tuple[str, int, int]
    ready: int = 0
    last: Arrival | None = None
    durations: Durations | None = None
    """Arrival and durations of the last member so far; members with one program share them."""
    is_agreed: bool = True
    """False where a member has another signature; then it never starts."""
    longer: int = 0
    """The most that overlap on any member adds: the slowest member holds up the others."""
    arrived: list[tuple[RankProgress, Arrival]] = field(default_factory=list)


@dataclass(slots=True)
class CommunicatorQueue:
    """One queue: collectives start in issue order, each when all members have arrived and the one
    before it is over."""

    members: int
    ranks: tuple[int, ...]
    usage: Usage
    """The share of the simulated ranks' links that its collectives take; empty where it cannot
    contend."""
    free_at: int = 0
    next: int = 0
    pending: dict[int, CollectiveProgress] = field(default_factory=dict)
    waiting: list[CollectiveProgress] = field(default_factory=list)
    is_busy: bool = False


@dataclass(slots=True)
class RankProgress:
    """One rank's progress: its frontier, and the starts and ends of its events so far, in ns."""

    rank: int
    schedule: RankSchedule
    durations: Durations
    communicators: dict[str, CommunicatorQueue]
    starts: list[int]
    ends: list[int]
    frontier: Frontier
    shared: dict[int, int] = field(default_factory=dict)
    """The ns that each collective or copy took longer because it shared its links, by op."""
    arrived: dict[int, int] = field(default_factory=dict)
    """The time from which on each collective waited for other members alone, by op."""
