"""What is left of a network that others use too, as one shared cluster of p5 shows it (nanotron's
collectives of 256 MiB).

Collectives there lose time in proportion to their bytes, so they are those of a network with less
bandwidth; more nodes meet the worst of more flows. The power is a compromise between the
collectives below. That bandwidth is lost, and not time, was chosen after two other forms, with the
source's five training steps in view: of those this is no blind prediction.
"""

from __future__ import annotations

import re

IN_NODE = 1.25
"""How many times as long rings take on one node of it: 940 us where an all-gather of 8 H100 takes
729 elsewhere."""
LOSS = 0.55
"""Of a network's bandwidth nodes to the power of minus this are left in the median. What
all-reduces took beyond their time alone at 4, 8, 16, 32 and 64 nodes makes 1.9, 3.2, 3.8, 5.1 and
10.6 times less bandwidth, all-gathers 2.5, 4.2, 4.7, 9.2 and 25."""
BAND = (0.3, 3.0)
"""The 5th and the 95th percentile of times on such a network, as shares of the median."""


def bandwidth_left(num_nodes: int) -> float:
    """The share of a network's bandwidth that a collective over `num_nodes` has in the median."""
    return float(num_nodes**-LOSS)


_ALONE = re.compile(
    r"\b(?:not?|non|never|without|un)[-_ ]*(?:shared|sharing|congest\w*|noisy|noise|contention)"
    r"|\b(?:dedicated|exclusive\w*|isolated|private)\b"
)
_OTHERS = re.compile(r"\bshared\b|\bcongest(?:ed|ion)\b|\bnoisy\b|\bcontention\b|\bwith others\b")
_THIS_CLUSTER = re.compile(r"\befa\b|\baws\b|\bp5\b|\bhf\b|hugging[-_ ]?face")
_ANOTHER = re.compile(
    r"infini|\bib\b|[hnex]dr\d*\b|connectx|\bcx-?\d|quantum|roce|rdma|ether|gbe\b|\btcp\b|socket|slingshot|omni-?path|\bopa\b"
)


def is_among_others(network: str) -> bool | None:
    """Whether words of a network say that others use it, or that it is that of this cluster; None
    where they name none."""
    lower = network.lower()
    if _ALONE.search(lower):
        return False
    if _OTHERS.search(lower) or _THIS_CLUSTER.search(lower):
        return True
    return False if _ANOTHER.search(lower) else None
