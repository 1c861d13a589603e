"""Collectives of nccl-tests and like benchmarks.

They are 146 rows of several systems, a sweep of 8 H100, and all-reduces of 2 to 8 A100 or V100 in
one node. The name of a system names its cluster here. The source names no network for A100 on 4
nodes: a100-unknown-network.toml has four HDR per node, and its rows a wider band.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.published.convert import SHARED, Row, bandwidth_left, published

CLUSTERS: dict[str, dict[str, str]] = {
    "A100-SXM (1 node)": {"cluster.preset": "dgx-a100"}, "A100": {"cluster.preset": "dgx-a100"},
    "V100": {"cluster.file": "v100.toml"},
    "H200-SXM (p5en)": {"cluster.preset": "dgx-h200", "cluster.fabric": "efa"},
    "H200-SXM": {"cluster.preset": "dgx-h200"},
    "B200 (p6-b200)": {"cluster.preset": "dgx-b200", "cluster.fabric": "efa"},
    "H100-80GB": {"cluster.preset": "dgx-h100"},
    "H100-80GB (HF p5 cluster)": {"cluster.preset": "p5"},
    "A100 4 nodes (per plot name all-reduce-bench-plot-4n; hardware not stated)": {
        "cluster.file": "a100-unknown-network.toml", "widens": "0.5",
        "assumed": "four HDR per node and no kind of network, for the source names none",
    },
}
NIC_GB_S = 12.0
"""A NIC of p5, of which a node has 32; NVLink's 360 GB/s are the narrower part of a ring."""
OF_TORCH = ("torch", "nanotron")
"""Words of the tool by which torch called NCCL."""
RING = ("ring", "NVLS off", "NCCL_NVLS_ENABLE=0", "NVLS evidently off")
"""Words of the notes by which the switch did not reduce; "default = Ring" is NCCL's own choice."""


def collectives() -> Iterator[Row]:
    """The rows of several systems."""
    return _rows("nccl_collectives.csv")


def h100_sweep() -> Iterator[Row]:
    """The table that openxla/xla ships for sm_90."""
    return _rows("nccl_h100_sweep.csv")


def vtrain_all_reduces() -> Iterator[Row]:
    """The tables of vTrain."""
    return _rows("nccl_allreduce_vtrain_lut.csv")


def _rows(name: str) -> Iterator[Row]:
    for row in published(name):
        nodes, ranks = int(row["n_nodes"]), int(row["n_ranks"])
        description = f"{row.get('notes', '')} {row.get('tool', '')}".replace("Ring", "ring")
        system = CLUSTERS[row["gpu"]]
        made: dict[str, object] = {
            "collective": row["collective"], "bytes": row["size_bytes"],
            "cluster.preset": system.get("cluster.preset", ""),
            "cluster.file": system.get("cluster.file", ""), "cluster.nodes": nodes,
            "cluster.ranks": ranks,
            "cluster.fabric": system.get("cluster.fabric", "") if nodes > 1 else "",
            "nccl.nvls": "" if not any(word in description for word in RING) else False,
            "nccl.through_torch": any(word in description for word in OF_TORCH) or "",
            "measured.time": f"{row.get('time_us') or row['time_us_oop']} us",
            "widens": system.get("widens", ""), "assumed": system.get("assumed", ""),
            "source": row["source"],
        }
        if name == "nccl_collectives.csv":
            made |= {"cluster.nic_bandwidth": "", **dict.fromkeys(SHARED, "")}
        if "shared" in row.get("inter_node", ""):
            made |= _shared(nodes)
        yield made


def _shared(nodes: int) -> dict[str, object]:
    """Columns of a network that others use, with the bandwidth that is left; on one node nothing of
    it is used."""
    if nodes == 1:
        return SHARED | {
            "network.least": "", "network.most": "", "widens": 0.25,
            "assumed": "rings in a node of this cluster took 1.25 times as long as elsewhere",
        }
    left = bandwidth_left(nodes)
    rate = min(NIC_GB_S, 360 / 32) * left
    return SHARED | {
        "cluster.nic_bandwidth": f"{rate:.9g} GB/s",
        "assumed": f"others use the network too: {100 * left:.0f} % of its bandwidth is left, the "
                   f"median",
    }
