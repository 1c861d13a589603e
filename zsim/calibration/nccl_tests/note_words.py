"""What the notes of an nccl row say of how NCCL ran: an algorithm or a protocol that was forced, a
transport that was switched off.

NCCL's own choice is what there are curves of. An algorithm that is one of them is taken by itself;
what forces another one, or sends bytes another way than NCCL does, is why the row is skipped.
Remarks on how figures were read change nothing, and all other words are named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from zsim.calibration.nccl_tests import unit_words
from zsim.cluster.collectives.nccl.curves import LARGE
from zsim.cluster.collectives.nccl.tuner import Algorithm

ALGORITHMS: dict[str, Algorithm] = {
    "ring": "ring", "nvls": "nvls", "nvlstree": "nvls_tree", "pat": "pat"
}
"""As NCCL_ALGO names those that there is a model of when nothing else may run."""
OTHERS = ("tree", "collnet", "collnetdirect", "collnetchain")
"""As it names those that there is none of."""
OWN = ("", "default", "auto", "any", "none", "-", "n/a")
"""Values of a column that leave the choice to NCCL."""
HARMLESS = re.compile(
    r"NCCL_(?:DEBUG\w*|SOCKET_IFNAME|IB_GID_INDEX|IB_SL|IB_TC|IB_TIMEOUT|IB_RETRY_CNT|TOPO_FILE|COMM_ID|CUMEM\w*|ASYNC_ERROR_HANDLING"
    r"|TIMEOUT|NVLS_ENABLE)"
)
"""Variables that say which of the same NICs, and how to report; `nccl_text.has_nvls` reads the
last."""
ELSEWHERE: dict[str, tuple[tuple[str, ...], bool]] = {
    "NCCL_P2P_DISABLE": (("1",), False),
    "NCCL_SHM_DISABLE": (("1",), False),
    "NCCL_P2P_LEVEL": (("LOC", "0"), False),
    "NCCL_IB_DISABLE": (("1",), True),
    "NCCL_NET": (("SOCKET",), True),
}
"""Variables that with these values send bytes another way, and whether they do so between nodes
alone."""
_SET = re.compile(r"\b(NCCL_[A-Z0-9_]+)\s*[=:]\s*(\^?[\w.,/:-]*)", re.IGNORECASE)
_DENIED = re.compile(
    r"\b(?:no|not|without)[ -]+(?:a |the |double |binary )*(?:rings?|trees?)\b|\bnon-(?:ring|tree)s?\b"  # noqa: E501
    r"|(?<!nvls )(?<!nvls-)\b(?:rings?|trees?)\s+(?:(?:is|are|was|were)\s+)?(?:off|disabled|excluded|not used|unused)\b",  # noqa: E501
    re.IGNORECASE,
)
"""Rings or trees as what did not run: no algorithm alone is left, so NCCL chose among the others.
"""
_KNOWN = (
    r"\(?\b\d{1,4}-nodes? AR matches NVLS\)?|assumed bus ?bw|full message(?: bytes)?|(?:sizes? (?:in|is|are in) )?\bbytes\b",  # noqa: E501
    r"(?:NVLS|SHARP)(?:_ENABLE)?\s*=\s*[01]",
    r"NVLS\W+(?:evidently\s+|is\s+)?(?:off|on|disabled|enabled)|(?:without|no|with) (?:NVLS|SHARP)|(?:NVLS|SHARP) (?:off|on|default)",  # noqa: E501
    r"\bNVLS[- ]?Tree\b|NVLS(?: from [\d.]+ ?[KMG]i?B)?|\brings?\b", r"\bdefaults?\b(?:\s*[=:])?",
    r"\bsize\s*=\s*\d+\s*[KMG]i?B|\bp\d{1,2}\s*=\s*[\d.]+", r"\blegend says [\w =]+|\bband\b",
    r"\b(?:mean|median|best|average|p50)\b(?: (?:of|over) \d+(?: (?:runs?|iterations?|iters?|repeats?|trials?))?)?",  # noqa: E501
    r"\b(?:(?:dtype|data[ -]?type)\s*[=:]?\s*)?(?:bf16|bfloat16|fp\d{1,2}|float\d{0,2}|u?int\d{1,2})\b",  # noqa: E501
    r"\b(?:dtype|data[ -]?type)\s*[=:]?\s*(?:half|double)\b|\b(?:half|single|double)[ -]precision\b",  # noqa: E501
    r"\btimes? in (?:us|µs|microseconds)\b|\bline\s*=\s*\w+",
    r"\b\d+ ranks? inferred from [\w/]+(?:\s*=\s*[\d.]+)?|\b[\w.]{1,40} says illustrative|provenance unknown",  # noqa: E501
    r"\b(?:torch|pytorch|cuda|driver|nccl|nccl-tests|python)\s*v?=?\s*\d[\w.+]*",
    r"\b(?:out[- ]of[- ]place|in[- ]place|oop|ip|from (?:a |the )?(?:plot|table|figure|readme)|read off(?: a| the)? plot)\b",  # noqa: E501
)
"""Remarks, dtypes, which change nothing of a message whose bytes are known, and words of the switch
and of rings that `nccl_text.has_nvls` reads or this file does."""
_TORCH = re.compile(
    r"\b(?:(?:via|with|through|by|using|from|in|under)\s+)?(?:py)?torch(?:[. ]distributed|[. ]c10d)?(?!\w|\.\w|\s*v?=?\s*\d)",  # noqa: E501
    re.IGNORECASE,
)
"""That torch called NCCL; with a number behind it its version alone."""
_RANKS, _NODES = (
    r"\b(\d{1,7})\s*(?:gpus?|ranks?|devices?|processes)", r"(?:nodes?|hosts?|servers?)\b",
)
_LAID_OUT = re.compile(
    rf"(?:{_RANKS}\s+)?\b(?:across|over|on|in)\s+(\d{{1,7}})\s*{_NODES}", re.IGNORECASE
)
_PER_NODE = re.compile(rf"{_RANKS}\s*(?:per|a|each|/)\s*{_NODES}", re.IGNORECASE)


class UnmodelledError(ValueError):
    """NCCL was made to run in a way that there is no model of, or the words contradict their row.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The algorithm that was forced, None for NCCL's own choice, whether the switch was left out,
    what of the words changes nothing, and whether they say that torch called NCCL."""

    algorithm: Algorithm | None
    no_switch: bool
    unread: tuple[str, ...]
    through_torch: bool = False


def told(notes: str, tool: str, *, num_ranks: int, num_nodes: int, nbytes: int) -> Told:
    """What `notes`, and variables among the words of `tool`, say; UnmodelledError for what there is
    no model of, or where they contradict the ranks or nodes."""
    for ranks, nodes in _LAID_OUT.findall(notes):
        if int(nodes) != num_nodes or (ranks and int(ranks) != num_ranks):
            said = f"{ranks} ranks on {nodes} nodes" if ranks else f"{nodes} nodes"
            raise UnmodelledError(f"notes: {said} contradict {num_ranks} ranks on {num_nodes}")
    for per_node in _PER_NODE.findall(notes):
        if int(per_node) * num_nodes != num_ranks:
            raise UnmodelledError(f"notes: {per_node} ranks a node contradict {num_ranks} ranks "
                                  f"on {num_nodes}")
    algorithm, no_switch, unread = None, False, list[str]()
    for name, value in _variables(f"{notes} {tool}"):
        if name == "NCCL_ALGO":
            algorithm, no_switch = _algorithm(value)
        elif name == "NCCL_PROTO":
            _protocol(value, nbytes)
        elif name in ELSEWHERE:
            forbidden, only_between = ELSEWHERE[name]
            if value.upper() in forbidden and (num_nodes > 1 or not only_between):
                raise UnmodelledError(f"{name}={value}: no model of it")
        elif name == "NCCL_IB_HCA":
            if num_nodes > 1 and _named_nics(value) < num_ranks // num_nodes:
                unread.append(f"{name}={value[:20]}")
        elif not HARMLESS.fullmatch(name):
            unread.append(f"{name}={value[:20]}")
    rest = unit_words.without(_PER_NODE.sub(" ", _LAID_OUT.sub(" ", _SET.sub(" ", _apart(notes)))))
    if re.search(
        r"(?<!nvls )(?<!nvls-)\btrees?\b|\bcollnet", _DENIED.sub(" ", rest), re.IGNORECASE
    ):
        raise UnmodelledError("notes: trees, or CollNet, alone: no model of them")
    said, rest = rest, _TORCH.sub(" ", rest)
    unread += _remains(rest)
    return Told(
        algorithm=algorithm, no_switch=no_switch or _says_ring(rest), unread=tuple(unread),
        through_torch=said != rest,
    )


def _apart(words: str) -> str:
    """The words with blanks between variables that commas join."""
    return re.sub(r"[,;]\s*(?=NCCL_)", " ", words, flags=re.IGNORECASE)


def _variables(words: str) -> Iterator[tuple[str, str]]:
    return ((name.upper(), value.rstrip(",.:")) for name, value in _SET.findall(_apart(words)))


def in_log(text: str) -> str:
    """The variables that a log says were set, on its command line or as NCCL reports them, as notes
    have them."""
    found = re.findall(r"\b(NCCL_[A-Z0-9_]+)(?:=| set by environment to )([\w^,-]+)", text)
    return " ".join(dict.fromkeys(f"{name}={value}" for name, value in found))


def _algorithm(value: str) -> tuple[Algorithm | None, bool]:
    """The one algorithm that NCCL_ALGO leaves, or None for NCCL's own choice, and whether it is
    without its switch."""
    names, without = set(value.lower().lstrip("^").split(",")) - {""}, value.startswith("^")
    if value.lower() in OWN or not names:
        return None, False
    if names <= {*ALGORITHMS, *OTHERS}:
        switch = {"nvls", "nvlstree"} & names
        if without and not {"ring", "tree"} & names:
            return None, bool(switch)
        if {"ring", "tree"} <= names and not without:
            return None, not switch
        if len(names) == 1 and not without and value.lower() in ALGORITHMS:
            return ALGORITHMS[value.lower()], value.lower() == "ring"
    raise UnmodelledError(f"NCCL_ALGO={value[:40]}: no model of it")


def _protocol(value: str, nbytes: int) -> None:
    """UnmodelledError for protocols that NCCL does not take by itself."""
    names = set(value.lower().split(",")) - {""}
    own = value.lower() in OWN or names == {"ll", "ll128", "simple"}
    if not own and not (names == {"simple"} and nbytes >= LARGE):
        raise UnmodelledError(f"NCCL_PROTO={value[:40]}: no model of it by itself")


def _says_ring(words: str) -> bool:
    """Whether words name the ring, but not as something that did not run."""
    return re.search(r"\brings?\b", _DENIED.sub(" ", words), re.IGNORECASE) is not None


def _named_nics(value: str) -> float:
    """How many NICs NCCL_IB_HCA names: all of them where it excludes some, or gives what their
    names begin with."""
    names = [name for name in value.split(",") if name]
    every = (
        value.startswith("^")
        or not names
        or any(not re.search(r"_\d+(?::\d+)?$", name) for name in names)
    )
    return float("inf") if every else len(set(names))


def _remains(words: str) -> Iterator[str]:
    """The words that nothing here knows, as one remark; none where only signs and figures are left.
    """
    words = _DENIED.sub(" ", words)
    for pattern in _KNOWN:
        words = re.sub(pattern, " ", words, flags=re.IGNORECASE)
    if re.search(r"[^\W\d_]{2,}", words):
        yield " ".join(words.split()).strip(" ,;:()")[:60]
