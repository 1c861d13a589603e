"""The measurements that calibrate GPUs: single kernels, as `kernel_ns` predicts them, and
collectives over all of a node.
"""

from __future__ import annotations

from collections.abc import Iterator

from zsim.cluster.devices import Device
from zsim.ir.ops import ATTENTION_BACKWARD, Kernel
from zsim.models.training_options import DTYPE_NBYTES
from zsim.runs.backend import DeviceRequest

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
SIZES = tuple(2**power for power in range(12, 29))
"""Bytes of the full messages."""
SHAPES = (
    (2048, 2048, 2048), (4096, 4096, 4096), (4096, 14336, 4096), (8192, 4096, 4096),
    (8192, 8192, 8192), (16384, 4096, 11008),
)
"""(m, n, k) of products: those of layers, from one that fills no GPU to one that fills any."""
LENGTHS = (1024, 2048, 4096, 8192)
"""Tokens of attention's sequences."""
TOKENS, WIDTH = 16_384, 128
"""Tokens times heads of attention's kernels are so many for each of 16 heads of so many columns."""
STREAM_NBYTES = tuple(2**power for power in range(26, 30))
TINY_NBYTES = 512
SECONDS = {False: 75.0, True: 8.0}
"""Seconds of all repetitions together, in the full form and in the quick one."""
FLASH = 80
"""The least compute capability of FlashAttention 2's kernels."""
TIMEOUT_S = {False: 600.0, True: 120.0}


def device_request(device: Device, world_size: int, *, quick: bool) -> DeviceRequest:
    """The measurements with `world_size` ranks, each on such a GPU."""
    has_flash = device.runtime is None or device.runtime.capability >= FLASH
    kernels = tuple(_kernels(quick=quick, has_flash=has_flash))
    sizes = SIZES[::4] if quick else SIZES
    collectives = tuple(
        (kind, nbytes) for kind in KINDS for nbytes in sizes if world_size > 1
    )
    return DeviceRequest(
        world_size=world_size, kernels=kernels, collectives=collectives,
        budget_s=SECONDS[quick] / (len(kernels) + len(collectives)), timeout_s=TIMEOUT_S[quick],
    )


def _kernels(*, quick: bool, has_flash: bool) -> Iterator[Kernel]:
    for m, n, k in SHAPES[1::2] if quick else SHAPES:
        yield product(m, n, k, "bfloat16")
    for m, n, k in SHAPES[:3]:
        yield product(m, n, k, "float32")
    for nbytes in STREAM_NBYTES[::2] if quick else STREAM_NBYTES:
        for operator in ("copy", "add", "gelu", "layer_norm", "log_softmax"):
            yield Kernel(operator, 0, nbytes, "bfloat16")
    lengths = LENGTHS[::2] if quick else LENGTHS
    for length in lengths if has_flash else ():
        yield from attention(16 * TOKENS // length, length)
    for _ in range(3):
        yield Kernel("scale", 0, TINY_NBYTES, "bfloat16")
    for operator in ("to_device", "to_host"):
        for nbytes in STREAM_NBYTES[:2]:
            yield Kernel(operator, 0, nbytes, "bfloat16", location="link")


def product(m: int, n: int, k: int, dtype: str) -> Kernel:
    """The product of a linear layer."""
    nbytes = (m * k + k * n + m * n) * DTYPE_NBYTES[dtype]
    return Kernel("linear", 2 * m * n * k, nbytes, dtype, shape=(1, m, n, k))


def attention(heads: int, length: int) -> Iterator[Kernel]:
    """Causal attention, forward and backward."""
    size = heads * length * WIDTH * DTYPE_NBYTES["bfloat16"]
    products, shape = heads * length * length * WIDTH, (heads, length, length, WIDTH)
    yield Kernel("attention", 2 * products, 4 * size, "bfloat16", shape=shape)
    yield Kernel(ATTENTION_BACKWARD, 5 * products, 8 * size, "bfloat16", shape=shape)
