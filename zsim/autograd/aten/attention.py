"""The aten calls of rotary positions and of attention, one by one, as the real modules make them.
Seen with torch 2.13."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from zsim.autograd.aten import sdpa
from zsim.autograd.aten.building_blocks import (
    after_dropout,
    batched_matmul,
    clone,
    constant,
    gradient_laid_out,
    laid_out,
    view,
)
from zsim.autograd.aten.call import Call, Sizes
from zsim.ir.ops import CAST_SCORES, MASK_SCORES, SCALE_SCORES
from zsim.models.operators import Operator

ROTARY_FORWARD, ROTARY_BACKWARD = 9, 10
"""Tensors as large as the queries that rotary positions read and write.

Four products of halves move 4, in either direction. A difference and a sum move 3, both halves made
one tensor 2. In backward a negation moves 1, the sums of both halves' gradients 3, and made one
tensor 2."""


def rotary(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """(left·cos − right·sin, right·cos + left·sin): four half-width products; the two tables are
    kept for backward."""
    (x,), name = op.inputs, op.output
    nbytes = sizes.nbytes * sizes.tokens * op.num_heads * op.head_dim
    left, right, cos, sin = (f"{name}.{part}" for part in ("left", "right", "cos", "sin"))
    yield from _tables(op, sizes)
    yield view(x, left, nbytes // 2, also=(right,), copies_gradient=True)

    def product(half: str, table: str) -> Call:
        return Call(
            operator="multiply",
            inputs=(half,),
            output=f"{half}·{table.removeprefix(f'{name}.')}",
            nbytes=nbytes // 2,
            saves=(table,),
            gradients=(half,),
        )

    def joined(minus: bool, first: Call, second: Call) -> Call:
        return Call(
            operator="subtract" if minus else "add",
            inputs=(first.output, second.output),
            output=f"{name}.{'real' if minus else 'imaginary'}",
            nbytes=nbytes // 2,
            gradients=(second.output,) if minus else (),
            passes=(first.output,) if minus else (first.output, second.output),
            drops=(first.output, second.output),
        )

    parts = []
    for minus, (first, second) in ((True, (left, right)), (False, (right, left))):
        pair = product(first, cos), product(second, sin)
        parts.append(joined(minus, *pair))
        yield from (*pair, parts[-1])
    halves = tuple(part.output for part in parts)
    yield Call(  # of all calls, in forward and in backward, the work is here
        operator="rotary",
        inputs=halves,
        output=name,
        nbytes=nbytes,
        passes=halves,
        drops=halves,
        moved=ROTARY_FORWARD * nbytes,
        backward_moved=ROTARY_BACKWARD * nbytes,
        # four products of halves, and in backward a negation
        singly=2 * nbytes // sizes.nbytes,
        backward_singly=5 * nbytes // (2 * sizes.nbytes),
    )


def _tables(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """base^(−i/half) times the place, in float32, and of it cos and sin in the dtype of the values.
    """
    name, half, length = op.output, op.head_dim // 2, sizes.batch.sequence_length
    ways = ("arange", "negative", "exponents", "rates")
    for before, way in zip((None, *ways), ways, strict=False):
        yield constant(f"{name}.{way}", 4 * half, drops=(f"{name}.{before}",) if before else ())
    yield constant(f"{name}.places", 4 * length)
    yield constant(f"{name}.angles", 4 * length * half, drops=(f"{name}.places",))
    for table in (f"{name}.cos", f"{name}.sin"):
        if sizes.nbytes == 4:
            yield constant(table, 4 * length * half)
        else:
            yield constant(f"{table}.float", 4 * length * half)
            yield constant(table, sizes.nbytes * length * half, drops=(f"{table}.float",))


def attention(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """One fused call, or softmax(q·kᵀ/√d + mask)·v call by call, as the module's own code or as
    torch's composite."""
    kernel = sdpa.sdpa_kernel(op, sizes)
    yield from {"explicit": _explicit, "math": sdpa.math}.get(kernel, sdpa.fused)(op, sizes)


def _explicit(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """Heads are views; batched products want batch and heads in one dimension, which copies what
    lies (tokens, heads).

    Grouped keys and values are repeated to as many heads, and those copies are contiguous.
    """
    name, sequences = op.output, sizes.batch.micro_batch
    long, grouped = sizes.batch.sequence_length > 1, op.num_kv_heads != op.num_heads
    nbytes = sizes.nbytes * sizes.tokens * op.num_heads * op.head_dim
    split = long and op.num_heads > 1
    copies = split and sequences > 1
    query, key, value = (f"{name}.{part}" for part in ("query", "key", "value"))
    yield view(
        op.inputs[0], query, nbytes, copies_gradient=split,
        **gradient_laid_out(sizes, nbytes, copies=split),
    )
    for source, heads, turns in ((op.inputs[1], key, True), (op.inputs[2], value, False)):
        turned = (source,) if turns and not grouped and long and sequences > 1 else ()
        shared = nbytes // op.num_heads * op.num_kv_heads
        copied = long and op.num_kv_heads > 1 and (grouped or not turns)
        yield view(
            source, heads, shared, copies_gradient=copied, turns=turned,
            **gradient_laid_out(sizes, shared, copies=copied or bool(turned)),
        )
    if grouped:
        for heads in (key, value):
            repeated = f"{heads}.repeated"
            yield Call(
                operator="repeat", inputs=(heads,), output=repeated, nbytes=nbytes,
                gradients=(heads,), **laid_out(sizes, nbytes), backward_moved=shared + nbytes,
            )
        key, value = f"{key}.repeated", f"{value}.repeated"
    made = laid_out(sizes, nbytes, copies=copies)
    others = laid_out(sizes, nbytes, copies=copies and not grouped)
    yield clone(query, f"{name}.q", nbytes, copies=copies, **made)
    yield clone(key, f"{name}.k", nbytes, copies=copies and not grouped, **others)
    yield from _probabilities(op, sizes)
    yield clone(value, f"{name}.v", nbytes, copies=copies and not grouped, **others)
    product = f"{name}.product"
    weights = f"{name}.dropped" if op.dropout else f"{name}.probabilities"
    yield batched_matmul("weighted_values", (weights, f"{name}.v"), product, nbytes, op, sizes)
    flat: dict[str, Any] = {"gradients" if copies else "passes": (product,)}
    yield Call(
        operator="clone", inputs=(product,), output=name, nbytes=nbytes, view=not split,
        drops=(product,), **flat, **laid_out(sizes, nbytes, copies=split),
        **gradient_laid_out(sizes, nbytes, copies=copies),
    )


def _probabilities(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """Scaled scores, masked where attention is causal, and their softmax, of which autograd keeps
    mask and result."""
    name, length = op.output, sizes.batch.sequence_length
    nbytes = sizes.nbytes * sizes.tokens * length * op.num_heads
    raw, scores, masked, probabilities = (
        f"{name}.{part}" for part in ("raw", "scores", "masked", "probabilities")
    )
    yield batched_matmul("scores", (f"{name}.q", f"{name}.k"), raw, nbytes, op, sizes)

    def step(
        operator: str, source: str, output: str, saves: tuple[str, ...] = (),
        drops: tuple[str, ...] = (), moves: int = 2, nbytes: int = nbytes,
    ) -> Call:
        return Call(
            operator=operator,
            inputs=(source,),
            output=output,
            nbytes=nbytes,
            saves=saves,
            gradients=(source,),
            drops=drops,
            moved=moves * nbytes,
            backward_moved=3 * nbytes if operator == "softmax" else moves * nbytes,
            # on a GPU torch multiplies the gradient by the result in a kernel of its own
            backward_first=3 * nbytes if (operator, sizes.device) == ("softmax", "cuda") else 0,
        )

    yield step(SCALE_SCORES, raw, scores, drops=(raw,))
    if op.causal:
        yield constant(f"{name}.ones", length * length)
        yield constant(f"{name}.mask", length * length, drops=(f"{name}.ones",))
        numel = nbytes // sizes.nbytes
        yield replace(  # masked_fill copies, and fills the copy by a mask that it broadcasts
            step(MASK_SCORES, scores, masked, saves=(f"{name}.mask",), drops=(scores,), moves=4),
            singly=numel, backward_singly=numel,
        )
    source = masked if op.causal else scores
    if sizes.softmax_nbytes in (0, sizes.nbytes):
        yield step("softmax", source, probabilities, saves=(probabilities,))
        if op.dropout:
            dropped = f"{name}.dropped"
            yield from after_dropout(probabilities, dropped, nbytes, sizes, drops=(probabilities,))
        return
    numel, softmax = nbytes // sizes.nbytes, f"{name}.softmax"
    wide = numel * sizes.softmax_nbytes
    cast = nbytes + wide
    yield replace(
        step(CAST_SCORES, source, f"{name}.wide", drops=(source,) if op.causal else ()),
        nbytes=wide, moved=cast, backward_moved=cast, singly=numel,
    )
    yield replace(
        step("softmax", f"{name}.wide", softmax, (softmax,), (f"{name}.wide",), nbytes=wide),
        dtype="float32",
    )
    weights = probabilities
    if op.dropout:
        kept = replace(sizes, nbytes=sizes.softmax_nbytes)
        yield from after_dropout(softmax, f"{softmax}.dropped", wide, kept, drops=(softmax,))
        softmax, weights = f"{softmax}.dropped", f"{name}.dropped"
    yield replace(
        step(CAST_SCORES, softmax, weights, drops=(softmax,)), moved=cast, backward_moved=cast,
        backward_singly=numel,
    )
