"""The aten calls that each operator makes in eager torch: sizes, work, and what autograd saves of
each.

Seen with a dispatch-level meter on the CPU with torch 2.13, on CUDA read from torch's sources;
`zsim.autograd.tape` turns these calls into allocations and frees. A matmul of m × k by k × n is
2·m·n·k FLOPs; its backward is twice that. Element-wise calls count no FLOPs, only bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from zsim.autograd.aten.call import Call, Sizes
from zsim.ir.ops import CAST_LOGITS, NORM_STEP
from zsim.loaded import Loaded
from zsim.models.operators import COMPOSITE, ONE_NODE, Operator, OperatorKind
from zsim.models.training_options import DTYPE_NBYTES, Batch, Device

__all__ = ["Call", "calls"]


def _linear(op: Operator, sizes: Sizes) -> Iterator[Call]:
    flops = 2 * sizes.tokens * op.in_features * op.out_features
    read = sizes.nbytes * (sizes.tokens * op.in_features + op.in_features * op.out_features)
    written = sizes.nbytes * sizes.tokens * op.out_features
    parameters = tuple(fqn for fqn in (op.weight, op.bias) if fqn)
    made = Call(
        operator="linear",
        inputs=op.inputs,
        output=op.output,
        nbytes=written,
        saves=op.inputs,
        # addmm and mm, as torch orders each
        gradients=(*op.inputs, *parameters) if op.bias else (*parameters, *op.inputs),
        summed=((op.bias, ()),) if op.bias else (),
        parameters=parameters,
        addmm=bool(op.bias),
        head=op.name == "lm_head",
        flops=flops,
        backward_flops=2 * flops,
        moved=read + written,
        backward_moved=2 * (read + written),
        shape=(1, sizes.tokens, op.out_features, op.in_features),
    )
    if op.implementation == ONE_NODE:
        made = replace(
            made, operator="mm", gradients=(*op.inputs, *parameters), summed=(), addmm=False,
            one_node=True, bias=op.bias,
        )
    yield made


def _elementwise(
    op: Operator, sizes: Sizes, *, saves: tuple[str, ...], passes: tuple[str, ...] = (),
    reads: int = 1,
) -> Call:
    nbytes = sizes.nbytes * sizes.tokens * op.out_features
    return Call(
        operator=op.kind,
        inputs=op.inputs,
        output=op.output,
        nbytes=nbytes,
        saves=saves,
        gradients=() if passes else op.inputs,
        passes=passes,
        moved=(reads + 1) * nbytes,
        backward_moved=0 if passes else (reads + 2) * nbytes,
    )


def _gelu(op: Operator, sizes: Sizes) -> Iterator[Call]:
    yield _elementwise(op, sizes, saves=op.inputs)


def _residual(op: Operator, sizes: Sizes) -> Iterator[Call]:
    yield _elementwise(op, sizes, saves=(), passes=op.inputs, reads=2)


def _swiglu(op: Operator, sizes: Sizes) -> Iterator[Call]:
    gate, up = op.inputs
    silu = f"{op.output}.silu"
    nbytes = sizes.nbytes * sizes.tokens * op.out_features
    yield Call(
        operator="silu",
        inputs=(gate,),
        output=silu,
        nbytes=nbytes,
        saves=(gate,),
        gradients=(gate,),
        moved=2 * nbytes,
        backward_moved=3 * nbytes,
    )
    yield Call(
        operator="multiply",
        inputs=(silu, up),
        output=op.output,
        nbytes=nbytes,
        saves=(silu, up),
        crossed=True,
        gradients=(silu, up),
        moved=3 * nbytes,
        backward_moved=6 * nbytes,
    )


def _embedding(op: Operator, sizes: Sizes) -> Iterator[Call]:
    nbytes = sizes.nbytes * sizes.tokens * op.out_features
    table = sizes.nbytes * op.num_embeddings * op.out_features
    yield Call(
        operator="embedding",
        inputs=(),
        output=op.output,
        nbytes=nbytes,
        gradients=(op.weight,),
        parameters=(op.weight,),
        moved=2 * nbytes,
        backward_moved=2 * nbytes + table,
    )


def _positions(op: Operator, sizes: Sizes) -> Iterator[Call]:
    nbytes = sizes.nbytes * sizes.tokens * op.out_features
    rows = sizes.nbytes * sizes.batch.sequence_length * op.out_features
    yield Call(
        operator="positions",
        inputs=op.inputs,
        output=op.output,
        nbytes=nbytes,
        gradients=(op.weight,),
        passes=op.inputs,
        parameters=(op.weight,),
        backward_scratch=(rows,),
        sum_first=True,
        moved=2 * nbytes + rows,
        backward_moved=nbytes + rows,
    )


def _layer_norm(op: Operator, sizes: Sizes) -> Iterator[Call]:
    nbytes = sizes.nbytes * sizes.tokens * op.out_features
    statistics = sizes.tokens * (sizes.nbytes if sizes.device == "cpu" else 4)
    parameters = tuple(fqn for fqn in (op.weight, op.bias) if fqn)
    yield Call(
        operator="layer_norm",
        inputs=op.inputs,
        output=op.output,
        nbytes=nbytes,
        saves=op.inputs,
        keeps=((f"{op.output}.mean", statistics), (f"{op.output}.rstd", statistics)),
        gradients=(*op.inputs, *parameters),
        parameters=parameters,
        moved=2 * nbytes,
        backward_moved=5 * nbytes,  # input's gradient, and x and dy once more for the parameters'
    )


def _rms_norm(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """One kernel on CUDA (aten::_fused_rms_norm, which keeps its input and a float32 statistic per
    token).

    On the CPU composite: the mean of squares, the normalised input and its product with the weight,
    in float32. The composite that models write themselves is the same on both.
    """
    if op.implementation == COMPOSITE:
        yield from _ELSEWHERE["upcast_norm"](op, sizes)
        return
    nbytes = sizes.nbytes * sizes.tokens * op.out_features
    if sizes.device == "cuda":
        yield Call(
            operator="rms_norm",
            inputs=op.inputs,
            output=op.output,
            nbytes=nbytes,
            saves=op.inputs,
            keeps=((f"{op.output}.rstd", 4 * sizes.tokens),),
            gradients=(*op.inputs, op.weight),
            parameters=(op.weight,),
            moved=2 * nbytes,
            backward_moved=5 * nbytes,
        )
        return
    yield from _composite_rms_norm(
        op, sizes, nbytes=nbytes, wide=4 * sizes.tokens * op.out_features
    )


def _composite_rms_norm(op: Operator, sizes: Sizes, *, nbytes: int, wide: int) -> Iterator[Call]:
    """rsqrt(mean(x²) + ε)·x·weight in float32; two-byte inputs are cast before and after."""
    (x,), rows = op.inputs, 4 * sizes.tokens
    casts = sizes.nbytes < 4
    source = f"{op.output}.float" if casts else x
    square, mean, rstd, normalised = (
        f"{op.output}.{part}" for part in ("square", "mean", "rstd", "normalised")
    )
    product = f"{op.output}.product" if casts else op.output
    if casts:
        yield _cast(x, source, nbytes=nbytes, wide=wide, into=wide)

    def call(
        inputs: tuple[str, ...], output: str, size: int, gradients: tuple[str, ...], *, moved: int,
        backward_moved: int, **more: Any,
    ) -> Call:
        how = {"moved": moved, "backward_moved": backward_moved, **more}
        return Call(
            operator=NORM_STEP, inputs=inputs, output=output, nbytes=size, gradients=gradients,
            **how,
        )

    # What is read and written of each, in forward; in backward a square is a power, a product with
    # two, and one with the gradient.
    yield call(
        (source,), square, wide, (source,), moved=2 * wide, backward_moved=7 * wide,
        saves=(source,), backward_scratch=(wide, wide),
    )
    yield call((square,), mean, rows, (square,), moved=wide + rows, backward_moved=wide + rows)
    yield call(
        (mean,),
        rstd,
        rows,
        (mean,),
        moved=2 * rows,
        backward_moved=8 * rows,
        saves=(rstd,),
        backward_scratch=(rows, rows),
        drops=(mean, square),
    )
    yield call(
        (source, rstd),
        normalised,
        wide,
        (source, rstd),
        moved=2 * wide + rows,
        backward_moved=6 * wide + 2 * rows,
        saves=(source, rstd),
        summed=((rstd, (wide,)),),
    )
    weight_sum = (wide, 4 * op.out_features) if casts else (wide,)
    yield call(
        (normalised,),
        product,
        wide,
        (normalised, op.weight),
        moved=2 * wide,
        backward_moved=6 * wide,
        saves=(normalised,),
        summed=((op.weight, weight_sum),),
        parameters=(op.weight,),
        drops=(source, normalised) if casts else (),
    )
    if casts:
        yield replace(
            _cast(product, op.output, nbytes=nbytes, wide=wide, into=nbytes), drops=(product,)
        )


def _cast(source: str, target: str, *, nbytes: int, wide: int, into: int) -> Call:
    """A change of dtype, of which autograd keeps nothing. What becomes wider goes one by one."""
    numel, widens = wide // DTYPE_NBYTES["float32"], into == wide
    return Call(
        operator="cast",
        inputs=(source,),
        output=target,
        nbytes=into,
        gradients=(source,),
        moved=nbytes + wide,
        backward_moved=nbytes + wide,
        singly=numel if widens else 0,
        backward_singly=0 if widens else numel,
    )


def _cast_to(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """A copy of logits, which are sized by `sizes`, in the operator's dtype; what is as wide
    already stays itself."""
    numel, after = sizes.tokens * op.out_features, DTYPE_NBYTES[op.dtype]
    if sizes.nbytes == after:
        yield Call(
            operator="view", inputs=op.inputs, output=op.output, nbytes=numel * after, view=True,
            passes=op.inputs,
        )
    else:
        cast = _cast(
            op.inputs[0], op.output, nbytes=numel * sizes.nbytes, wide=numel * after,
            into=numel * after,
        )
        yield replace(cast, operator=CAST_LOGITS)


MakesCalls = Callable[[Operator, Sizes], Iterator[Call]]
_OWN: dict[OperatorKind, MakesCalls] = {
    "linear": _linear,
    "embedding": _embedding,
    "positions": _positions,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "gelu": _gelu,
    "swiglu": _swiglu,
    "residual": _residual,
    "cast": _cast_to,
}
_ELSEWHERE: Mapping[str, MakesCalls] = Loaded({
    "attention": "zsim.autograd.aten.attention:attention",
    "rotary": "zsim.autograd.aten.attention:rotary",
    "cross_entropy": "zsim.autograd.aten.losses:cross_entropy",
    "upcast_norm": "zsim.autograd.aten.transformers:upcast_norm",
    "shifted_norm": "zsim.autograd.aten.transformers:shifted_norm",
    "scale": "zsim.autograd.aten.transformers:scale",
    "rotary_tables": "zsim.autograd.aten.transformers:rotary_tables",
    "heads": "zsim.autograd.aten.transformers:heads",
    "rotate": "zsim.autograd.aten.transformers:rotate",
    "rotate_part": "zsim.autograd.aten.transformers:rotate_part",
    "chunk": "zsim.autograd.aten.transformers:chunk",
    "parts": "zsim.autograd.aten.transformers:parts",
    "by_token": "zsim.autograd.aten.transformers:by_token",
    "silu": "zsim.autograd.aten.transformers:silu",
    "multiply": "zsim.autograd.aten.transformers:multiply",
    "conv1d": "zsim.autograd.aten.gpt2:conv1d",
    "split": "zsim.autograd.aten.gpt2:split",
    "dropout": "zsim.autograd.aten.gpt2:dropout",
    "gelu_new": "zsim.autograd.aten.gpt2:gelu_new",
    "position_embedding": "zsim.autograd.aten.gpt2:position_embedding",
    "causal_loss": "zsim.autograd.aten.transformers:causal_loss",
})
"""Operators whose calls are in other files. Few models need all."""


def calls(
    operator: Operator, *, batch: Batch, dtype: str, device: Device = "cpu"
) -> tuple[Call, ...]:
    """The aten calls of `operator` for one micro-batch on `device`, in forward order."""
    reads = dtype if operator.kind == "cast" else operator.dtype or dtype
    makes = _OWN.get(operator.kind) or _ELSEWHERE[operator.kind]
    made = tuple(makes(operator, Sizes(batch, DTYPE_NBYTES[reads], device)))
    if operator.drops:
        made = (*made[:-1], replace(made[-1], drops=(*made[-1].drops, *operator.drops)))
    return tuple(replace(call, dtype=operator.dtype) for call in made) if operator.dtype else made
