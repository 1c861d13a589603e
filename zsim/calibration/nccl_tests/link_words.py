"""How the GPUs of one node are joined, as nccl rows say it, and which parts and nodes are taken for
others that have been measured.

NVLink and PCIe are read, with their generations, numbers and rates. What switches direct transfers
off has no model. All other words, and all hardware that nobody has published a collective of, are
named: they are predicted with a wider band.
"""

from __future__ import annotations

import re

from zsim.calibration.nccl_tests.note_words import UnmodelledError

TAKEN_AS: dict[str, str] = {
    "GB300": "B200", "GB200": "B200", "B300": "B200", "B100": "B200", "GH200": "H200",
    "H20": "H200",
}
"""Parts without a published collective, and the measured one of their generation, which has as many
NVLinks."""
MEASURED_IN_NODE = 8
"""GPUs of the largest node that collectives have been published of."""
_NOT_DIRECT = re.compile(
    r"\b(?:no|not|without|disabled?)[ -]+(?:P2P|SHM)\b|\b(?:P2P|SHM)(?:\s*/\s*SHM)?\W+(?:(?:is|are)\s+)?(?:disabled|off|not used|unused)\b"  # noqa: E501
    r"|(?<!P2P/)\bSHM\b(?!\W+(?:enabled|on)\b)|\bshared[ -]memory\b|\bP2P\s*=\s*0\b", re.IGNORECASE,
)
"""Bytes that go through the host's memory, or would where a direct way is closed."""
_NO_NVLINK = re.compile(
    r"\b(?:no|not|without)[ -]+NVLinks?\b|\bnon-NVLink\b|\bNVLinks?\W+(?:(?:is|are)\s+)?(?:off|disabled|down|absent|not used|unused)\b",  # noqa: E501
    re.IGNORECASE,
)
_BRIDGE = re.compile(r"\b(?:bridges?|bridged)\b", re.IGNORECASE)
_PCIE = re.compile(r"\bPCI[- ]?E(?:XPRESS)?(?![A-Z])", re.IGNORECASE)
_VARIABLE = r"\bNCCL_[A-Z0-9_]+\s*[=:]\s*\^?[\w.,:-]*"
_KNOWN = (
    _VARIABLE,
    r"\b(?:no|without|with) (?:NVLS|SHARP)\b|\b(?:NVLS|SHARP)(?:\s*=\s*[01]|\W+(?:is\s+)?(?:off|on|disabled|enabled))?\b",  # noqa: E501
    r"\bNV(?:idia )?[- ]?(?:Links?|Switch(?:es)?)[- ]?v?\d?(?:\.\d)?\b|\bNV\d{1,2}\b|\bNVL\d{1,3}\b",  # noqa: E501
    r"\bPCI[- ]?E(?:XPRESS)?[- ]?v?\d?(?:\.\d)?\b",
    r"\bgen(?:eration)?[- .]?\d?(?:\.\d)?\b|\b\d(?:st|nd|rd|th)\b|\bv\d(?:\.\d)?\b",
    r"\b\d{1,5}(?:\.\d{1,4})?\s*[GT](?:B/s|b/s|bps|bit/s|T/s)(?:\s*(?:/|per|each)\s*(?:GPU|link|direction|way)?)?",
    r"\b\d{1,3}\s*x\s*\d{1,3}\b|\bx\s*\d{1,3}\b|\b\d{1,3}\s*x\b|\b\d{1,3}\s*(?:links?|lanes?|switch(?:es)?|GPUs?)\b",
    r"\b(?:uni|bi)-?(?:directional|dir)\b|\b(?:full|total|aggregate|bandwidth|both ways|each way|per (?:GPU|link|direction|way|node))\b",  # noqa: E501
    r"\bP2P\b(?:\W+(?:enabled|on)\b)?|\bSHM\W+(?:enabled|on)\b|\b(?:SXM\d?|HGX|DGX|NVSwitch system|hybrid cube[- ]mesh|cube[- ]mesh)\b",  # noqa: E501
    r"\ball[- ]to[- ]all\b|\bfully connected\b|\b(?:links?|and|with|over|via|by|of|only|default)\b",
)
"""Names of what is modelled, its generations, numbers and rates, and what joins them."""
_UNSAID = re.compile(r"\W*(?:unknown|unsaid|not stated|n/?a|nan)?\W*", re.IGNORECASE)


def check(intra: str) -> None:
    """UnmodelledError where direct transfers between the GPUs of a node did not run."""
    if found := _NOT_DIRECT.search(re.sub(_VARIABLE, " ", intra)):
        raise UnmodelledError(f"intra_node: {found[0][:40]!r}: no model of it")


def over_pcie(gpu: str, intra: str) -> bool:
    """Whether rings go over PCIe: a card's or a row's that says PCIe, unless it has NVLink too, and
    one's without NVLink."""
    has_nvlink = "NVLINK" in _NO_NVLINK.sub(" ", intra).upper()
    return not has_nvlink and (
        _PCIE.search(f"{gpu} {intra}") is not None or _NO_NVLINK.search(intra) is not None
    )


def is_bridged(intra: str) -> bool:
    """Whether NVLink joins pairs alone: rings of more than two GPUs cross PCIe between them."""
    return _BRIDGE.search(intra) is not None


def bridged(per_node: int) -> str:
    """What is taken of pairs behind bridges, as words."""
    return (
        "rings over PCIe between the pairs that bridges join"
        if per_node > 2
        else "NVLink's full rate over a bridge"
    )


def unread(intra: str) -> str:
    """The words that nothing here knows, "" for none."""
    rest = _BRIDGE.sub(" ", _NO_NVLINK.sub(" ", intra))
    if _UNSAID.fullmatch(rest):
        return ""
    for pattern in _KNOWN:
        rest = re.sub(pattern, " ", rest, flags=re.IGNORECASE)
    return intra.strip()[:60] if re.search(r"[^\W\d_]{2,}", rest) else ""


def taken(gpu: str, name: str, *, links: str, per_node: int, in_domain: bool) -> list[str]:
    """What hardware that nobody has published a collective of is taken for."""
    found = []
    if name in TAKEN_AS:
        found.append(f"{name} as {TAKEN_AS[name]}, for nobody has published its collectives")
    if links == "nvlink" and _PCIE.search(gpu):
        found.append(f"{name} on a PCIe card as one on SXM, for intra_node says NVLink")
    if links == "nvlink" and per_node > MEASURED_IN_NODE and not in_domain:
        found.append(f"a node of {per_node} {name} as one of {MEASURED_IN_NODE} with longer "
                     f"rings, for nobody has published its times")
    return found
