"""Time of the driver's calls by which torch's allocator gives memory back and takes other memory.

Measured on one H100 (tests/measured/full_device.json): cudaFree waits until the device rests, and
cudaMalloc does not. Others have as much for small segments. Kaldi's log (pull request 2236) has 27
us a cudaFree and 50 us a cudaMalloc over 10,870 calls. A table of the University of Virginia has
50 us a cudaMalloc.
"""

from __future__ import annotations

from zsim.ir.ops import DriverCalls

FREE_NS, FREE_GIB_NS = 28_000, 287_000
"""Time of a cudaFree on a device at rest, and for each GiB of its segment."""
ALLOCATION_NS, ALLOCATION_GIB_NS = 33_000, 35_000
"""Time of a cudaMalloc, and for each GiB of its segment."""
FAILURE_NS = 2_270_000
"""Time of a cudaMalloc that finds no memory."""
GIB = 2**30


def driver_ns(calls: DriverCalls) -> int:
    """The host's time in `calls`, besides its wait for the device."""
    by_size = calls.freed_bytes * FREE_GIB_NS + calls.allocated_bytes * ALLOCATION_GIB_NS
    each = calls.frees * FREE_NS + calls.allocations * ALLOCATION_NS
    return calls.failures * FAILURE_NS + each + by_size // GIB
