"""Rings and heads that NCCL's channel search finds in a node.

NCCL 2.30.7, src/graph/search.cc, walked by hand for the systems named; where a log exists it
agrees. Knows no cluster.
"""

from __future__ import annotations

from zsim.cluster.collectives.nccl.tuner import Graph
from zsim.cluster.links import Generation

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


def cube_mesh_gb_s(num_ranks: int) -> float:
    """GB/s of all rings over `num_ranks` GPUs of a V100 node."""
    rings, rate = RINGS_IN_NODE["volta"]
    return rate * CUBE_MESH_RINGS.get(num_ranks, rings)


def nvls_graph(generation: Generation, *, per_node: int) -> Graph | None:
    """One head per GPU, at most 8 inside a node of up to eight; larger NVLink domains have 32 of a
    quarter of the rate."""
    if generation not in NVLS_HEAD_GB_S or per_node < FEWEST_NVLS_RANKS[generation]:
        return None
    heads = per_node if per_node <= 8 else 32
    return Graph(channels=heads, gb_s=NVLS_HEAD_GB_S[generation] / heads)
