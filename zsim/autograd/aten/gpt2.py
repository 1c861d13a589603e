"""The aten calls of what GPT-2 of transformers is made of besides: Conv1D, learned positions,
dropout, a GELU in Python.

Seen with transformers 5 on torch 2.13; dropout on CUDA, where it is one kernel, is read from
torch's sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zsim.autograd.aten.building_blocks import after_dropout, view
from zsim.autograd.aten.call import Call, Sizes
from zsim.autograd.aten.transformers import packed_check, places
from zsim.models.operators import Operator


def conv1d(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """Conv1D: a linear layer whose weight lies (in, out), so that no node transposes its gradient.
    """
    flops = 2 * sizes.tokens * op.in_features * op.out_features
    read = sizes.nbytes * (sizes.tokens * op.in_features + op.in_features * op.out_features)
    written = sizes.nbytes * sizes.tokens * op.out_features
    yield Call(
        operator="conv1d",
        inputs=op.inputs,
        output=op.output,
        nbytes=written,
        saves=op.inputs,
        gradients=(*op.inputs, op.weight, op.bias),
        summed=((op.bias, ()),),
        parameters=(op.weight, op.bias),
        flops=flops,
        backward_flops=2 * flops,
        moved=read + written,
        backward_moved=2 * (read + written),
    )


def split(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """Queries, keys and values as thirds of one tensor; backward puts their gradients side by side.
    """
    nbytes = sizes.nbytes * sizes.tokens * op.out_features
    parts = tuple(f"{op.output}.{part}" for part in ("key", "value"))
    yield view(op.inputs[0], op.output, nbytes, also=parts, copies_gradient=True)


def dropout(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """Noise of ones and zeros, scaled, times the value; for a share of 0 the value itself."""
    nbytes = sizes.nbytes * sizes.tokens * op.out_features
    if not op.dropout:
        yield view(op.inputs[0], op.output, nbytes)
        return
    yield from after_dropout(op.inputs[0], op.output, nbytes, sizes)


def gelu_new(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """NewGELUActivation: 0.5·x · (1 + tanh(√(2/π)·(x + 0.044715·x³))), call by call."""
    (x,), name = op.inputs, op.output
    nbytes = sizes.nbytes * sizes.tokens * op.out_features
    half, cube, scaled, summed, argument, tanh, raised = (
        f"{name}.{part}" for part in ("half", "cube", "scaled", "sum", "argument", "tanh", "raised")
    )

    def call(inputs: tuple[str, ...], output: str, **more: Any) -> Call:
        way: dict[str, Any] = {} if "passes" in more else {"gradients": inputs}
        return Call(
            operator="gelu", inputs=inputs, output=output, nbytes=nbytes, moved=2 * nbytes,
            backward_moved=2 * nbytes, **(way | more),
        )

    yield call((x,), half)
    yield call((x,), cube, saves=(x,), backward_scratch=(nbytes, nbytes))
    yield call((cube,), scaled, drops=(cube,))
    yield call((x, scaled), summed, passes=(x, scaled), drops=(scaled,))
    yield call((summed,), argument, drops=(summed,))
    yield call((argument,), tanh, saves=(tanh,), drops=(argument,))
    yield call((tanh,), raised, passes=(tanh,), drops=(tanh,))
    yield call((half, raised), name, saves=(half, raised), crossed=True, drops=(half, raised))


def position_embedding(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """A table looked up by place, one row per place for all sequences, and added."""
    (x,), name = op.inputs, op.output
    nbytes, rows = (
        sizes.nbytes * n * op.out_features for n in (sizes.tokens, sizes.batch.sequence_length)
    )
    table, looked_up = sizes.nbytes * op.num_embeddings * op.out_features, f"{name}.rows"
    yield from places(op, sizes)
    yield Call(
        operator="embedding",
        inputs=(),
        output=looked_up,
        nbytes=rows,
        saves=(f"{name}.places",),
        gradients=(op.weight,),
        parameters=(op.weight,),
        moved=2 * rows,
        backward_moved=2 * rows + table,
    )
    repeated = sizes.batch.micro_batch > 1
    yield Call(
        operator="residual",
        inputs=(x, looked_up),
        output=f"{name}.sum",
        nbytes=nbytes,
        passes=(x,) if repeated else (x, looked_up),
        gradients=(looked_up,) if repeated else (),
        summed=((looked_up, ()),) if repeated else (),
        moved=2 * nbytes + rows,
        backward_moved=nbytes + rows if repeated else 0,
    )
    yield from packed_check(op, sizes)
    yield view(f"{name}.sum", name, nbytes)
