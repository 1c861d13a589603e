"""Graphs that NCCL's channel search finds: those of known systems, and for others the same rule
applied to their links.

NCCL 2.30.7, src/graph/search.cc, walked by hand for the systems named; where a log exists it
agrees. Knows no cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

from zsim.cluster.collectives.nccl.tuner import Graph, System
from zsim.cluster.links import Generation, Processor

NVLINK_GB_S: dict[Generation, float] = {
    "volta": 120.0, "ampere": 240.0, "hopper": 370.8, "blackwell": 721.8
}
"""GB/s per GPU and direction that NCCL counts on: links × 20, 20, 20.6 and 40.1 (topo.h)."""
RINGS_IN_NODE: dict[Generation, tuple[int, float]] = {
    "volta": (6, 20.0),
    "ampere": (12, 20.0),
    "hopper": (12, 30.0),
    "blackwell": (16, 45.0),
}
"""Rings and GB/s of each over a whole node of eight."""
CUBE_MESH_RINGS: dict[int, float] = {2: 1, 3: 2, 4: 4, 5: 1.6, 6: 2, 7: 4}
"""Rings of 20 GB/s over part of a V100 node, by number of GPUs: those of the cube mesh between its
first N. With 5 GPUs there is one, and one over PCIe of 12 GB/s."""
NVLS_HEAD_GB_S: dict[Generation, float] = {"hopper": 320.0, "blackwell": 640.0}
"""GB/s per GPU over all heads: 8 × 40 and 8 × 80."""
FEWEST_NVLS_RANKS: dict[Generation, int] = {"hopper": 5, "blackwell": 6}
"""Fewest ranks of a node for NVLS. Below it rings were as fast with NVLS on as off: 4 to 8 H200 and
B200, all-reduce of 8 GiB, NCCL 2.27.7 (stas00/ml-engineering)."""
INTER_GB_S: dict[Generation, tuple[float, ...]] = {
    "hopper": (48.0, 45.0, 42.0, 40.0, 30.0, 24.0, 22.0, 20.0, 17.5, 15.0, 12.0, 6.0, 3.0, 2.4),
}
"""Speeds that the search tries between nodes on Hopper; others take what the NIC has."""
PCIE_GB_S: dict[Generation, float] = {
    "volta": 12.0, "ampere": 24.0, "hopper": 48.0, "blackwell": 48.0
}
"""GB/s that NCCL counts on for the GPU's x16 slot: PCIe 3, 4, 5, 5. HGX B200 hosts are PCIe 5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rails:
    """The NICs of one node: how many, and GB/s of each on its line."""

    count: int
    line_gb_s: float

    def effective_gb_s(self, generation: Generation) -> float:
        """GB/s that NCCL counts on per NIC, never more than its slot: 100 Gbit/s gives 12, HDR 200
        24, NDR 400 48 (topo.h)."""
        return min(self.line_gb_s * 0.96, PCIE_GB_S[generation])


def system(
    generation: Generation,
    *,
    num_ranks: int,
    num_nodes: int = 1,
    rails: Rails | None = None,
    processor: Processor = "intel",
    nvls: bool = True,
) -> System:
    """The tuner's view of `num_ranks` GPUs on NVLink, packed evenly into `num_nodes` nodes that
    `rails` join."""
    if num_nodes == 1 or rails is None:
        ring = in_node(generation, num_ranks)
        inter = 0.0
    else:
        ring = between_nodes(generation, rails)
        inter = rails.effective_gb_s(generation) * rails.count
    return System(
        generation=generation, num_ranks=num_ranks, num_nodes=num_nodes, ring=ring,
        nvls=nvls_graph(generation, per_node=max(1, num_ranks // num_nodes), inter_gb_s=inter)
        if nvls
        else None, processor=processor,
    )


def in_node(generation: Generation, num_ranks: int = 8) -> Graph:
    """Rings over `num_ranks` GPUs inside one node: NVSwitch gives any number of them all links,
    V100's cube mesh does not."""
    channels, rate = RINGS_IN_NODE[generation]
    if generation == "volta" and num_ranks in CUBE_MESH_RINGS:
        return Graph(channels=channels, intra=rate * CUBE_MESH_RINGS[num_ranks] / channels)
    return Graph(channels=channels, intra=rate)


def between_nodes(generation: Generation, rails: Rails) -> Graph:
    """One ring per NIC, at the NIC's rate or at an even part of NVLink.

    8 rings of 48 GB/s do not fit 370.8 GB/s; 8 of 45 do.
    """
    nic = rails.effective_gb_s(generation)
    fits = min(nic, NVLINK_GB_S[generation] / rails.count)
    tried = (
        [speed for speed in INTER_GB_S.get(generation, ()) if speed <= fits] if fits < nic else []
    )
    rate = tried[0] if tried else fits
    return Graph(channels=rails.count, intra=rate, inter=rate)


def nvls_graph(generation: Generation, *, per_node: int, inter_gb_s: float = 0.0) -> Graph | None:
    """One head per GPU, at most 8 inside a node of up to eight; larger NVLink domains have 32 of a
    quarter of the rate.

    Between nodes a head is as wide as its part of the rails, on Hopper the 45 GB/s that rings get
    too.
    """
    if generation not in NVLS_HEAD_GB_S or per_node < FEWEST_NVLS_RANKS[generation]:
        return None
    heads = per_node if per_node <= 8 else 32
    inter = (
        between_nodes(generation, Rails(count=heads, line_gb_s=inter_gb_s / heads / 0.96)).inter
        if inter_gb_s
        else 0.0
    )
    return Graph(channels=heads, intra=NVLS_HEAD_GB_S[generation] / heads, inter=inter)
