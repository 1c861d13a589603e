"""Algorithms of which NCCL has one for a collective over a group, as far as there is a model."""

from __future__ import annotations

from zsim.cluster.collectives.nccl.channel_search import FEWEST_NVLS_RANKS
from zsim.cluster.collectives.nccl.communicator import Communicator
from zsim.cluster.collectives.nccl.tuner import Algorithm

TWO_NODES_ALONE = ("efa",)
"""Networks whose plugin has the switch's tree on two nodes alone. Amazon's tuner takes rings and
trees beyond; 4 nodes of H200 reduce on rings, NCCL 2.27.7 (stas00/ml-engineering)."""


def algorithms(op: str, communicator: Communicator) -> tuple[Algorithm, ...]:
    """Algorithms among which NCCL chooses for `op`.

    All-gathers and reduce-scatters go round, or by PAT where each node has one rank. All-reduces
    between nodes also go by trees. An all-to-all is sends and receives of all pairs.
    """
    if op == "all_to_all":
        return ("pairs",)
    choices: list[Algorithm] = ["ring"]
    between = communicator.num_nodes > 1
    if op == "all_reduce" and between:
        choices.append("tree")
    if op == "all_reduce" and _can_use_nvls(communicator):
        choices.append("nvls_tree" if between else "nvls")
    if op in ("all_gather", "reduce_scatter") and communicator.per_node == 1 and between:
        choices.append("pat")
    return tuple(choices)


def _can_use_nvls(communicator: Communicator) -> bool:
    """True where the switch reduces, in a node or below a tree between nodes."""
    fewest = FEWEST_NVLS_RANKS.get(communicator.generation)
    wide_enough = fewest is not None and communicator.per_node >= fewest
    return communicator.nvls and communicator.links == "nvlink" and wide_enough and (
        communicator.num_nodes <= 2 or communicator.fabric not in TWO_NODES_ALONE
    )
