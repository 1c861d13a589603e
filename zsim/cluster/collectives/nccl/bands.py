"""Error bands of collectives: half-widths in which nine of ten measurements lie.

Widths are errors of sources that the constants have not seen (`tests/published/README.md`), not
those of fitted rows. Beyond the most ranks that were measured they grow with each doubling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2

from zsim.cluster.collectives.nccl.communicator import Communicator, CurveProvenance
from zsim.cluster.collectives.nccl.tuner import Algorithm
from zsim.cluster.links import Fabric, Generation

MIB = 2**20
LARGE, MIDDLE = 64 * MIB, MIB
"""Sizes from which a message is large, or middle; others are small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveBand:
    """Half-width of the interval around a prediction in which measurements lie, as a share of it,
    for large, middle and small messages."""

    large: float
    middle: float
    small: float

    def at(self, nbytes: int) -> float:
        """The share for a message of `nbytes`."""
        return self.large if nbytes >= LARGE else self.middle if nbytes >= MIDDLE else self.small


MEASURED = CurveBand(large=0.12, middle=0.3, small=0.36)
"""A node whose generation was measured with this collective."""
CARRIED_OVER = CurveBand(large=0.15, middle=0.4, small=0.5)
"""A node by mechanisms alone: another collective, or another number of ranks."""
OVER_PCIE = CurveBand(large=0.3, middle=0.5, small=0.5)
"""A ring over PCIe, of which three figures are published."""
BETWEEN: Mapping[Fabric, CurveBand] = {
    "ib": CurveBand(large=0.25, middle=0.4, small=0.4),
    "efa": CurveBand(large=0.2, middle=0.35, small=0.6),
}
"""Networks of which published sums were predicted."""
WIDEST = CurveBand(large=0.4, middle=0.6, small=0.6)
MOST_RANKS: Mapping[Fabric, int] = {"ib": 64, "efa": 512}
"""Ranks of the largest published sums that are within the band; 16 for other networks."""
PER_DOUBLING = 0.25
"""Share by which a band is wider with each doubling of ranks beyond. Source: the one sum beyond
InfiniBand's 64 ranks, an all-gather of 256, is 26 % off."""
MOST_WIDTH = 0.9
MEASURED_SIZES: Mapping[tuple[Generation, str], range] = {
    ("volta", "all_reduce"): range(2, 9), ("ampere", "all_reduce"): range(2, 9),
    ("hopper", "all_reduce"): range(4, 9), ("hopper", "all_gather"): range(8, 9),
    ("hopper", "reduce_scatter"): range(8, 9), ("blackwell", "all_reduce"): range(4, 9),
}
"""Numbers of GPUs in a node for which there are measurements."""


def band(
    op: str, algorithm: Algorithm, communicator: Communicator
) -> tuple[CurveBand, CurveProvenance]:
    """The band of `op` by `algorithm`, and where its widest constants come from."""
    if communicator.links == "pcie":
        return OVER_PCIE, "assumed"
    if communicator.num_nodes == 1:
        measured = MEASURED_SIZES.get((communicator.generation, op), range(0))
        if communicator.num_ranks in measured:
            return MEASURED, "calibrated"
        return CARRIED_OVER, "published" if algorithm == "nvls" else "assumed"
    wider = 1 + PER_DOUBLING * max(
        0.0, log2(communicator.num_ranks / MOST_RANKS.get(communicator.fabric, 16))
    )
    known = BETWEEN.get(communicator.fabric) if algorithm not in ("pat", "pairs") else None
    base = known or WIDEST
    return CurveBand(
        large=min(MOST_WIDTH, base.large * wider), middle=min(MOST_WIDTH, base.middle * wider),
        small=min(MOST_WIDTH, base.small * wider),
    ), "published" if known else "assumed"
