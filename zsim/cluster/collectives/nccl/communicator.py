"""NCCL's view of a group of ranks, and its estimate of a collective: a time with its band."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from zsim.cluster.collectives.nccl.tuner import Algorithm, Protocol
from zsim.cluster.links import Fabric, Generation, Processor

CurveProvenance = Literal["calibrated", "published", "assumed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """A group of ranks as NCCL lays its rings over it.

    The ring's bus bandwidth, that of its narrowest shared link, is `bus_gb_s`. That of a ring
    inside a node is `inside_gb_s` where parts have fewer NVLinks than their generation, else no
    less than the generation's. A node's NICs together carry `network_gb_s`, or 0 for no more than
    the ring. Where nodes differ in their ranks, `fullest` is the most that one has, else 0.
    """

    generation: Generation
    num_ranks: int
    num_nodes: int
    fullest: int = 0
    bus_gb_s: float
    inside_gb_s: float = inf
    network_gb_s: float = 0.0
    fabric: Fabric = "unknown"
    processor: Processor = "intel"
    links: Literal["nvlink", "pcie"] = "nvlink"
    nvls: bool = True
    nics: int = 8
    """Number of a node's NICs over which its rings go."""
    longer_inside_us: float = 0.0
    longer_between_us: float = 0.0
    """µs that a hop inside a node, and one between nodes, takes beyond NCCL's own, which NCCL's
    constants include."""
    algorithm: Algorithm | None = None
    """Algorithm that NCCL is made to take; None for its own choice."""

    @property
    def per_node(self) -> int:
        """Ranks of the fullest node, for which the others wait."""
        return self.fullest or -(-self.num_ranks // self.num_nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """µs of one collective, its band, the algorithm and protocol, and where the widest of its
    constants comes from."""

    microseconds: float
    low: float
    high: float
    algorithm: Algorithm
    protocol: Protocol
    provenance: CurveProvenance
