"""When each op of a step starts, ends and was issued: what the engine answers, and what it asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

from zsim.ir.ops import Kernel, Op


class Durations(Protocol):
    """What the engine asks of a cost model; all answers are int nanoseconds."""

    def compute_ns(self, kernels: tuple[Kernel, ...]) -> int:
        """How long these kernels run one after another."""
        ...

    def collective_ns(self, kind: str, nbytes: int, ranks: tuple[int, ...]) -> int:
        """How long a collective of `nbytes` (full message) over `ranks` runs alone."""
        ...

    def usage(self, ranks: tuple[int, ...]) -> Mapping[int, Mapping[str, Fraction]]:
        """By rank: what a collective over `ranks` at full speed takes of its links, by their kind.
        """
        ...

    def issue_ns(self, op: Op) -> int:
        """How long the host takes to issue `op`."""
        ...

    @property
    def launch_queue(self) -> int:
        """How many kernels may be pending before the host waits; 0 for any number."""
        ...


@dataclass(frozen=True, slots=True)
class Delays:
    """Nanoseconds by op index: how much longer than their kernels ops of one rank program take, and
    how much later the next are issued."""

    longer: Mapping[int, int] = field(default_factory=dict)
    later: Mapping[int, int] = field(default_factory=dict)


NO_DELAYS = Delays()


@dataclass(frozen=True, slots=True)
class Times:
    """Start and end of each op of one rank, by index, and when its host had issued it.

    `shared`: by how much longer collectives took because others ran over their links meanwhile, of
    those that did.
    """

    starts: Sequence[int]
    ends: Sequence[int]
    issued: Sequence[int]
    shared: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The steady step in time. `ranks` holds the simulated ranks; `stand_ins` says by rank which of
    them it is like."""

    ranks: dict[int, Times]
    stand_ins: tuple[int, ...]
    step_time_ns: int
