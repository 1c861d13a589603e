"""What the words of an nccl row say: which GPU, how its nodes are joined, whether the switch
reduces.

People write "A100-SXM (1 node)", "EFA v4 8x50 GB/s per node", "NCCL_NVLS_ENABLE=0 (ring)".
Everything that such words leave open is assumed, and named. Knows no file format.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from zsim.calibration.nccl_tests import link_words
from zsim.cluster.cluster import Fabric, Generation

GPUS: tuple[tuple[str, Generation, float], ...] = (
    ("GB300", "blackwell", 1.0),
    ("GB200", "blackwell", 1.0),
    ("B300", "blackwell", 1.0),
    ("B200", "blackwell", 1.0),
    ("B100", "blackwell", 1.0),
    ("GH200", "hopper", 1.0),
    ("H200", "hopper", 1.0),
    ("H100", "hopper", 1.0),
    ("H800", "hopper", 8 / 18),
    ("H20", "hopper", 1.0),
    ("A100", "ampere", 1.0),
    ("A800", "ampere", 8 / 12),
    ("V100", "volta", 1.0),
)
"""Names, generations, and the share of the generation's NVLinks that the part has: H800 and A800
have 8 each (NVIDIA's data sheets)."""
PCIE_PARTS: tuple[str, ...] = (
    "L40S", "L40", "L4", "A10G", "A10", "A40", "RTX 4090", "RTX 5090", "RTX 3090", "T4",
)
"""GPUs without NVLink to more than one peer; their rings go over PCIe."""
NVLINK_DOMAIN = 72
"""GPUs that NVLink joins in GB200 and GB300 NVL72."""
EFA_NODE_GB_S: dict[Generation, float] = {
    "volta": 12.5, "ampere": 50.0, "hopper": 400.0, "blackwell": 400.0
}
"""p3dn, p4d and p4de, p5 and p5en, p6-b200."""
DEFAULT_NODE_GB_S: dict[Generation, float] = {
    "volta": 50.0, "ampere": 100.0, "hopper": 400.0, "blackwell": 400.0
}
"""What a node's NICs carry where nobody says: 4 × EDR; 4 × HDR, between p4d's 400 Gbit/s and DGX
A100's 1600; 8 × NDR."""
_NVLS_OFF = (
    r"NVLS(?:_ENABLE)?\s*=\s*0|NVLS\W+(?:evidently\s+|is\s+)?(?:off|disabled)|SHARP off"
    r"|without NVLS|no NVLS|NCCL_ALGO\s*=\s*Ring"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A GPU: its generation, the share of the generation's NVLinks that it has, and whether it has
    any."""

    name: str
    generation: Generation
    nvlink_share: float
    links: str


def part(gpu: str, intra: str = "") -> Part | None:
    """The GPU that `gpu` names; None for one that NCCL's model does not know. `intra` can say that
    NVLink is not used.

    A part in pairs behind a bridge, as H100 NVL, is none of them: its rings are neither NVLink's
    nor PCIe's.
    """
    upper = gpu.upper()
    if re.search(r"(?<![A-Z])NVL\b", upper):
        return None
    over_pcie = link_words.over_pcie(gpu, intra)
    for name in PCIE_PARTS:
        if re.search(rf"\b{name}\b", upper):
            return Part(name=name, generation="ampere", nvlink_share=0.0, links="pcie")
    for name, generation, share in GPUS:
        if re.search(rf"(?<![A-Z0-9]){name}(?![0-9])", upper):
            return Part(
                name=name, generation=generation, nvlink_share=share,
                links="pcie" if over_pcie else "nvlink",
            )
    return None


def fabric(inter: str) -> Fabric:
    """The kind of network; "unknown" where the words name none."""
    lower = inter.lower().replace("default", "")
    for words, kind in (
        (("efa",), "efa"), (("tcp", "ethernet without rdma", "socket"), "tcp"), (("roce",), "roce"),
        (
            ("infiniband", "hdr", "ndr", "edr", "xdr", "connectx", "cx-", "cx7", "cx6", "quantum"),
            "ib",
        ),
    ):
        if any(word in lower for word in words):
            return kind  # type: ignore[return-value]
    if "rdma" in lower and re.search(r"ethernet|gbe\b", lower):
        return "roce"
    if re.search(r"\bena\b", lower):  # AWS's NIC without EFA
        return "tcp"
    return "ib" if re.search(r"\bib\b", lower) else "unknown"


def is_ethernet(inter: str) -> bool:
    """Whether the words say Ethernet, and not whether it is RoCE or TCP."""
    said = re.search(r"ethernet|gb[eE]\b|\b\d+\s*gige?\b", inter.lower())
    return said is not None and fabric(inter) == "unknown" and "rdma" not in inter.lower()


def is_plain(inter: str) -> bool:
    """Whether the words say Ethernet or TCP and no RDMA: of these a node has one NIC, unless they
    say whose it is."""
    return is_ethernet(inter) or fabric(inter) == "tcp"


def has_nvls(words: str, nccl_version: str) -> bool:
    """Whether the switch may reduce: not when the row says that it is off or that a ring was
    forced, nor before NCCL 2.17."""
    if re.search(_NVLS_OFF, words, re.IGNORECASE):
        return False
    version = re.match(r"(\d+)\.(\d+)", nccl_version)
    return version is None or (int(version[1]), int(version[2])) >= (2, 17)


def is_shared(inter: str) -> bool:
    """Whether other jobs used the network at the same time."""
    return re.search(r"\bshared\b|congested|noisy", inter, re.IGNORECASE) is not None


def through_torch(tool: str) -> bool:
    """Whether torch called NCCL, which takes longer than nccl-tests' own loop."""
    return re.search(r"torch|nanotron|deepspeed|\.py\b", tool, re.IGNORECASE) is not None
