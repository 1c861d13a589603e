"""Which columns of a measured collective that nobody knows could say how NCCL ran.

People keep a job's number, a day or a rack beside their times, and such a column must not make
every row of a table doubtful. What a setting is called says so: NCCL's variables, what clocks and
links do, who else is on them. A row with one of those is taken as if it were not there and its band
is wider; any other column is named, and nothing more. A training step has more settings than names
tell, from its dropout to its data, so that there a column that nobody knows always counts
(`zsim.calibration.rows.checks.unread`).
"""

from __future__ import annotations

import re

_OF_NCCL = (
    *(
        "nccl", "env", "environment", "variable", "variables", "flag", "flags", "option", "options",
        "setting", "settings",
    ),
    *(
        "config", "mode", "enable", "enabled", "disable", "disabled", "force", "forced", "tuner",
        "plugin", "algo",
    ),
    *(
        "algorithm", "proto", "protocol", "tree", "ring", "nvls", "sharp", "collnet", "channel",
        "channels", "cta", "ctas",
    ),
    *(
        "thread", "threads", "buffer", "buffers", "buffsize", "chunk", "chunksize", "registered",
        "registration", "ubr",
    ),
    *(
        "align", "unalign", "graph", "graphs", "blocking", "aggregated", "agg", "warmup", "stream",
        "streams", "cputime",
    ),
    *("root", "redop", "op", "operation", "split", "communicators", "unit", "units"),
)
"""Of NCCL, of its programs and of what starts them."""
_OF_MACHINES = (
    *(
        "clock", "clocks", "frequency", "mhz", "power", "watts", "cap", "limit", "throttle",
        "throttled", "mig", "mps", "nic",
    ),
    *(
        "nics", "hca", "hcas", "rail", "rails", "ib", "roce", "rdma", "efa", "gdr", "gdrcopy",
        "network", "net", "socket",
    ),
    *(
        "switch", "link", "links", "nvlink", "pcie", "p2p", "shm", "acs", "iommu", "numa",
        "affinity", "binding", "topo",
    ),
    *(
        "topology", "placement", "routing", "qos", "mtu", "congestion", "contention", "shared",
        "concurrent", "load", "busy",
    ),
)
"""Of the machine and its links, and of who else is on them."""
_WORDS = frozenset((*_OF_NCCL, *_OF_MACHINES))


def is_setting(column: str) -> bool:
    """Whether a column of this name could say how a collective ran, as nccl_buffsize, gpu_clocks or
    network_load do."""
    return any(
        re.sub(r"\d+$", "", word) in _WORDS or word in _WORDS
        for word in re.split(r"[^a-z0-9]+", column.lower())
    )
