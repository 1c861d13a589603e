"""NCCL's variables in a log: an algorithm or a protocol that was forced, a transport switched off.

Curves are of NCCL's own choice. A row is skipped where variables force what has no model. Others
that could change a time widen its band.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from zsim.cluster.collectives.nccl.bands import LARGE
from zsim.cluster.collectives.nccl.tuner import Algorithm
from zsim.errors import Caveat

MODELLED: dict[str, Algorithm] = {
    "ring": "ring", "nvls": "nvls", "nvlstree": "nvls_tree", "pat": "pat"
}
"""Algorithms with a model, as NCCL_ALGO names them."""
OTHERS = ("tree", "collnet", "collnetdirect", "collnetchain")
"""Algorithms without one."""
FREE = ("", "default", "auto", "any", "none")
"""Values that leave the choice to NCCL."""
HARMLESS = re.compile(
    r"NCCL_(?:DEBUG\w*|SOCKET_IFNAME|IB_GID_INDEX|IB_SL|IB_TC|IB_TIMEOUT|IB_RETRY_CNT|TOPO_FILE"
    r"|COMM_ID|CUMEM\w*|ASYNC_ERROR_HANDLING|TIMEOUT|NVLS_ENABLE)"
)
"""Variables that name the same NICs, or say how to report."""
ELSEWHERE: dict[str, tuple[tuple[str, ...], bool]] = {
    "NCCL_P2P_DISABLE": (("1",), False),
    "NCCL_SHM_DISABLE": (("1",), False),
    "NCCL_P2P_LEVEL": (("LOC", "0"), False),
    "NCCL_IB_DISABLE": (("1",), True),
    "NCCL_NET": (("SOCKET",), True),
}
"""Values by which bytes go another way, and True where they do so between nodes alone."""
WIDENS = 0.5
"""Share by which a variable of unknown effect widens a band."""
FIRST_NVLS = (2, 17)
"""The first NCCL whose switch reduces."""


class UnmodelledError(ValueError):
    """A way of running NCCL without a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The choice that variables leave NCCL: one algorithm or None for any, and its switch."""

    algorithm: Algorithm | None = None
    nvls: bool = True
    caveats: tuple[Caveat, ...] = ()


def listed(log: str) -> tuple[tuple[str, str], ...]:
    """Names and values of NCCL's variables, of a command line or as NCCL reports them."""
    pairs = re.findall(r"\b(NCCL_[A-Z0-9_]+)(?:=| set by environment to )([\w^,-]+)", log)
    return tuple(dict.fromkeys((name, value) for name, value in pairs))


def choice(
    variables: tuple[tuple[str, str], ...], *, version: str, num_ranks: int, num_nodes: int,
    nbytes: int,
) -> Choice:
    """The choice that `variables` leave NCCL of `version`; UnmodelledError without a model."""
    algorithm, nvls, unread = None, _has_nvls(version), list[str]()
    for name, value in variables:
        if name == "NCCL_ALGO":
            algorithm, without = _algorithm(value)
            nvls = nvls and not without
        elif name == "NCCL_NVLS_ENABLE":
            nvls = nvls and value != "0"
        elif name == "NCCL_PROTO":
            _require_protocol(value, nbytes)
        elif name in ELSEWHERE:
            values, only_between = ELSEWHERE[name]
            if value.upper() in values and (num_nodes > 1 or not only_between):
                raise UnmodelledError(f"{name}={value}: no model of it")
        elif name == "NCCL_IB_HCA":
            if num_nodes > 1 and _num_nics(value) < num_ranks // num_nodes:
                unread.append(f"{name}={value[:20]}")
        elif not HARMLESS.fullmatch(name):
            unread.append(f"{name}={value[:20]}")
    return Choice(
        algorithm=algorithm, nvls=nvls,
        caveats=tuple(Caveat(f"{each} is taken to change nothing", widens=WIDENS)
                      for each in unread),
    )


def _has_nvls(version: str) -> bool:
    number = re.match(r"(\d+)\.(\d+)", version)
    return number is None or (int(number[1]), int(number[2])) >= FIRST_NVLS


def _algorithm(value: str) -> tuple[Algorithm | None, bool]:
    """The one algorithm that NCCL_ALGO leaves or None, and True where the switch is left out."""
    names, excludes = set(value.lower().lstrip("^").split(",")) - {""}, value.startswith("^")
    if value.lower() in FREE or not names:
        return None, False
    if names <= {*MODELLED, *OTHERS}:
        switch = {"nvls", "nvlstree"} & names
        if excludes and not {"ring", "tree"} & names:
            return None, bool(switch)
        if {"ring", "tree"} <= names and not excludes:
            return None, not switch
        if len(names) == 1 and not excludes and value.lower() in MODELLED:
            return MODELLED[value.lower()], value.lower() == "ring"
    raise UnmodelledError(f"NCCL_ALGO={value[:40]}: no model of it")


def _require_protocol(value: str, nbytes: int) -> None:
    """UnmodelledError for protocols that NCCL does not take by itself."""
    names = set(value.lower().split(",")) - {""}
    own = value.lower() in FREE or names == {"ll", "ll128", "simple"}
    if not own and not (names == {"simple"} and nbytes >= LARGE):
        raise UnmodelledError(f"NCCL_PROTO={value[:40]}: no model of it by itself")


def _num_nics(value: str) -> float:
    """NICs that NCCL_IB_HCA names; infinite where it excludes some or names them by a prefix."""
    names = {name for name in value.split(",") if name}
    numbered = all(re.search(r"_\d+(?::\d+)?$", name) for name in names)
    return len(names) if names and numbered and not value.startswith("^") else float("inf")
