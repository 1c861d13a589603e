"""The interface of a library of collectives: bytes on the wire, steps, and times of a group of
ranks where they are on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from zsim.cluster.cluster import ClusterSpec, Path


class Send(NamedTuple):
    """`source` sends `nbytes` to `destination`; ranks are numbered within the group."""

    source: int
    destination: int
    nbytes: int


RingStep = tuple[Send, ...]


class BytesSent(Protocol):
    """Bytes that one rank puts on the wire."""

    def __call__(
        self, op: str, nbytes: int, *, group_size: int, rank: int = 0, root: int = 0
    ) -> int: ...


class DurationNs(Protocol):
    """Nanoseconds of a whole collective over links of latency α and bandwidth β without other
    traffic."""

    def __call__(
        self, op: str, nbytes: int, *, group_size: int, alpha_ns: int, bytes_per_s: int
    ) -> int: ...


class PlacedNs(Protocol):
    """Nanoseconds of a whole collective along `path`, a ring over ranks of `cluster`, on links
    without other traffic."""

    def __call__(self, op: str, nbytes: int, *, cluster: ClusterSpec, path: Path) -> int: ...


class Steps(Protocol):
    """The sends of each step."""

    def __call__(
        self, op: str, nbytes: int, *, group_size: int, root: int = 0
    ) -> Iterator[RingStep]: ...


class NumSends(Protocol):
    """Number of sends in all steps."""

    def __call__(self, op: str, nbytes: int, *, group_size: int) -> int: ...


class AlgorithmName(Protocol):
    """Name of the algorithm behind the time of a collective along `path`: "ring" where that is
    its `steps`."""

    def __call__(self, op: str, nbytes: int, *, cluster: ClusterSpec, path: Path) -> str: ...


class HalfWidth(Protocol):
    """Half-width of the time along `path`, as a share of it; None where the library knows no more
    than its links."""

    def __call__(
        self, op: str, nbytes: int, *, cluster: ClusterSpec, path: Path
    ) -> float | None: ...


class Channels(Protocol):
    """Channels of a collective along `path`, each on a multiprocessor, and True where the switch
    reduces; None where they are not known."""

    def __call__(
        self, op: str, nbytes: int, *, cluster: ClusterSpec, path: Path
    ) -> tuple[int, bool] | None: ...


def _unknown(op: str, nbytes: int, *, cluster: ClusterSpec, path: Path) -> None:
    return None


RING = "ring"
"""Name of the algorithm whose steps go round a ring."""


PAIRS = "pairs"
"""Name of the algorithm of an all-to-all, whose ranks send to each other."""


def a_ring_but_for_pairs(op: str, nbytes: int, *, cluster: ClusterSpec, path: Path) -> str:
    """The algorithm of libraries that know one for all but an all-to-all."""
    return PAIRS if op == "all_to_all" else RING


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """One library's all_gather, reduce_scatter, all_reduce, broadcast and all_to_all."""

    bytes_sent: BytesSent
    duration_ns: DurationNs
    steps: Steps
    num_sends: NumSends
    placed_ns: PlacedNs
    algorithm: AlgorithmName = a_ring_but_for_pairs
    half_width: HalfWidth = _unknown
    channels: Channels = _unknown


def along_the_path(duration_ns: DurationNs) -> PlacedNs:
    """The closed form over the mean latency and the narrowest hop of a ring over the ranks. Pairs
    that exchange share the NICs of their nodes."""

    def placed_ns(op: str, nbytes: int, *, cluster: ClusterSpec, path: Path) -> int:
        return duration_ns(
            op, nbytes, group_size=path.num_ranks, alpha_ns=path.alpha_ns,
            bytes_per_s=path.pairs_bytes_per_s if op == "all_to_all" else path.bytes_per_s,
        )

    return placed_ns
