"""Collectives: bytes on the wire, steps and nanoseconds of each library's algorithms. Pure
functions, one file or folder each, with its `LIBRARY`.

Both `duration_ns` and `steps` take one latency and one bandwidth, and agree with each other. A
simulation asks `placed_ns`, the time of a group of ranks where they are on a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping

from zsim.cluster.library import Library
from zsim.loaded import Loaded

LIBRARIES: Mapping[str, Library] = Loaded({
    "ring": f"{__name__}.ring:LIBRARY", "gloo": f"{__name__}.gloo:LIBRARY",
    "nccl": f"{__name__}.nccl.placed:LIBRARY",
})
