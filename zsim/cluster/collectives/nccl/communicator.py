"""What NCCL is asked about, a group of ranks as it lays its rings over them, and what it answers, a
time with its band."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from zsim.cluster.cluster import Fabric, Generation, Processor
from zsim.cluster.collectives.nccl.curves import CurveProvenance
from zsim.cluster.collectives.nccl.tuner import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """A group of ranks as NCCL lays its rings over it. `bus_gb_s` is the ring's bus bandwidth: its
    narrowest shared place; `inside_gb_s` that of a ring inside a node where parts have fewer
    NVLinks than their generation, else no less than the generation's. `fullest` are the ranks of
    the node with most of them where nodes have not as many each, else 0."""

    generation: Generation
    num_ranks: int
    num_nodes: int
    fullest: int = 0
    bus_gb_s: float
    inside_gb_s: float = inf
    fabric: Fabric = "unknown"
    processor: Processor = "intel"
    links: Literal["nvlink", "pcie"] = "nvlink"
    nvls: bool = True
    nics: int = 8
    """Of a node, those over which its rings go."""
    longer_inside_us: float = 0.0
    longer_between_us: float = 0.0
    """What a hop inside a node, and one between nodes, takes beyond NCCL's own, which its curves
    have in them."""
    algorithm: Algorithm | None = None
    """The one that NCCL is made to take; None for its own choice."""

    @property
    def per_node(self) -> int:
        """Ranks of the fullest node, for which the others wait."""
        return self.fullest or -(-self.num_ranks // self.num_nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """µs of one collective, its band, the algorithm, and where the widest of its constants comes
    from."""

    microseconds: float
    low: float
    high: float
    algorithm: Algorithm
    provenance: CurveProvenance
