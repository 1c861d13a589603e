"""The host of a node: its memory, its cores, the switches its devices share, and its drives. And
the file system that all hosts write checkpoints to.

Offloaded states live here and cross its links. It knows no strategy, no Program and no format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from zsim.io.units import counted, format_bytes

HostVerdict = Literal["FITS", "TIGHT", "OOM", "UNKNOWN"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Bytes of a node's `memory` and its `cores`, 0 where the file does not say.

    A core streams `thread_bandwidth` bytes/s through a fused step of the optimizer; 40 GB/s are
    those of DeepSpeed's CPU Adam on an EPYC with AVX-512. So many `devices_per_switch` share the
    link of a PCIe switch to memory. Copies both ways at once reach a share `duplex` of the sum of
    both directions.
    """

    memory: int = 0
    cores: int = 0
    thread_bandwidth: int = 40 * 10**9
    devices_per_switch: int = 1
    duplex: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Drives:
    """All NVMe drives of a node as one: bytes/s of `read` and `write`, bytes of `capacity`."""

    read: int
    write: int
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """Bytes/s that one rank reads or writes alone, and that all ranks share."""

    rank_bandwidth: int
    bandwidth: int

    @property
    def alone(self) -> int:
        """Bytes/s of one rank while no other reads or writes."""
        return min(self.rank_bandwidth, self.bandwidth)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes that offloading takes of a node's host at once, on the node that takes most: all of
    them, those pinned, and all by kind.

    torch's rounding of pinned blocks to powers of two takes `rounding_bytes` more. Processes and
    the system take `other_bytes` besides, and at most `most_other_bytes`.
    """

    num_ranks: int
    """The ranks of that node."""
    offloaded_bytes: int
    pinned_bytes: int
    by_kind: Mapping[str, int]
    rounding_bytes: int
    other_bytes: int
    most_other_bytes: int
    capacity_bytes: int
    """Bytes of the host; 0 where the cluster's file does not say."""
    locked_bytes: int = 0
    """Bytes that DeepSpeed locks in memory for drives, beside those that torch pins."""

    @property
    def needed_bytes(self) -> int:
        """Bytes needed, as expected."""
        return self._least_bytes + self.other_bytes

    @property
    def _least_bytes(self) -> int:
        return self.offloaded_bytes + self.rounding_bytes

    @property
    def verdict(self) -> HostVerdict:
        """FITS with the most that others may take; OOM where offloaded bytes alone, in blocks, are
        too many."""
        if not self.capacity_bytes:
            return "UNKNOWN"
        if self._least_bytes > self.capacity_bytes:
            return "OOM"
        high = self._least_bytes + self.most_other_bytes
        return "FITS" if high <= self.capacity_bytes else "TIGHT"

    def __str__(self) -> str:
        capacity = format_bytes(self.capacity_bytes) if self.capacity_bytes else "a size not known"
        locked = f", {format_bytes(self.locked_bytes)} locked for drives" * bool(self.locked_bytes)
        return (
            f"{self.verdict} on the host: {counted(self.num_ranks, 'rank')} of a node need "
            f"{format_bytes(self.needed_bytes)} of {capacity}, "
            f"{format_bytes(self.offloaded_bytes)} offloaded, {format_bytes(self.pinned_bytes)} "
            f"of it pinned{locked}"
        )
