"""Calls that attention and rotary positions are made of: views, copies, constants, batched
products, dropout.

Views count where gradients pass through them: what lies transposed is copied when it is made flat
again. Seen with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zsim.autograd.aten.call import Call, Sizes
from zsim.models.operators import Operator


def view(
    source: str, output: str, nbytes: int, *, copies_gradient: bool = False, **more: Any
) -> Call:
    """Another shape of `source`; with `copies_gradient` its gradient cannot be a view and is
    copied."""
    way: dict[str, Any] = {"gradients" if copies_gradient else "passes": (source,)}
    return Call(
        operator="view", inputs=(source,), output=output, nbytes=nbytes, view=True, **way, **more
    )


def clone(source: str, output: str, nbytes: int, *, copies: bool, **more: Any) -> Call:
    """`source` made contiguous: a copy if it `copies`, else a view. The gradient passes."""
    return Call(
        operator="clone", inputs=(source,), output=output, nbytes=nbytes, view=not copies,
        passes=(source,), **more,
    )


def laid_out(sizes: Sizes, nbytes: int, *, copies: bool = True) -> dict[str, Any]:
    """Work of a kernel that copies `nbytes` of heads into another order of dimensions.

    None where it does not copy."""
    return {"moved": 2 * nbytes, "singly": nbytes // sizes.nbytes} if copies else {}


def gradient_laid_out(sizes: Sizes, nbytes: int, *, copies: bool = True) -> dict[str, Any]:
    """The same of a kernel in backward."""
    made = laid_out(sizes, nbytes, copies=copies)
    return {f"backward_{name}": number for name, number in made.items()}


def constant(output: str, nbytes: int, *, drops: tuple[str, ...] = ()) -> Call:
    """A tensor that needs no gradient, made from nothing or from another such one."""
    return Call(operator="constant", inputs=(), output=output, nbytes=nbytes, drops=drops)


def attention_flops(op: Operator, sizes: Sizes) -> int:
    """FLOPs of queries times keys and of probabilities times values, not halved for causal masks:
    2·2·tokens·length·width."""
    return 4 * sizes.tokens * sizes.batch.sequence_length * op.num_heads * op.head_dim


def batched_matmul(
    operator: str, inputs: tuple[str, str], output: str, nbytes: int, op: Operator, sizes: Sizes
) -> Call:
    """A batched product; backward makes the gradient of its second factor first, and lets go of
    that one first."""
    flops, wide = (
        attention_flops(op, sizes) // 2, sizes.nbytes * sizes.tokens * op.num_heads * op.head_dim,
    )
    scores = sizes.nbytes * sizes.tokens * sizes.batch.sequence_length * op.num_heads
    of_scores = operator == "scores"
    heads, length = sizes.batch.micro_batch * op.num_heads, sizes.batch.sequence_length
    return Call(
        operator=operator, inputs=inputs, output=output, nbytes=nbytes, saves=inputs[::-1],
        crossed=True, gradients=inputs[::-1], drops=inputs, flops=flops, backward_flops=2 * flops,
        moved=scores + 2 * wide, backward_moved=2 * (scores + 2 * wide),
        shape=(heads, length, length, op.head_dim)
        if of_scores
        else (heads, length, op.head_dim, length),
    )


def after_dropout(source: str, name: str, nbytes: int, sizes: Sizes, **more: Any) -> Iterator[Call]:
    """`source` of `nbytes` after dropout. Fused on CUDA, where a mask of one byte per element is
    kept instead of the noise."""
    if sizes.device == "cuda":
        mask = nbytes // sizes.nbytes
        yield Call(
            operator="dropout",
            inputs=(source,),
            output=name,
            nbytes=nbytes,
            keeps=((f"{name}.mask", mask),),
            gradients=(source,),
            moved=2 * nbytes + mask,
            backward_moved=2 * nbytes + mask,
            **more,
        )
        return
    noise = f"{name}.noise"
    yield constant(noise, nbytes)
    yield Call(
        operator="dropout",
        inputs=(source,),
        output=name,
        nbytes=nbytes,
        saves=(noise,),
        gradients=(source,),
        moved=3 * nbytes,
        backward_moved=3 * nbytes,
        **(more | {"drops": (noise, *more.get("drops", ()))}),
    )
