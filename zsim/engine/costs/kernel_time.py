"""Times of single kernels on a device: products by their tiles, fused attention by its length, all
others by their bytes.

An m × n product is cut into tiles, each of which a multiprocessor makes in (k + prologue) steps.
Tiles run in waves of as many as there are multiprocessors, and a share of the last wave's idle part
is lost. Hardware hides the rest: tiles of other sizes, split k, clocks that rise. The tile is the
fastest of those that libraries have. A thin product is bound by its bytes.

Times are pure functions of the kernel's shape and the device's constants, in int nanoseconds,
rounded up once.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from zsim.cluster.devices import Device
from zsim.engine.costs import float8
from zsim.engine.execution import EAGER, Execution
from zsim.errors import listed
from zsim.ir.ops import (
    ACCUMULATE,
    CAST_LOGITS,
    CAST_SCORES,
    HEAD,
    LOSS_STEP,
    MOVE_GRADIENT,
    NORM_STEP,
    Kernel,
    is_attention,
)
from zsim.models.training_options import DTYPE_NBYTES

TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.95), (64, 128, 0.8), (64, 64, 0.6))
"""Rows and columns of a tile, and its rate relative to the best: smaller ones read more for each
product. CUTLASS's usual tiles."""

STREAMS = frozenset(
    {
        "copy", "cast", "fill", "pad", "add", "divide", ACCUMULATE, CAST_LOGITS, CAST_SCORES,
        MOVE_GRADIENT, NORM_STEP, LOSS_STEP, "norm", "scale", "adamw", "adamw8bit",
        "sgd", "log_softmax", "nll_loss",
    }
)
"""Operators that read and write plain contiguous memory: copies, and what optimizers do."""
CASTS = frozenset({"cast", CAST_LOGITS, CAST_SCORES})
"""Casts of a model's values, which torch.compile puts into other kernels."""


ALIGNED = {"tf32": 4, "bfloat16": 8, "float16": 8, "float8": 16}
"""Elements in 16 bytes, the unit in which tensor cores load operands. Rows of a matrix that are no
multiples of them take other kernels (cuBLAS documentation, tensor core usage: leading dimensions).
"""
MISALIGNED = 0.5
"""Share of the rate that misaligned products reach. Assumed: padding GPT-2's vocabulary of 50257 to
50304 saves a quarter of a step, and the head has a third of the products. torch.compile pads such
products itself since torch 2.1."""

MISALIGNED_ON_HOPPER = 0.17
"""The same on Hopper: its own instructions load operands by rows of 16 bytes, so libraries take
kernels of Turing (pytorch issue 181718).

Measured on an H100: the three products of GPT-2's head with 50257 columns took 15.5 ms in place of
2.6 (tests/measured/gpu_h100.json). On Blackwell assumed."""
MISALIGNED_TF32 = 0.75
"""The same in TF32: assumed, the middle of no loss and half.

The instruction that copies to shared memory takes 4, 8 or 16 bytes (PTX, cp.async). It can copy
single elements of four bytes, and none of two."""
HOPPER = 90
"""Compute capability of Hopper."""

COMPILED_SHARE = 0.5
"""Bytes that one fused kernel moves, as a share of those of a chain of eager element-wise kernels.
Counted in tensors on a block of llama. A norm with its residual moves 5 of 8, SwiGLU 3 of 5, casts
none."""
COMPILED_ROTARY = 4 / 19
"""The same of rotary positions: one kernel in each direction reads and writes them once."""

COMPILED_LOSS = 3 / 8
"""The same of log_softmax in both directions, with nll_loss and casts in it.

Logits are read once in each direction, and their gradient is written once. Where products give them
two bytes, log_softmax in float32 has half of this."""

COMPOSITE_NORM = 58 / 7
"""Bytes of a composite RMSNorm over those of one kernel, which torch.compile makes of it.

Counted on single calls in float32, in tensors of two bytes. Forward: cast 3, square 4, mean 2,
product 4, cast 3, weight 2; one kernel moves 2. Backward: weight 6, casts 6, product 12, mean and
square 16; one kernel moves 5."""

WIDTH = 128
"""Columns of the heads to which rates of attention belong."""

SINGLY = 2.3
"""Elements that a multiprocessor takes one by one in a nanosecond.

Measured are 1.9 to 3.0 of six kernels on an H100, and 2.1 and 2.5 of two on an H200
(tests/measured/README.md). Both have as many multiprocessors. The memory of the H200 is 1.43 times
as fast, and these kernels at most a tenth: code that addresses each element alone bounds them. On
other generations, whose clocks differ, assumed."""

FILL_NS = 4_000
"""Time beyond its start in which a launch over many tensors fills and empties the device; at most
as long as its work.

Launches of AdamW, 59 to 480 a step, took 5.5 to 7.7 us each beside their bytes. That is with their
start, on an H100 and on an H200 (tests/measured/README.md)."""

SUMS_NBYTES = 8
"""Bytes for each element of a float32 sum: read and written when a gradient is added to it."""


def problems(execution: Execution, device: Device) -> Iterator[str]:
    """Refusals of what `device` cannot execute, a line each with the scenario's key in front.

    Without them it would be timed as something else.
    """
    yield from float8.problems(execution, device)
    if execution.float32_products == "tf32" and not device.tf32:
        yield (
            f"execution.float32_products: expected ieee, or a device with products in TF32, found "
            f"{device.name}"
        )
    if device.attention and execution.attention_kernels not in device.attention:
        yield (
            f"execution.attention_kernels: expected {listed(device.attention)} on {device.name}, "
            f"found {execution.attention_kernels}"
        )


def kernel_ns(kernel: Kernel, device: Device, execution: Execution = EAGER) -> int:
    """The time of `kernel` on `device`, its start included."""
    work = max(_arithmetic_s(kernel, device, execution), _memory_s(kernel, device, execution))
    cast = float8.cast_nbytes(kernel, execution)
    if cast:
        work += cast / (device.memory_bandwidth * device.memory_efficiency)
    moved = ceil(work * 1e9)
    started = device.kernel * (1 + more_kernels(kernel, execution))
    return max(1, moved + min(moved, FILL_NS * kernel.launches) + started)


def more_kernels(kernel: Kernel, execution: Execution) -> int:
    """The number of launches for which `kernel` stands, less one."""
    return max(0, kernel.launches - 1) + float8.cast_kernels(kernel, execution)


def _memory_s(kernel: Kernel, device: Device, execution: Execution) -> float:
    plain = device.memory_bandwidth * device.memory_efficiency
    moved = _moved_plainly(kernel, execution)
    nbytes = kernel.nbytes if moved is None else kernel.nbytes * moved
    rate = device.memory_bandwidth * device.elementwise_efficiency if moved is None else plain
    if not is_singly(kernel, device, execution):
        return nbytes / rate
    slow = kernel.singly / (SINGLY * 1e9 * device.num_sms * device.clocks)
    if kernel.operator in STREAMS:  # all of its elements are
        return max(nbytes / rate, slow)
    # each is read and written once
    apart = min(nbytes, 2 * DTYPE_NBYTES[kernel.dtype] * kernel.singly)
    return (nbytes - apart) / rate + max(apart / rate, slow)


def is_singly(kernel: Kernel, device: Device, execution: Execution = EAGER) -> bool:
    """True where a GPU takes elements of `kernel` one by one; a fused kernel does not."""
    fused = bool(execution.compile) and kernel.operator not in STREAMS - CASTS
    return bool(kernel.singly) and device.num_sms > 1 and not fused


def _moved_plainly(kernel: Kernel, execution: Execution) -> float | None:
    """The bytes that a kernel moves in plain contiguous memory over those of the Program.

    None for a chain of element-wise kernels that is not fused.
    """
    if kernel.operator == NORM_STEP and execution.compile:
        return COMPILED_SHARE / COMPOSITE_NORM
    if kernel.operator == ACCUMULATE and execution.accumulation == "fp32":
        of = DTYPE_NBYTES[kernel.dtype]
        return (of + SUMS_NBYTES) / (3 * of)
    widened = kernel.dtype == "float32" and not execution.wide_products
    if kernel.operator == "log_softmax" and execution.compiles_loss:
        return COMPILED_LOSS / (2 if widened else 1)
    if kernel.shape or kernel.operator in STREAMS:
        return 1.0
    if not execution.compile:
        return None
    if kernel.operator == "softmax" and not widened:
        return 1.0  # it does what scale, mask and casts do besides
    return COMPILED_ROTARY if kernel.operator == "rotary" else COMPILED_SHARE


def _arithmetic_s(kernel: Kernel, device: Device, execution: Execution) -> float:
    alone = device.products_alone if execution.products == "alone" else 1.0
    if is_attention(kernel.operator) and device.attention and kernel.shape:
        return _attention_s(kernel, device, execution.attention_kernels) * alone
    if kernel.shape and not is_attention(kernel.operator):
        dtype = multiplied_in(kernel, execution)
        seconds = product_s(kernel.shape, device, dtype, transposed=kernel.transposed)
        if is_padded(kernel, dtype, execution):
            seconds = min(seconds, _padded_s(kernel, device, dtype))
        return seconds * alone / (float8.RECIPES[execution.recipe].rate if dtype == "float8" else 1)
    # dtypes without a rate, as integers, have none
    return kernel.flops / _rate(device, kernel.dtype) if kernel.flops else 0.0


def multiplied_in(kernel: Kernel, execution: Execution) -> str:
    """The dtype in which a product's factors are multiplied: "float8", "tf32" or the kernel's."""
    if float8.in_eight_bits(kernel, execution):
        return "float8"
    is_tf32 = kernel.dtype == "float32" and execution.float32_products == "tf32"
    return "tf32" if is_tf32 else kernel.dtype


def _rate(device: Device, dtype: str) -> float:
    """The rate that large products of `dtype` approach, in FLOP/s."""
    return device.peak_flops(dtype) * device.efficiency(dtype) * device.clocks


def is_misaligned(shape: tuple[int, ...], dtype: str, *, transposed: bool = False) -> bool:
    """True where a contiguous dimension of a factor or of the result is no multiple of 16 bytes.

    That is never the number of tokens: they are rows of a linear's input and of its output, and
    its weight's gradient sums over them.
    """
    _, m, n, k = shape
    return dtype in ALIGNED and any(size % ALIGNED[dtype] for size in (n, m if transposed else k))


def product_s(
    shape: tuple[int, ...], device: Device, dtype: str, *, transposed: bool = False
) -> float:
    """Seconds of a `shape` of (products, m, n, k): the waves of the best tile, times the time of a
    tile.

    The first factor is contiguous along m where `transposed`, else along k.
    """
    count, m, n, k = shape
    rate, sms = _rate(device, dtype), device.num_sms
    if sms == 1:
        return 2 * count * m * n * k / rate
    if is_misaligned(shape, dtype, transposed=transposed):
        is_newer = device.runtime is not None and device.runtime.capability >= HOPPER
        narrow = MISALIGNED_ON_HOPPER if is_newer else MISALIGNED
        rate *= MISALIGNED_TF32 if dtype == "tf32" else narrow
    rows, columns, relative = _tile(shape, device)
    waves = _waves(shape, rows, columns, sms=sms, wave_cost=device.wave_cost)
    steps = k + device.matmul_prologue * _share_of_prologue(dtype, device)
    return waves * 2 * rows * columns * steps * sms / (rate * relative)


def _share_of_prologue(dtype: str, device: Device) -> float:
    """Steps of k in a tile's start and end, over those of products of two bytes.

    They move bytes and multiply nothing: where a step takes longer for its bytes, they are fewer.
    float32 without tensor cores has an eighth of them on an A100. TF32 and 8 bits have all, as
    their rates go by their bytes.
    """
    if dtype != "float32":
        return 1.0
    narrow = max(device.peak_flops("float16"), device.peak_flops("bfloat16"))
    return 2 * device.peak_flops(dtype) / narrow


def is_padded(kernel: Kernel, dtype: str, execution: Execution) -> bool:
    """True where torch.compile pads the factors of a misaligned product to whole units of 16 bytes
    (shape_padding in torch/_inductor/config.py)."""
    compiled = execution.compiles_loss if kernel.operator == HEAD else execution.compile
    return bool(compiled) and is_misaligned(kernel.shape, dtype, transposed=kernel.transposed)


def _padded_s(kernel: Kernel, device: Device, dtype: str) -> float:
    """Seconds of a product of padded factors, and of copies of these."""
    count, *sides = kernel.shape
    unit = ALIGNED[dtype]
    padded = (count, *(-(-side // unit) * unit for side in sides))
    copied = kernel.nbytes / (device.memory_bandwidth * device.memory_efficiency)
    return product_s(padded, device, dtype, transposed=kernel.transposed) + copied


def _tile(shape: tuple[int, ...], device: Device) -> tuple[int, int, float]:
    """The fastest tile on the multiprocessors for which the library chooses."""
    sms = device.tiled_for or device.num_sms

    def time(tile: tuple[int, int, float]) -> float:
        rows, columns, relative = tile
        waves = _waves(shape, rows, columns, sms=sms, wave_cost=device.wave_cost)
        return waves * rows * columns / relative

    return min(TILES, key=time)


def _waves(
    shape: tuple[int, ...], rows: int, columns: int, *, sms: int, wave_cost: float
) -> float:
    """Waves of tiles, with the lost share of the last one's idle part."""
    count, m, n, _ = shape
    waves = count * -(-m // rows) * -(-n // columns) / sms
    return waves + wave_cost * (ceil(waves) - waves)


def _attention_s(kernel: Kernel, device: Device, attention: str) -> float:
    """Seconds of fused attention: its FLOPs, half of all where it is causal, at a rate that grows
    with the length. No rate is above the peak of its dtype."""
    keys, width = kernel.shape[2:]
    is_backward = kernel.operator.endswith("backward")
    rates = device.attention[attention]
    best = min(rates.rate, device.peak_flops(kernel.dtype)) * device.clocks
    rate = best * keys / (keys + rates.half_length)
    # what narrow heads lose, exponentials of scores that are as many, backward loses in proportion
    narrow = 1 + (1 / rates.narrow - 1) * max(0.0, WIDTH / width - 1)
    return kernel.flops * narrow / (rate * (rates.backward if is_backward else 1.0))
