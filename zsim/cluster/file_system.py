"""The file system that all ranks of a cluster write checkpoints to. It knows no format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """Bytes/s that one rank reads or writes alone, and that all ranks share."""

    rank_bandwidth: int
    bandwidth: int

    @property
    def alone(self) -> int:
        """Bytes/s of one rank while no other reads or writes."""
        return min(self.rank_bandwidth, self.bandwidth)
