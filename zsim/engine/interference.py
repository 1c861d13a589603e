"""What a collective takes of the device from the kernels that run beside it: multiprocessors and
memory bandwidth.

NCCL's kernel occupies a multiprocessor with each of its channels for as long as it runs, and moves
its bytes through the device's memory. A kernel beside it has what is left of both: products make
their tiles in more waves, and whatever is bound by its bytes waits for them, which is little where
the collective itself waits for a network, or for others that use its links.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.cluster.devices import Device
from zsim.engine import kernel_time
from zsim.engine.execution import Execution
from zsim.ir.ops import Kernel

PASSES = {"all_gather": 2.0, "reduce_scatter": 3.0, "all_reduce": 5.0, "broadcast": 2.0}
"""Reads and writes of the device's memory for each byte that a ring brings to a rank: what is
gathered is written, and read to be passed on; what is reduced is read twice and written."""
IN_THE_SWITCH = 2.0
"""Of a message that the switch reduces: each rank reads its own and writes the sum."""
MOST = 0.9
PER_CHANNEL = 512 * 64
"""Bytes below which a channel of NCCL is not opened: 512 threads of 64 bytes."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The shares of a device that a collective has: of its multiprocessors, and of the bandwidth of
    its memory."""

    multiprocessors: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Lost:
    """The share of their time beside a collective that kernels lose: to one that `moves` as fast as
    it does alone, and to one that `waits`.

    One that waits, for others on its links or for the kernels themselves, holds its multiprocessors
    and moves nothing meanwhile.
    """

    moves: float
    waits: float

    def at(self, speed: float) -> float:
        """Beside one that runs at `speed`, a share of what it has alone: it moves the same bytes,
        in 1 / `speed` of the time."""
        return self.waits + (self.moves - self.waits) * speed


def taken(
    kind: str, nbytes: int, *, ranks: int, ns: int, channels: int, in_the_switch: bool,
    device: Device,
) -> Taken:
    """What a collective of `nbytes` over so many ranks takes of `device`, which lasts `ns` and has
    `channels` at most."""
    opened = min(channels, max(1, nbytes // PER_CHANNEL))
    moved = nbytes * (IN_THE_SWITCH if in_the_switch else PASSES[kind] * (ranks - 1) / ranks)
    rate = moved * 1e9 / max(1, ns)
    return Taken(
        min(MOST, opened / device.num_sms),
        min(MOST, rate / (device.memory_bandwidth * device.memory_efficiency)),
    )


def lost(kernel: Kernel, device: Device, execution: Execution, from_it: Taken) -> float:
    """The share of its time beside a collective in which `kernel` gets nothing done; 0 for work
    that is not the device's."""
    if kernel.place != "device":
        return 0.0
    alone = kernel_time.kernel_ns(kernel, device, execution)
    sms = max(1, device.num_sms - round(from_it.multiprocessors * device.num_sms))
    left = replace(
        device, num_sms=sms, matmul_efficiency=device.matmul_efficiency * sms / device.num_sms,
        float8_efficiency=device.float8_efficiency * sms / device.num_sms,
        memory_bandwidth=round(device.memory_bandwidth * (1 - from_it.bandwidth)),
        attention={
            name: replace(rate, rate=round(rate.rate * sms / device.num_sms))
            for name, rate in device.attention.items()
        },
        exponentials=round(device.exponentials * sms / device.num_sms),
    )
    return max(0.0, 1 - alone / kernel_time.kernel_ns(kernel, left, execution))
