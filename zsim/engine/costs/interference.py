"""Interference: the multiprocessors and memory bandwidth that a collective takes from kernels.

NCCL's kernel occupies one multiprocessor with each of its channels for as long as it runs, and
moves its bytes through the device's memory. A kernel beside it has the rest of both: products make
their tiles in more waves, and kernels bound by memory bandwidth wait. Libraries choose tiles for
the whole device, so a product of one wave has two. A collective that waits for a network, or for
others on its links, takes little bandwidth.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from zsim.cluster.devices import Device
from zsim.engine.costs import kernel_time
from zsim.engine.execution import Execution
from zsim.ir.ops import Kernel

MEMORY_PASSES = {
    "all_gather": 3.0, "reduce_scatter": 3.0, "all_reduce": 6.0, "broadcast": 3.0,
    "all_to_all": 3.0,
}
"""Reads and writes of device memory per byte that a ring brings to a rank.

They go into NCCL's buffer, out of it, and to the tensor of the user or into a sum with it. Source:
NCCL's maintainer on what its kernels take (NVIDIA/nccl issue 1428).
"""
SWITCH_PASSES = 2.0
"""Reads and writes per byte of a message that the switch reduces: each rank reads its own and
writes the sum."""
LARGEST_SHARE = 0.9
"""Share of the multiprocessors: the most that a collective takes. Assumed."""
FAIR_SHARE = 0.5
"""Share of the memory bandwidth: the most that a collective takes from a kernel that wants all of
it. Memory serves both alike."""
CHANNEL_NBYTES = 512 * 64
"""Bytes for which NCCL opens one more channel: 512 threads of 64 bytes."""


class DeviceShare(NamedTuple):
    """The shares of a device that a collective takes: of its multiprocessors, and of its memory
    bandwidth."""

    multiprocessors: float
    bandwidth: float


class KernelLoss(NamedTuple):
    """The share of their time beside a collective that kernels lose: while it is `moving` as fast
    as alone, and while it is `waiting`.

    A collective that waits, for others on its links or for the kernels themselves, holds its
    multiprocessors and moves no bytes.
    """

    moving: float
    waiting: float

    def at(self, speed: float) -> float:
        """The share lost to a collective that runs at `speed`, a share of its speed alone.

        It moves the same bytes in 1 / `speed` of the time.
        """
        return self.waiting + (self.moving - self.waiting) * speed


def device_share(
    kind: str, nbytes: int, *, ranks: int, ns: int, channels: int, in_the_switch: bool,
    device: Device,
) -> DeviceShare:
    """The share of `device` that a collective of `nbytes` takes, which lasts `ns` and opens at most
    `channels`."""
    opened = min(channels, max(1, nbytes // CHANNEL_NBYTES))
    moved = nbytes * (SWITCH_PASSES if in_the_switch else MEMORY_PASSES[kind] * (ranks - 1) / ranks)
    rate = moved * 1e9 / max(1, ns)
    return DeviceShare(
        min(LARGEST_SHARE, opened / device.num_sms),
        min(FAIR_SHARE, rate / (device.memory_bandwidth * device.memory_efficiency)),
    )


def remaining(device: Device, collective: DeviceShare) -> Device:
    """The part of `device` that `collective` leaves to kernels."""
    sms = max(1, device.num_sms - round(collective.multiprocessors * device.num_sms))
    return replace(
        device.slowed(sms / device.num_sms), num_sms=sms,
        tiled_for=device.tiled_for or device.num_sms,
        memory_bandwidth=round(device.memory_bandwidth * (1 - collective.bandwidth)),
    )


def lost_share(kernel: Kernel, device: Device, execution: Execution, rest: Device) -> float:
    """The share of its time that `kernel` loses while it has only the `rest` of `device`; 0 for
    work off the device."""
    if kernel.location != "device":
        return 0.0
    alone = kernel_time.kernel_ns(kernel, device, execution)
    return max(0.0, 1 - alone / kernel_time.kernel_ns(kernel, rest, execution))
