"""scaled_dot_product_attention: its choice of a kernel, the memory of the fused ones, and the
composite call by call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from zsim.autograd.aten.building_blocks import (
    after_dropout,
    attention_flops,
    batched_matmul,
    clone,
    constant,
    view,
)
from zsim.autograd.aten.call import Call, Sizes
from zsim.models.operators import Operator
from zsim.models.spec import ModelSpec
from zsim.models.training_options import DTYPE_NBYTES, Device, Precision

FLASH_ROWS, EFFICIENT_ROWS = 128, 32
"""Multiples to which backward of CUDA's fused kernels rounds the number of queries in its scratch.
"""
MAX_FLASH_HEAD = 256
FLASH_WIDTHS = 8
"""Flash attention on CUDA takes heads of a multiple of so many features; torch pads others, and
cuts the output (aten/src/ATen/native/transformers/attention.cpp: pad_last_dim<8, false>,
post_process_flash_output)."""
LOADED_NBYTES = 16
"""Bytes per load of memory-efficient attention from compute capability 8.0 on. Heads must be a
multiple: 4 features in float32, 8 in two bytes (cuda/sdp_utils.cpp:
check_head_dim_size_mem_efficient, minimum_gemm_alignment)."""


def efficient_takes(width: int, *, nbytes: int) -> bool:
    """True if memory-efficient attention has a kernel for heads of `width` features; each has
    `nbytes`."""
    return width * nbytes % LOADED_NBYTES == 0


def sdpa_kernel(op: Operator, sizes: Sizes) -> str:
    """The kernel that scaled_dot_product_attention takes: "flash", "efficient" or "math"; or
    "explicit" where the model does not call it.

    On a CPU flash takes everything but dropout. On CUDA it takes two-byte elements and heads of at
    most 256 features. Memory-efficient attention takes the rest that it has a kernel for, unless
    heads are grouped. cuDNN's kernel keeps as much as flash. Source: torch 2.13,
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    if op.implementation != "sdpa" or sizes.device == "cpu":
        return (
            op.implementation if op.implementation != "sdpa" else "math" if op.dropout else "flash"
        )
    if sizes.nbytes == 2 and op.head_dim <= MAX_FLASH_HEAD:
        return "flash"
    fits = op.num_heads == op.num_kv_heads and efficient_takes(op.head_dim, nbytes=sizes.nbytes)
    return "efficient" if fits else "math"


def without_kernel(op: Operator, *, device: Device, nbytes: int) -> str:
    """The reason for which torch has no kernel for this attention, or "". Elements have `nbytes`.
    """
    implementation = op.implementation
    if implementation == "efficient" and device == "cpu":
        return "memory-efficient attention has no kernel on a CPU"
    if implementation == "efficient" and op.num_heads != op.num_kv_heads:
        return "memory-efficient attention has no kernel for grouped keys and values"
    if implementation == "efficient" and not efficient_takes(op.head_dim, nbytes=nbytes):
        return (
            f"memory-efficient attention has no kernel for heads of {op.head_dim}, which is no "
            f"multiple of {LOADED_NBYTES // nbytes}"
        )
    if implementation == "flash" and device == "cuda" and nbytes == 4:
        return "flash attention has no kernel for float32 on CUDA"
    if implementation == "flash" and device == "cuda" and op.head_dim > MAX_FLASH_HEAD:
        return f"flash attention has no kernel for heads of {op.head_dim}, {MAX_FLASH_HEAD} at most"
    return ""


def kernel_problem(model: ModelSpec, precision: Precision, *, device: Device) -> str:
    """The message where torch has no kernel on `device` for an attention of `model`, or ""."""
    nbytes = DTYPE_NBYTES[precision.products]
    attentions = (
        op for module in model.modules for op in module.operators if op.kind == "attention"
    )
    reason = next(
        filter(None, (without_kernel(op, device=device, nbytes=nbytes) for op in attentions)), ""
    )
    return f'model.attention: {reason}; "sdpa" takes a kernel that there is' if reason else ""


def fused(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """One call, which keeps the logarithm of each row's sum instead of the probabilities; more
    where heads are padded for it."""
    if sizes.device == "cuda" and sdpa_kernel(op, sizes) == "flash" and op.head_dim % FLASH_WIDTHS:
        yield from _padded(op, sizes)
    else:
        yield _fused(op, sizes)


def _padded(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """Flash attention of copies with zeros beside each head. It keeps these and its wide output, of
    which the operator's is a part.

    A padded copy lies by head, and so do the kernel's output and gradients; made flat again these
    are copied once more.
    """
    name, long = op.output, sizes.batch.sequence_length > 1
    wide = replace(op, head_dim=rounded_up(op.head_dim, FLASH_WIDTHS), output=f"{name}.wide")
    column = sizes.nbytes * sizes.tokens
    views = dict(zip(op.inputs, _views(op), strict=True))
    for source in (*op.inputs[1:], op.inputs[0]) if op.fused_inputs else op.inputs:
        if source != views[source]:
            heads = op.num_heads if source == op.inputs[0] else op.num_kv_heads
            yield view(
                source, views[source], column * heads * op.head_dim,
                copies_gradient=long and heads > 1,
            )
    padded = tuple(f"{name}.{part}.wide" for part in ("query", "key", "value"))
    for source, copy in zip(op.inputs, padded, strict=True):
        heads = op.num_heads if source == op.inputs[0] else op.num_kv_heads
        moved = column * heads * (op.head_dim + wide.head_dim)
        yield Call(
            operator="pad",
            inputs=(views[source],),
            output=copy,
            nbytes=column * heads * wide.head_dim,
            gradients=(views[source],),
            moved=moved,
            backward_moved=moved,
        )
    yield _fused(replace(wide, inputs=padded), sizes)
    numel, cut = column * op.num_heads * op.head_dim, f"{name}.cut"
    yield view(wide.output, cut, numel, copies_gradient=True, drops=padded[::-1])
    yield clone(cut, name, numel, copies=op.num_heads > 1, drops=(wide.output,))


def _views(op: Operator) -> tuple[str, ...]:
    """Queries, keys and values by head: what the operator reads where that lies so already, else
    views of it."""
    parts = tuple(f"{op.output}.{part}" for part in ("query", "key", "value"))
    return (*op.inputs[: op.num_by_head], *parts[op.num_by_head :])


def _fused(op: Operator, sizes: Sizes) -> Call:
    nbytes, flops = (
        sizes.nbytes * sizes.tokens * op.num_heads * op.head_dim, attention_flops(op, sizes),
    )
    keeps, scratch = _kept_and_scratch(op, sizes)
    query, key, value = op.inputs
    return Call(
        operator="attention", inputs=op.inputs, output=op.output, nbytes=nbytes,
        saves=(key, query, value, op.output),  # as torch's node names and lets go of them
        keeps=keeps, backward_scratch=scratch, gradients=op.inputs, joint=True,
        flops=flops // 2 if op.causal else flops,
        backward_flops=5 * flops // 4 if op.causal else 5 * flops // 2, moved=4 * nbytes,
        backward_moved=8 * nbytes,
        shape=(
            sizes.batch.micro_batch * op.num_heads, sizes.batch.sequence_length,
            sizes.batch.sequence_length, op.head_dim,
        ),
    )


def _kept_and_scratch(
    op: Operator, sizes: Sizes
) -> tuple[tuple[tuple[str, int], ...], tuple[int, ...]]:
    """Tensors that a fused forward keeps besides its inputs and output, and its backward's scratch.

    CUDA's are read from torch's sources (flash_attn/flash_api.cpp, attention.cu), not confirmed on
    a GPU. Flash rounds rows up to 128 in backward, accumulates the queries' gradient in float32,
    and expands the gradients of grouped heads. Memory-efficient attention rounds rows up to 32.
    Both keep two numbers of the random state.
    """
    rows, sequences = sizes.batch.sequence_length, sizes.batch.micro_batch
    name, row_nbytes = f"{op.output}.logsumexp", 4 * sequences * op.num_heads
    if sizes.device == "cpu":
        return ((name, row_nbytes * rows),), ()
    if sdpa_kernel(op, sizes) == "efficient":
        rounded = rounded_up(rows, EFFICIENT_ROWS)
        return (
            (name, row_nbytes * rounded), (f"{op.output}.seed", 8), (f"{op.output}.offset", 8)
        ), (row_nbytes * rounded,)
    rounded = rounded_up(rows, FLASH_ROWS)
    queries = row_nbytes * rounded * flash_columns(op.head_dim)
    expanded = sizes.nbytes * sizes.tokens * op.num_heads * op.head_dim
    grouped = (expanded, expanded) if op.num_kv_heads != op.num_heads else ()
    kept = (
        (name, row_nbytes * rows), (f"{op.output}.random_state", 16), (f"{op.output}.unused", 8),
    )
    return kept, (row_nbytes * rounded, queries, *grouped)


def flash_columns(width: int) -> int:
    """A head's width as flash attention's backward rounds it."""
    return rounded_up(width, 32 if width <= 128 else 64)


def rounded_up(number: int, multiple: int) -> int:
    """The least multiple that is no less than `number`."""
    return -(-number // multiple) * multiple


def math(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """torch's composite: in float32, with √√d taken from queries and keys apart, and an additive
    mask.

    What the composite's frame holds, scaled queries and mask, lives until it returns.
    """
    name, sequences, length = op.output, sizes.batch.micro_batch, sizes.batch.sequence_length
    grouped, long, casts = op.num_kv_heads != op.num_heads, length > 1, sizes.nbytes == 2
    split = long and op.num_heads > 1
    copies = split and sequences > 1
    size = sizes.nbytes * sizes.tokens * op.num_heads * op.head_dim
    wide = replace(sizes, nbytes=4)
    nbytes, shared = 4 * size // sizes.nbytes, size // op.num_heads * op.num_kv_heads
    heads = {part: f"{name}.{part}" for part in ("query", "key", "value")}
    views = list(zip(op.inputs, heads.items(), strict=True))
    for source, (part, own) in (*views[1:], views[0]) if op.fused_inputs else views:
        queries = part == "query"
        turns = part == "key" and not grouped  # its gradient comes as that of what was transposed
        turned = (source,) if turns and long and sequences > 1 else ()
        copied = (
            long
            and (op.num_heads if queries else op.num_kv_heads) > 1
            and not turns
            and source in op.inputs[op.num_by_head :]
        )
        yield view(source, own, size if queries else shared, copies_gradient=copied, turns=turned)
    if casts:
        for part, own in heads.items():
            heads[part] = f"{own}.float"
            numel = nbytes if part == "query" else 2 * shared
            yield Call(
                operator="cast", inputs=(own,), output=heads[part], nbytes=numel, gradients=(own,)
            )
    yield _scaled(heads["query"], f"{name}.scaled", nbytes)
    if op.causal:
        yield constant(f"{name}.ones", length * length)
        yield constant(f"{name}.mask", length * length, drops=(f"{name}.ones",))
        yield constant(f"{name}.infinity", 4)
        yield constant(f"{name}.zero", 4)
        yield constant(
            f"{name}.bias", 4 * length * length,
            drops=tuple(f"{name}.{of}" for of in ("infinity", "zero", "mask")),
        )
    if grouped:
        for part in ("key", "value"):
            repeated = f"{heads[part]}.repeated"
            yield Call(
                operator="repeat", inputs=(heads[part],), output=repeated, nbytes=nbytes,
                gradients=(heads[part],),
            )
            heads[part] = repeated
    yield _scaled(heads["key"], f"{name}.keys", nbytes)
    yield clone(f"{name}.scaled", f"{name}.q", nbytes, copies=copies)
    yield clone(f"{name}.keys", f"{name}.k", nbytes, copies=copies and not grouped)
    yield from _weights(op, wide)
    if casts:  # the composite returns the probabilities too, which nobody takes
        yield constant(f"{name}.returned", sizes.nbytes * sizes.tokens * length * op.num_heads)
    yield clone(heads["value"], f"{name}.v", nbytes, copies=copies and not grouped)
    product, weights = (
        f"{name}.product", f"{name}.dropped" if op.dropout else f"{name}.probabilities",
    )
    weighted = batched_matmul("weighted_values", (weights, f"{name}.v"), product, nbytes, op, wide)
    held = [f"{name}.scaled", *([f"{name}.bias"] if op.causal else [])]
    held += [f"{name}.{part}.float" for part in ("query", "key", "value") if casts]
    held += [heads[part] for part in ("key", "value") if grouped]
    held += [weights, *([f"{name}.returned"] if casts else [])]
    if not casts:
        yield replace(weighted, drops=(f"{name}.v", *held))
        flat: dict[str, Any] = {"gradients" if copies else "passes": (product,)}
    else:
        yield replace(weighted, drops=(f"{name}.v",))
        yield view(product, f"{name}.heads", nbytes, copies_gradient=copies)
        narrow = f"{name}.narrow"
        drops = (product, f"{name}.heads", *held)
        yield Call(
            operator="cast", inputs=(f"{name}.heads",), output=narrow, nbytes=size,
            gradients=(f"{name}.heads",), drops=drops,
        )
        product, flat = narrow, {"passes": (narrow,)}
    yield Call(
        operator="clone", inputs=(product,), output=name, nbytes=size, view=not split,
        drops=(product,), **flat,
    )


def _scaled(source: str, output: str, nbytes: int) -> Call:
    return Call(
        operator="scale", inputs=(source,), output=output, nbytes=nbytes, gradients=(source,)
    )


def _weights(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """The scores of scaled queries and keys, the mask added, and their softmax, which autograd
    keeps."""
    name = op.output
    nbytes = sizes.nbytes * sizes.tokens * sizes.batch.sequence_length * op.num_heads
    raw, masked, probabilities = (f"{name}.{part}" for part in ("raw", "masked", "probabilities"))
    scores = batched_matmul("scores", (f"{name}.q", f"{name}.k"), raw, nbytes, op, sizes)
    yield replace(scores, drops=(*scores.drops, f"{name}.keys"))
    if op.causal:
        yield Call(
            operator="mask", inputs=(raw,), output=masked, nbytes=nbytes, passes=(raw,),
            drops=(raw,), moved=2 * nbytes,
        )
    source = masked if op.causal else raw
    yield Call(
        operator="softmax",
        inputs=(source,),
        output=probabilities,
        nbytes=nbytes,
        saves=(probabilities,),
        gradients=(source,),
        drops=(source,),
        moved=2 * nbytes,
        backward_moved=3 * nbytes,
    )
    if op.dropout:
        yield from after_dropout(
            probabilities, f"{name}.dropped", nbytes, sizes, drops=(probabilities,)
        )
