"""Collectives: bytes on the wire, steps and nanoseconds of each library's algorithms. Pure functions, one file each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from zsim.collectives import gloo, ring
from zsim.collectives.ring import Step


class BytesSent(Protocol):
    """Bytes that one rank puts on the wire."""

    def __call__(self, op: str, nbytes: int, *, group_size: int, rank: int = 0, root: int = 0) -> int: ...


class DurationNs(Protocol):
    """Nanoseconds of a whole collective over links of latency α and bandwidth β that nobody else uses."""

    def __call__(self, op: str, nbytes: int, *, group_size: int, alpha_ns: int, bytes_per_s: int) -> int: ...


class Steps(Protocol):
    """The sends of each step."""

    def __call__(self, op: str, nbytes: int, *, group_size: int, root: int = 0) -> Iterator[Step]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithms:
    """How one library runs all_gather, reduce_scatter, all_reduce and broadcast."""

    bytes_sent: BytesSent
    duration_ns: DurationNs
    steps: Steps


ALGORITHMS: dict[str, Algorithms] = {
    "ring": Algorithms(bytes_sent=ring.bytes_sent, duration_ns=ring.duration_ns, steps=ring.steps),
    "gloo": Algorithms(bytes_sent=gloo.bytes_sent, duration_ns=gloo.duration_ns, steps=gloo.steps),
}
