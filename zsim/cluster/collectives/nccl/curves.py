"""Curves of measured collectives beyond the tuner's bandwidth: a floor, a share of the bandwidth,
and what middle sizes add.

t = floor + B/(share · bandwidth) + Σ added · B/(B + half). The tuner omits launching, the filling
of the pipeline and what protocols lose at middle sizes. Below 1 MB it is up to three times too
fast. Every curve says what it was fitted on and how far off it may be;
`python -m tests.published.errors` shows the errors. Figures are µs and bytes of nccl-tests: what
torch adds is apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from zsim.cluster.cluster import Fabric, Generation

CurveProvenance = Literal["calibrated", "published", "assumed"]

MIB = 2**20
LARGE, MIDDLE = 64 * MIB, MIB
"""Sizes from which a message is large, or middle; others are small."""
TORCH_US = 8.5
"""µs that a collective through torch takes more than in nccl-tests: 38.5 against 30 µs, 8 H200
(stas00/ml-engineering against Azure)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """µs that are added in full to messages far above `half` bytes, and half of them at that size.
    """

    microseconds: float
    half: int


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One collective on one kind of machine. `added` holds for rings of eight ranks where the
    machine is a node."""

    floor_us: float
    share: float
    added: tuple[Added, ...]
    band: CurveBand
    provenance: CurveProvenance
    source: str


MEASURED = CurveBand(large=0.08, middle=0.25, small=0.3)
"""95th percentile of the residuals of the fits below, rounded up."""
CARRIED_OVER = CurveBand(large=0.2, middle=0.4, small=0.5)
"""Constants of another collective or generation: twice what a measured curve may be off."""

_XLA = (
    "openxla/xla collective_interpolator_data.h (sm_90), 0.25 to 256 MiB; share from 8 and 16 GiB "
    "on H200 (stas00/ml-engineering)"
)
_V100 = "VIA-Research/vTrain trace/v100, 2 to 8 GPUs, 1 MiB to 1 GiB"
_AS_ALL_REDUCE = "half of its all-reduce, as a ring's steps are"

NVLS: dict[Generation, Curve] = {
    "hopper": Curve(
        floor_us=30,
        share=1.005,
        added=(Added(microseconds=70, half=16 * MIB),),
        band=MEASURED,
        provenance="calibrated",
        source="8 H200, 32 KiB to 16 GiB, NCCL 2.27.7 (stas00/ml-engineering); Azure's NDv5 H100 "
               "and H200 have the same floor and sum",
    ),
    "blackwell": Curve(
        floor_us=38,
        share=0.945,
        added=(Added(microseconds=115, half=32 * MIB),),
        band=CurveBand(large=0.1, middle=0.35, small=0.3),
        provenance="calibrated",
        source="8 B200, 32 KiB to 16 GiB, NCCL 2.27.7 (stas00/ml-engineering): 423 GB/s up to 4 "
               "GiB, 480 above, one share for both",
    ),
}
"""All-reduce in the switch of one node."""

LARGE_DOMAIN = Curve(
    floor_us=45,
    share=0.93,
    added=(Added(microseconds=560, half=32 * MIB),),
    band=CurveBand(large=0.15, middle=0.5, small=0.5),
    provenance="published",
    source="72 GB200: 586, 681 and 835 GB/s of bus bandwidth at 0.5, 1 and 8 GB (CoreWeave); "
           "nothing below",
)
"""All-reduce in the switches of 72 GPUs; what is added is taken to grow in proportion from that of
8 ranks."""

RINGS: dict[tuple[Generation, str], Curve] = {
    ("volta", "all_reduce"): Curve(
        floor_us=41, share=1.12, added=(), band=CurveBand(large=0.08, middle=0.4, small=0.5),
        provenance="calibrated", source=_V100,
    ),
    ("volta", "all_gather"): Curve(
        floor_us=24, share=1.12, added=(), band=CARRIED_OVER, provenance="assumed",
        source=_AS_ALL_REDUCE,
    ),
    ("volta", "reduce_scatter"): Curve(
        floor_us=26, share=1.1, added=(), band=CARRIED_OVER, provenance="assumed",
        source=_AS_ALL_REDUCE,
    ),
    ("ampere", "all_reduce"): Curve(
        floor_us=42, share=0.98, added=(Added(microseconds=235, half=28 * MIB),),
        band=CurveBand(large=0.15, middle=0.3, small=0.45), provenance="calibrated",
        source="8 A100, three sources 10 to 20 % apart between 8 and 256 MiB: "
        "stas00/ml-engineering, VIA-Research/vTrain, Azure's NDv4",
    ),
    ("ampere", "all_gather"): Curve(
        floor_us=22, share=0.98, added=(Added(microseconds=100, half=24 * MIB),), band=CARRIED_OVER,
        provenance="assumed", source=_AS_ALL_REDUCE,
    ),
    ("ampere", "reduce_scatter"): Curve(
        floor_us=28, share=0.97, added=(Added(microseconds=110, half=32 * MIB),), band=CARRIED_OVER,
        provenance="assumed", source=_AS_ALL_REDUCE,
    ),
    ("hopper", "all_reduce"): Curve(
        floor_us=30,  # as NVLS's: the sweep's own floor scatters from 28 to 47
        share=1.02, added=(Added(microseconds=60, half=8 * MIB),),
        band=CurveBand(large=0.08, middle=0.25, small=0.45), provenance="calibrated", source=_XLA,
    ),
    ("hopper", "all_gather"): Curve(
        floor_us=18, share=1.005, added=(Added(microseconds=50, half=8 * MIB),), band=MEASURED,
        provenance="calibrated", source=_XLA,
    ),
    ("hopper", "reduce_scatter"): Curve(
        floor_us=26, share=1.005, added=(Added(microseconds=103, half=96 * MIB),),
        band=CurveBand(large=0.1, middle=0.35, small=0.3), provenance="calibrated", source=_XLA,
    ),
    ("blackwell", "all_reduce"): Curve(
        floor_us=38, share=0.945, added=(Added(microseconds=100, half=16 * MIB),),
        band=CARRIED_OVER, provenance="assumed",
        source="share from 4 to 8 B200 at 8 GiB, NVLS off (stas00/ml-engineering); the rest as "
        "Hopper's, longer as NVLS's is",
    ),
    ("blackwell", "all_gather"): Curve(
        floor_us=22, share=0.945, added=(Added(microseconds=80, half=16 * MIB),), band=CARRIED_OVER,
        provenance="assumed",
        source="share as its all-reduce ring, the rest as Hopper's, longer as NVLS's is",
    ),
    ("blackwell", "reduce_scatter"): Curve(
        floor_us=30, share=0.945, added=(Added(microseconds=130, half=96 * MIB),),
        band=CARRIED_OVER, provenance="assumed",
        source="share as its all-reduce ring, the rest as Hopper's, longer as NVLS's is",
    ),
}
"""Rings inside one node, by generation and collective; a broadcast goes by its all-gather."""

RING_SHARE_LOST: dict[Generation, float] = {"ampere": 0.37}
"""Short rings use less of NVLink: share − this · (1/N − 1/8); 2 to 7 A100 at 1 GiB
(VIA-Research/vTrain). 4 to 8 H200 and B200 do not.

The loss is that of all-reduces, whose rounds have the fewer steps to overlap the fewer the ranks
are. A broadcast has no rounds: it passes chunk after chunk down a line. Each link carries all of it
however many ranks there are, and a longer line is never faster.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Time that a network adds to one kind of collective, in multiples of the tuner's own
    latencies.

    The floor counts in `quick` latencies (a tree with LL for all-reduce, a ring with LL otherwise),
    what larger messages add in those of a ring with LL128.
    """

    floor: float
    added: tuple[tuple[float, int], ...]
    share: float
    band: CurveBand
    provenance: CurveProvenance
    source: str
    generations: tuple[Generation, ...] = ("hopper",)
    """Generations that were measured; for others the band is the widest."""


_WIDE = CurveBand(large=0.3, middle=0.4, small=0.4)
WIDEST = CurveBand(large=0.4, middle=0.6, small=0.6)
_IB_FLOOR = (
    "46 µs at 2 nodes (NVIDIA/nccl issue 1244), 68 µs at 4 nodes of A100 (stas00/ml-engineering)"
)
_EFA_FLOOR = "2 nodes: 50 to 57 µs (dstack issue 3961)"
_IB_RING = Crossing(
    floor=1.6,
    added=((1.0, 32 * MIB),),
    share=1.0,
    band=_WIDE,
    provenance="published",
    source="reduce-scatter floor 24 µs at 2 × 4 GPUs (NVIDIA/nccl-tests issue 128); what is "
           "added is the tuner's own latency",
)
_IB_ALL_REDUCE = Crossing(
    floor=1.85,
    added=((0.35, MIB),),
    share=1.0,
    band=_WIDE,
    provenance="calibrated",
    source=f"{_IB_FLOOR}; added from the latter",
    generations=("ampere", "hopper"),
)
CROSSINGS: dict[tuple[Fabric, bool], Crossing] = {
    ("ib", True): _IB_ALL_REDUCE, ("ib", False): _IB_RING,
    ("efa", True): Crossing(
        floor=2.1, added=((2.0, MIB // 8), (1.15, 16 * MIB)), share=1.0, band=_WIDE,
        provenance="calibrated",
        source=f"4 × 8 B200, 256 KiB to 16 GiB, NCCL 2.27.7 (stas00/ml-engineering); floor of "
        f"{_EFA_FLOOR}", generations=("hopper", "blackwell"),
    ),
    ("efa", False): Crossing(
        floor=4.5, added=((1.5, MIB // 8), (1.15, 16 * MIB)), share=1.0, band=WIDEST,
        provenance="published",
        source=(
            "all-gather of 2 × 8 GPUs: 105 µs (bottlerocket-kernel-kit issue 313, which has 303 "
            "µs at 1 MB); the best twentieth at 256 MiB on 4 to 64 shared p5 takes 4.7 to 5.2 "
            "latencies of a ring with LL128 (nanotron); the first term is fitted to that, the last "
            "as its all-reduce"
        ),
    ),
    ("tcp", True): Crossing(
        floor=4.9, added=((10.0, 8 * MIB),), share=0.9, band=_WIDE, provenance="published",
        source="2 × 8 H100, GPUDirect-TCPXO, A3 Mega: 123 µs, 0.2 ms at 1 MB, 2.36 ms at 256 MB, "
        "339 GB/s at 8 GB",
    ),
    ("tcp", False): Crossing(
        floor=10.0, added=((10.0, 8 * MIB),), share=0.9, band=WIDEST, provenance="assumed",
        source="as its all-reduce",
    ),
}
"""Constants of networks, by fabric and by whether everything is reduced. RoCE and an unknown fabric
go by InfiniBand, with a wider band."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curves:
    """All constants together, so that some can be left out: by generation, by generation and
    collective, by fabric."""

    nvls: Mapping[Generation, Curve]
    rings: Mapping[tuple[Generation, str], Curve]
    large_domain: Curve
    ring_share_lost: Mapping[Generation, float]
    crossings: Mapping[tuple[Fabric, bool], Crossing]
    own_switch: frozenset[Generation] = frozenset()
    """Generations whose curve of the switch is a machine's own, measured of what NCCL chose there
    by itself. Its choice goes by that curve alone. The ring beside it is that of other machines,
    which would hold every prediction to no more than theirs take."""

    def crossing(
        self, fabric: Fabric, op: str, generation: Generation
    ) -> tuple[Crossing, CurveBand, CurveProvenance]:
        """The network's constants for `op`, how far off they may be, and where they come from."""
        reduces = op == "all_reduce"
        crossing = self.crossings.get((fabric, reduces), self.crossings["ib", reduces])
        if (fabric, reduces) in self.crossings and generation in crossing.generations:
            return crossing, crossing.band, crossing.provenance
        return crossing, WIDEST, "assumed"


CURVES = Curves(
    nvls=NVLS,
    rings=RINGS,
    large_domain=LARGE_DOMAIN,
    ring_share_lost=RING_SHARE_LOST,
    crossings=CROSSINGS,
)
