"""The aten calls of the modules that transformers writes in Python: norms, rotary positions,
SwiGLU, the loss.

Seen with transformers 5 on torch 2.13. These are compositions in the modules' own code, so that a
GPU runs the same calls. `drops` follow Python: a name that is assigned anew lets go at once, the
locals of a function when it returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from zsim.autograd.aten.building_blocks import clone, constant, view
from zsim.autograd.aten.call import Call, Sizes
from zsim.autograd.aten.losses import log_softmax_tensors
from zsim.ir.ops import CAST_LOGITS, NORM_STEP
from zsim.models.operators import Operator
from zsim.models.training_options import DTYPE_NBYTES

WIDE_NBYTES = DTYPE_NBYTES["float32"]
INDEX_NBYTES = DTYPE_NBYTES["int64"]


def _step(
    inputs: tuple[str, ...], output: str, nbytes: int, moved: int, backward_moved: int, **more: Any
) -> Call:
    """One call of a norm: bytes that it makes, and that it and its backward read and write."""
    way: dict[str, Any] = {} if "passes" in more else {"gradients": inputs}
    how = {"moved": moved, "backward_moved": backward_moved}
    return Call(
        operator=NORM_STEP, inputs=inputs, output=output, nbytes=nbytes, **(how | way | more)
    )


def _normalised(
    op: Operator, *, rows: int, wide: int, nbytes: int, ended: tuple[str, ...] = ()
) -> Iterator[Call]:
    """x·rsqrt(mean(x²) + ε) in float32, after a cast where x is narrower. `ended`: values that go
    before the rsqrt."""
    (x,), name, casts = op.inputs, op.output, nbytes < wide
    source = f"{name}.float" if casts else x
    square, mean, shifted, rstd = (
        f"{name}.{part}" for part in ("square", "mean", "shifted", "rstd")
    )
    if casts:
        yield _step((x,), source, wide, nbytes + wide, nbytes + wide)
    yield _step(
        (source,), square, wide, 2 * wide, 7 * wide, saves=(source,), backward_scratch=(wide, wide)
    )
    yield _step((square,), mean, rows, wide + rows, wide + rows, drops=(square,))
    yield _step((mean,), shifted, rows, 2 * rows, 0, passes=(mean,), drops=ended)
    yield _step(
        (shifted,), rstd, rows, 2 * rows, 8 * rows, saves=(rstd,), backward_scratch=(rows, rows),
        drops=(shifted,),
    )
    yield _step(
        (source, rstd),
        f"{name}.normalised",
        wide,
        2 * wide + rows,
        6 * wide + 2 * rows,
        saves=(source, rstd),
        summed=((rstd, (wide,)),),
        drops=(rstd, source) if casts else (rstd,),
    )


def upcast_norm(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """LlamaRMSNorm: weight · (x·rsqrt(mean(x²) + ε)) with all in float32 but the last product;
    with `num_heads` of each head."""
    name, rows = op.output, WIDE_NBYTES * sizes.tokens * (op.num_heads or 1)
    wide = rows * op.out_features
    nbytes = wide // WIDE_NBYTES * sizes.nbytes
    casts, mean, normalised = nbytes < wide, f"{name}.mean", f"{name}.normalised"
    yield from _normalised(op, rows=rows, wide=wide, nbytes=nbytes)
    factor = f"{name}.factor" if casts else normalised
    if casts:
        yield _step((normalised,), factor, nbytes, wide + nbytes, wide + nbytes)
    yield _step(
        (factor,),
        name,
        nbytes,
        2 * nbytes,
        6 * nbytes,
        saves=(factor,),
        gradients=(op.weight, factor),
        summed=((op.weight, (nbytes,)),),
        parameters=(op.weight,),
        drops=(factor, normalised, mean) if casts else (normalised, mean),
    )


def shifted_norm(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """GemmaRMSNorm: (1 + weight)·(x·rsqrt(mean(x²) + ε)), all in float32."""
    name, row, rows = op.output, WIDE_NBYTES * op.out_features, WIDE_NBYTES * sizes.tokens
    wide = rows * op.out_features
    nbytes = wide // WIDE_NBYTES * sizes.nbytes
    casts = nbytes < wide
    weight, factor, normalised = (f"{name}.{part}" for part in ("weight", "factor", "normalised"))
    yield from _normalised(op, rows=rows, wide=wide, nbytes=nbytes, ended=(f"{name}.mean",))
    if casts:
        yield _step(
            (), weight, row, 2 * row, 2 * row, gradients=(op.weight,), parameters=(op.weight,)
        )
        yield _step((weight,), factor, row, 2 * row, 0, passes=(weight,), drops=(weight,))
        factors: dict[str, Any] = {"crossed": True, "summed": ((factor, (wide,)),)}
    else:  # the sum of a number and the weight passes its gradient on
        yield constant(factor, row)
        factors = {
            "weights": (factor,), "parameters": (op.weight,), "gradients": (normalised, op.weight),
            "summed": ((op.weight, (wide,)),),
        }
    product = f"{name}.product" if casts else name
    yield _step(
        (normalised, factor) if casts else (normalised,),
        product,
        wide,
        3 * wide,
        6 * wide,
        saves=(factor, normalised),
        drops=(normalised, factor),
        **factors,
    )
    if casts:
        yield _step((product,), name, nbytes, wide + nbytes, wide + nbytes, drops=(product,))


def scale(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """GemmaTextScaledWordEmbedding: embeddings times one number, a buffer in float32."""
    (x,), name, nbytes = op.inputs, op.output, sizes.nbytes * sizes.tokens * op.out_features
    casts = sizes.nbytes < WIDE_NBYTES
    number = f"{name}.number"
    if casts:
        yield constant(number, sizes.nbytes)
    yield Call(
        operator="multiply",
        inputs=(x,),
        output=name,
        nbytes=nbytes,
        saves=(number,) if casts else (),
        gradients=(x,),
        drops=(number, x) if casts else (x,),
        moved=2 * nbytes,
        backward_moved=2 * nbytes,
    )


def packed_check(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """create_causal_mask looks whether the places of tokens begin anew, as in packed sequences;
    nothing of it stays."""
    name, tokens, sequences = op.output, sizes.tokens, sizes.batch.micro_batch
    yield constant(f"{name}.first", INDEX_NBYTES * sequences)
    yield constant(f"{name}.longer", INDEX_NBYTES * (tokens + sequences))
    yield constant(f"{name}.steps", INDEX_NBYTES * tokens, drops=(f"{name}.longer",))
    yield constant(f"{name}.breaks", tokens)
    yield constant(f"{name}.packed", INDEX_NBYTES * tokens, drops=(f"{name}.breaks",))
    yield constant(f"{name}.none", sequences)
    ended = tuple(f"{name}.{part}" for part in ("none", "all", "first", "steps", "packed"))
    yield constant(f"{name}.all", 1, drops=ended)


def places(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """The places of tokens: a range, and the tokens seen before added to it."""
    nbytes = INDEX_NBYTES * sizes.batch.sequence_length
    yield constant(f"{op.output}.range", nbytes)
    yield constant(f"{op.output}.places", nbytes, drops=(f"{op.output}.range",))


def rotary_tables(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """cos and sin of every place, which all blocks read. The embedding itself is handed on."""
    (x,), name, length = op.inputs, op.output, sizes.batch.sequence_length
    table = WIDE_NBYTES * length * op.head_dim
    yield from places(op, sizes)
    yield from packed_check(op, sizes)
    yield constant(f"{name}.floats", WIDE_NBYTES * length)
    yield constant(f"{name}.angles", table // 2, drops=(f"{name}.floats",))
    yield constant(f"{name}.both", table)
    narrow = sizes.nbytes < WIDE_NBYTES
    ended = [f"{name}.angles", f"{name}.both"]
    for part in ("cos", "sin"):
        made = f"{name}.{part}.float" if narrow else f"{name}.{part}"
        yield constant(f"{made}.plain", table)
        yield constant(
            made, table,
            drops=(f"{made}.plain",) if narrow or part == "cos" else (f"{made}.plain", *ended),
        )
        ended += [made] if narrow else []
    if narrow:
        yield constant(f"{name}.cos", table // WIDE_NBYTES * sizes.nbytes)
        yield constant(f"{name}.sin", table // WIDE_NBYTES * sizes.nbytes, drops=tuple(ended))
    yield view(x, name, sizes.nbytes * sizes.tokens * op.out_features)


def heads(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """Features as heads, which then lie before the tokens: gradients that come in the new order are
    copied back."""
    split = op.num_heads > 1 and sizes.batch.sequence_length > 1
    yield view(
        op.inputs[0], op.output, sizes.nbytes * sizes.tokens * op.num_heads * op.head_dim,
        copies_gradient=split,
    )


def rotate(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """apply_rotary_pos_emb: x·cos + cat(−right, left)·sin, of queries and then of keys; both are
    let go of afterwards."""
    (query, key), key_out = op.inputs, op.output
    yield from _turned(query, f"{key_out}.query", op.num_heads, op, sizes)
    yield from _turned(key, key_out, op.num_kv_heads, op, sizes)


def rotate_part(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """Phi3's apply_rotary_pos_emb: the first `in_features` of each head are turned, and put before
    the rest. Where that is empty, its gradient is as large all the same, and the other's a view."""
    (query, key), key_out = op.inputs, op.output
    rotated = ((query, f"{key_out}.query", op.num_heads), (key, key_out, op.num_kv_heads))
    element = sizes.nbytes * sizes.tokens
    rest = op.head_dim - op.in_features
    for source, name, heads in rotated:
        yield view(
            source, f"{name}.first", element * heads * op.in_features, copies_gradient=rest > 0
        )
        yield view(source, f"{name}.rest", element * heads * rest, copies_gradient=True)
    turns = replace(op, head_dim=op.in_features)
    for _, name, heads in rotated:
        turned, nbytes = f"{name}.turned", element * heads * op.head_dim
        joined = (turned, f"{name}.rest")
        yield from _turned(f"{name}.first", turned, heads, turns, sizes)
        yield Call(
            operator="rotary", inputs=joined, output=name, nbytes=nbytes, passes=joined,
            drops=(turned,), moved=2 * nbytes,
        )


def parts(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """Queries, keys and values as slices of one tensor; backward copies the gradient of each into
    one of the whole."""
    heads = (op.num_heads, op.num_kv_heads, op.num_kv_heads)
    names = (op.output, f"{op.output}.key", f"{op.output}.value")
    for name, count in zip(names, heads, strict=True):
        nbytes = sizes.nbytes * sizes.tokens * count * op.head_dim
        yield view(op.inputs[0], name, nbytes, copies_gradient=True)


def by_token(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """Attention's output where it lies by head, as its queries do, made flat."""
    nbytes = sizes.nbytes * sizes.tokens * op.num_heads * op.head_dim
    split = op.num_heads > 1 and sizes.batch.sequence_length > 1
    made = clone(op.inputs[0], op.output, nbytes, copies=split)
    yield replace(made, moved=2 * nbytes) if split else made


def chunk(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """Both halves of one tensor; backward puts their gradients side by side."""
    nbytes = sizes.nbytes * sizes.tokens * op.out_features
    yield view(
        op.inputs[0], op.output, nbytes, also=(f"{op.output}.other",), copies_gradient=True
    )


def _turned(source: str, name: str, num_heads: int, op: Operator, sizes: Sizes) -> Iterator[Call]:
    nbytes = sizes.nbytes * sizes.tokens * num_heads * op.head_dim
    left, right, minus, half, cosine, sine = (
        f"{name}.{part}" for part in ("left", "right", "minus", "half", "cosine", "sine")
    )
    cos, sin = op.reads

    def call(inputs: tuple[str, ...], output: str, size: int, **more: Any) -> Call:
        return Call(
            operator="rotary", inputs=inputs, output=output, nbytes=size, moved=2 * size,
            backward_moved=2 * size, **more,
        )

    yield call((source,), cosine, nbytes, saves=(cos,), gradients=(source,))
    yield view(source, left, nbytes // 2, copies_gradient=True)
    yield view(source, right, nbytes // 2, copies_gradient=True)
    yield call((right,), minus, nbytes // 2, gradients=(right,))
    yield call((minus, left), half, nbytes, passes=(minus, left), drops=(minus,))
    yield call((half,), sine, nbytes, saves=(sin,), gradients=(half,), drops=(half,))
    yield call((cosine, sine), name, nbytes, passes=(cosine, sine), drops=(cosine, sine))


def silu(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """x·sigmoid(x)."""
    nbytes = sizes.nbytes * sizes.tokens * op.out_features
    yield Call(
        operator="silu",
        inputs=op.inputs,
        output=op.output,
        nbytes=nbytes,
        saves=op.inputs,
        gradients=op.inputs,
        moved=2 * nbytes,
        backward_moved=3 * nbytes,
    )


def multiply(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """A product of two values, each of which is kept for the gradient of the other."""
    nbytes = sizes.nbytes * sizes.tokens * op.out_features
    yield Call(
        operator="multiply",
        inputs=op.inputs,
        output=op.output,
        nbytes=nbytes,
        saves=op.inputs,
        crossed=True,
        gradients=op.inputs,
        moved=3 * nbytes,
        backward_moved=6 * nbytes,
    )


def causal_loss(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """ForCausalLMLoss: logits in float32, labels shifted by one place, mean cross-entropy."""
    logits, name, tokens = op.inputs[0], op.output, sizes.tokens
    nbytes, wide = (size * tokens * op.out_features for size in (sizes.nbytes, WIDE_NBYTES))
    casts = sizes.nbytes < WIDE_NBYTES
    source = f"{name}.logits" if casts else logits
    if casts:
        yield Call(
            operator=CAST_LOGITS,
            inputs=(logits,),
            output=source,
            nbytes=wide,
            gradients=(logits,),
            moved=nbytes + wide,
            backward_moved=nbytes + wide,
            singly=tokens * op.out_features,
        )
    forward, backward = log_softmax_tensors(
        op.out_features, nbytes=WIDE_NBYTES, device=sizes.device
    )
    padded, shifted, log_softmax = (
        f"{name}.{part}" for part in ("padded", "shifted", "log_softmax")
    )
    # of one sequence they lie as they should already
    labels = (padded, shifted) if sizes.batch.micro_batch > 1 else (padded,)
    yield constant(padded, INDEX_NBYTES * (tokens + sizes.batch.micro_batch))
    if shifted in labels:
        yield constant(shifted, INDEX_NBYTES * tokens)
    yield Call(
        operator="log_softmax",
        inputs=(source,),
        output=log_softmax,
        nbytes=wide,
        saves=(log_softmax,),
        gradients=(source,),
        moved=forward * wide,
        backward_moved=backward * wide,
        dtype="float32",
    )
    yield Call(
        operator="nll_loss",
        inputs=(log_softmax,),
        output=name,
        nbytes=WIDE_NBYTES,
        saves=(log_softmax, labels[-1]),
        keeps=((f"{name}.total_weight", WIDE_NBYTES),),
        gradients=(log_softmax,),
        drops=(log_softmax, *((source,) if casts else ()), *labels),
        moved=2 * WIDE_NBYTES * tokens,  # one of each row, and the target
        backward_moved=wide,
    )
