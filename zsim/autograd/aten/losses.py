"""The aten calls of the cross-entropy: torch's own, and the composite one of trainers that can
split the vocabulary over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zsim.autograd.aten.building_blocks import constant
from zsim.autograd.aten.call import Call, Sizes
from zsim.ir.ops import LOSS_STEP
from zsim.models.operators import COMPOSITE, Operator
from zsim.models.training_options import DTYPE_NBYTES, Device

INDEX_NBYTES = DTYPE_NBYTES["int64"]
SHARED_NBYTES = 48 * 2**10
"""Bytes of a row that torch's softmax kernels keep in shared memory (SoftMax.cu asks for what a
block has by default)."""


def log_softmax_tensors(columns: int, *, nbytes: int, device: Device) -> tuple[int, int]:
    """Tensors as large as the logits, of `nbytes` an element, that log_softmax reads and writes,
    and its backward.

    A row's largest, its sum of exponentials and its result are three passes, and backward's sum of
    gradients and result are two. On CUDA each pass reads a long row anew.
    """
    is_long = device == "cuda" and columns * nbytes > SHARED_NBYTES
    return (4, 4) if is_long else (2, 3)


def cross_entropy(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """log_softmax, then nll_loss, which keeps its total weight; the loss itself is one scalar."""
    if op.implementation == COMPOSITE:
        yield from _composite(op, sizes)
        return
    logits = op.inputs[0]
    nbytes = sizes.nbytes * sizes.tokens * op.out_features
    forward, backward = log_softmax_tensors(
        op.out_features, nbytes=sizes.nbytes, device=sizes.device
    )
    log_softmax = f"{op.output}.log_softmax"
    yield Call(
        operator="log_softmax",
        inputs=(logits,),
        output=log_softmax,
        nbytes=nbytes,
        saves=(log_softmax,),
        gradients=(logits,),
        moved=forward * nbytes,
        backward_moved=backward * nbytes,
    )
    yield Call(
        operator="nll_loss",
        inputs=(log_softmax,),
        output=op.output,
        nbytes=sizes.nbytes,
        saves=(log_softmax,),
        keeps=((f"{op.output}.total_weight", sizes.nbytes),),
        gradients=(log_softmax,),
        moved=2 * sizes.nbytes * sizes.tokens,  # one of each row, and the target
        backward_moved=nbytes,
    )


def _composite(op: Operator, sizes: Sizes) -> Iterator[Call]:
    """Single calls in an autograd function, as Megatron and nanotron have it.

    It keeps the softmax alone, in which backward makes the gradient of the logits. The logits less
    their largest are made once; exponentials and quotients are in place.
    """
    (logits, _), name, rows = op.inputs, op.output, sizes.nbytes * sizes.tokens
    nbytes = rows * op.out_features
    largest, less, chosen, powers, total, softmax, logarithm, each = (
        f"{name}.{part}"
        for part in (
            "largest", "less", "chosen", "powers", "total", "softmax", "logarithm", "each",
        )
    )

    def step(inputs: tuple[str, ...], output: str, size: int, *, moved: int, **more: Any) -> Call:
        return Call(
            operator=LOSS_STEP, inputs=inputs, output=output, nbytes=size, moved=moved, **more
        )

    yield step((), largest, rows, moved=nbytes, scratch=INDEX_NBYTES * sizes.tokens)
    yield step((logits,), less, nbytes, moved=2 * nbytes, passes=(logits,), drops=(largest,))
    yield constant(chosen, rows)
    yield step((less,), powers, nbytes, moved=2 * nbytes, view=True, passes=(less,))
    yield step((), total, rows, moved=nbytes)
    yield step((powers,), softmax, nbytes, moved=2 * nbytes, view=True, passes=(powers,))
    yield constant(logarithm, rows)
    yield step(
        (softmax,),
        each,
        rows,
        moved=3 * rows,
        saves=(softmax,),
        gradients=(softmax,),
        in_place=True,
        backward_scratch=(rows,),
        backward_moved=2 * nbytes,
        drops=(logarithm, total, chosen, softmax, powers, less),
    )
    yield step(
        (each,), name, sizes.nbytes, moved=rows, gradients=(each,), backward_moved=rows
    )
