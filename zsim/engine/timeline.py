"""Data of the engine: start, end and issue of each op, and the cost model behind them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

from zsim.cluster.cluster import ClusterSpec
from zsim.ir.ops import Kernel, Op
from zsim.ir.run import HopRecord

NEVER = -1
"""The ns of a collective that never ends, as over a lost link."""


class CostModel(Protocol):
    """The durations that a simulation needs, all in int nanoseconds."""

    def compute_ns(self, kernels: tuple[Kernel, ...]) -> int:
        """The time of these kernels in sequence."""
        ...

    def collective_ns(self, kind: str, nbytes: int, ranks: tuple[int, ...]) -> int:
        """The time of a collective of `nbytes` (full message) over `ranks` alone, or NEVER."""
        ...

    def lost_links(self, ranks: tuple[int, ...]) -> Sequence[str]:
        """The faults by which a collective over `ranks` NEVER ends."""
        ...

    def usage(self, ranks: tuple[int, ...]) -> Mapping[int, Mapping[str, Fraction]]:
        """The share of each link that a collective over `ranks` takes at full speed, by rank and
        kind of link."""
        ...

    def host_usage(
        self, kernels: tuple[Kernel, ...], rank: int, *, in_step: bool
    ) -> Mapping[Hashable, Fraction]:
        """The shares of the rank's node that an op off the device takes at full speed, by resource.

        With ranks `in_step`, those of all ranks of the node.
        """
        ...

    def issue_ns(self, op: Op) -> int:
        """The time in which the host issues `op`."""
        ...

    @property
    def launch_queue(self) -> int:
        """Most kernels that may be pending before the host waits; 0 for any number."""
        ...

    @property
    def node_size(self) -> int:
        """Ranks of a full node, which share its host."""
        ...


class RingCosts(CostModel, Protocol):
    """A cost model that also knows the cluster that rings go over."""

    @property
    def cluster(self) -> ClusterSpec:
        """Devices, links and the library of collectives."""
        ...

    def algorithm(self, kind: str, nbytes: int, ranks: tuple[int, ...]) -> str:
        """The name of the algorithm that `collective_ns` is the time of; "ring" for a ring."""
        ...


@dataclass(frozen=True, slots=True)
class Delays:
    """Nanoseconds by op of one rank program: added to its kernels (`longer`), and to the issue of
    the ops after it (`later`). The host begins the step `start` ns late."""

    longer: Mapping[int, int] = field(default_factory=dict)
    later: Mapping[int, int] = field(default_factory=dict)
    start: int = 0


NO_DELAYS = Delays()


def add(losses: Mapping[int, int], more: Mapping[int, int]) -> dict[int, int]:
    """Nanoseconds by op of both."""
    if not losses or not more:
        return dict(losses or more)
    total = defaultdict(int, losses)
    for index, ns in more.items():
        total[index] += ns
    return dict(total)


@dataclass(frozen=True, slots=True)
class Times:
    """Start, end and issue of each op of one rank, by index, in ns since the start of the step.

    `shared`: by collective or copy, ns that it took longer because others used its links.
    `arrived`: by collective, the time from which on it waited for other members alone.
    """

    starts: Sequence[int]
    ends: Sequence[int]
    issued: Sequence[int]
    shared: Mapping[int, int] = field(default_factory=dict)
    arrived: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The steady step in time. `ranks` holds the simulated ranks; `representatives`, by rank, the
    simulated rank that is like it."""

    ranks: Mapping[int, Times]
    representatives: tuple[int, ...]
    step_time_ns: int
    hops: tuple[HopRecord, ...] = ()
    """Hops of chunks round rings that were simulated as steps, where they were to be noted."""
