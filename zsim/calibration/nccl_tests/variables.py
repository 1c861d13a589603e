"""NCCL's variables in a log: an algorithm or a protocol that was forced, a transport switched off.

Curves are of NCCL's own choice. A run is skipped where variables force another. Those of unknown
effect widen the band.
"""

from __future__ import annotations

import re

FORCING = re.compile(
    r"NCCL_(?:ALGO=.+|PROTO=(?!simple$).+|(?:P2P|SHM|IB)_DISABLE=[^0].*|P2P_LEVEL=(?:LOC|0)"
    r"|NET=SOCKET)",
    re.IGNORECASE,
)
"""Variables that take the choice from NCCL, or send bytes another way."""
HARMLESS = re.compile(
    r"NCCL_(?:DEBUG\w*|SOCKET_IFNAME|IB_GID_INDEX|IB_SL|IB_TC|IB_TIMEOUT|IB_RETRY_CNT|TOPO_FILE"
    r"|COMM_ID|CUMEM\w*|ASYNC_ERROR_HANDLING|TIMEOUT|NVLS_ENABLE|\w+_DISABLE|P2P_LEVEL|NET)="
)
"""Variables that name the same NICs, or say how to report."""
WIDENS = 0.5
"""Share by which a variable of unknown effect widens a band."""


def listed(log: str) -> tuple[str, ...]:
    """NCCL's variables as "NAME=value", of a command line or as NCCL reports them."""
    pairs = re.findall(r"\b(NCCL_[A-Z0-9_]+)(?:=| set by environment to )([\w^,-]+)", log)
    return tuple(dict.fromkeys(f"{name}={value[:40]}" for name, value in pairs))
