"""Constants of NCCL beyond its tuner's: the start of a collective, what links reach, what a ring
loses in its rounds, the latency of NICs.

The tuner's own latencies, rates and caps are in `zsim.cluster.collectives.nccl.tuner`. Those here
are few, and each is of one kind of data. What is fitted is fitted to single nodes alone, by
`python -m tests.published.nccl_fit`. Between nodes figures are those of source code, and two
networks have figures of published sums. It knows no cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zsim.cluster.links import Fabric, Generation

TORCH_US = 8.5
"""µs that a collective through torch takes more than in nccl-tests: 38.5 against 30 µs, 8 H200
(stas00/ml-engineering against Azure)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NicLatency:
    """µs that a network's hop takes beyond the tuner's: with LL, with its other protocols, and with
    those in a tree."""

    small: float
    large: float
    tree: float


def _everywhere(microseconds: float) -> NicLatency:
    return NicLatency(small=microseconds, large=microseconds, tree=microseconds)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Constants:
    """All constants together, so that some can be left out.

    `launch_us` comes before any algorithm's latency. A ring's links reach `reached` of what a
    preset says, and the switch all of what the tuner says.

    A step in which a rank only sends, or only receives, leaves its channel half idle. A ring loses
    the share `idle` of a chunk's time by that in each round but its first, which loses all of it.
    """

    launch_us: Mapping[Generation, float]
    reached: Mapping[Generation, float]
    idle: float
    nics: Mapping[Fabric, NicLatency]
    fast_nics: Mapping[tuple[Fabric, Generation], NicLatency]
    """NICs that are sold with one generation alone, and are faster than others of their fabric."""

    def nic(self, fabric: Fabric, generation: Generation) -> NicLatency:
        """The latency of a NIC beyond the tuner's."""
        return self.fast_nics.get((fabric, generation), self.nics[fabric])


_INFINIBAND = NicLatency(small=0.0, large=28.0, tree=0.0)
CONSTANTS = Constants(
    launch_us={"volta": 22.0, "ampere": 29.0, "hopper": 11.0, "blackwell": 25.0},
    reached={"volta": 1.13, "ampere": 1.0, "hopper": 1.03, "blackwell": 1.0},
    idle=0.2,
    nics={
        "ib": _INFINIBAND, "roce": _INFINIBAND, "unknown": _INFINIBAND, "efa": _everywhere(75.0),
        "tcp": NicLatency(small=47.0, large=350.0, tree=350.0),
    },
    fast_nics={("efa", "blackwell"): _everywhere(35.0)},
)
"""Fitted to single nodes of four sources: launches, idle steps. Links are NCCL's own 20, 20.6 and
40.1 GB/s (topo.h), where presets have what its search takes. On Volta NCCL counts on less than
there is. Copies between two V100 reach 23.95 of a link's 25 GB/s (Dell's C4130,
p2pBandwidthLatencyTest). Elsewhere NCCL counts on 0.94 of such copies: A100, H100 and GB200 have
274, 376 and 746 GB/s (stas00/ml-engineering). That is 135.5 GB/s of six links, where NCCL has 120.

EFA: what Amazon's plugin declares to NCCL, 75 µs, and 35 from p5en on (aws-ofi-nccl,
platform-aws). With it, all-gathers of 256 MiB on 4 to 64 shared p5 are 4 to 13 % above the best
twentieth (nanotron). InfiniBand's plugin declares nothing. Floors at 2 nodes bear that out: 46 µs
(NVIDIA/nccl issue 1244), 24 for 2 x 4 (nccl-tests issue 128). For rings of large messages the one
published figure is 128 µs a hop where NCCL has 14 (32 x 8 H100, NVIDIA/nccl issue 1218). The mean
of both in logarithms is 28 more. GPUDirect-TCPXO: 123 µs, 0.98 ms at 16 MB, 2.36 ms at 256 MB, 2 x
8 H100 of A3 Mega.
"""
