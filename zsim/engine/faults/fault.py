"""Faults of a step as data: of ranks, of their collectives, and of links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from zsim.io.units import format_rate, format_time

Distribution = Literal["exponential", "uniform"]
Each = Literal["step", "op"]


class _Told:
    """Text of a fault: its kind and its fields, as scenarios call them."""

    __slots__ = ()
    kind: ClassVar[str]

    def __str__(self) -> str:
        parts = []
        for field in fields(self):  # type: ignore[arg-type]
            value, name = getattr(self, field.name), field.name
            if name.endswith("_ns"):
                name, value = name.removesuffix("_ns"), format_time(value)
            elif name == "bandwidth":
                value = format_rate(value)
            parts.append(f"{name} {value}")
        return f"{self.kind}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank(_Told):
    """A rank whose kernels take `factor` times as long, as those of a throttled GPU."""

    kind: ClassVar[str] = "slow_rank"
    rank: int
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter(_Told):
    """Random delays of every rank, independent and alike in distribution.

    Each rank's step begins later by a draw, or each of its ops with kernels takes a draw longer.
    The draws of a `seed` depend on rank and op alone.
    """

    kind: ClassVar[str] = "jitter"
    mean_ns: int
    distribution: Distribution = "exponential"
    each: Each = "step"
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LateStart(_Told):
    """A rank that begins each step `by_ns` later, as one that waits for its data does."""

    kind: ClassVar[str] = "late_start"
    rank: int
    by_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingRank(_Told):
    """A rank that ends in place of the op `at`, as "backward blocks.1"."""

    kind: ClassVar[str] = "failure"
    rank: int
    at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedCollective(_Told):
    """A rank that does not issue the collective `at`, as "all_gather blocks.1"."""

    kind: ClassVar[str] = "skipped_collective"
    rank: int
    at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReorderedCollective(_Told):
    """A rank that issues the collective `at` and its next one in each other's place."""

    kind: ClassVar[str] = "reordered_collective"
    rank: int
    at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink(_Told):
    """One NIC of one node whose link carries only `bandwidth` bytes/s, as a damaged cable does."""

    kind: ClassVar[str] = "slow_link"
    node: int
    nic: int
    bandwidth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LostLink(_Told):
    """One NIC of one node whose link carries nothing: collectives over it never end."""

    kind: ClassVar[str] = "lost_link"
    node: int
    nic: int


Fault = (
    SlowRank | Jitter | LateStart | FailingRank | SkippedCollective | ReorderedCollective
    | SlowLink | LostLink
)
FAULT_KINDS: Mapping[str, type[Fault]] = {
    kind.kind: kind
    for kind in (
        SlowRank, Jitter, LateStart, FailingRank, SkippedCollective, ReorderedCollective, SlowLink,
        LostLink,
    )
}
"""Kinds of faults by the names that scenarios have for them."""
AtOp = FailingRank | SkippedCollective | ReorderedCollective
"""Faults at one op of one rank's steady step."""
AT_OPS = (FailingRank, SkippedCollective, ReorderedCollective)
OF_RANKS = (SlowRank, LateStart, *AT_OPS)
"""Faults of one rank."""
