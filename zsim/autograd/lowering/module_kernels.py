"""The kernels of a module's forward and backward: one for each call that moves anything, and in
backward each product by itself.

Backward of a product is two products, of other shapes than forward's. A bias's gradient is one more
pass over the output's, and where a value has several uses the engine adds their gradients. All this
takes time; what it takes of memory is `zsim.autograd.tape`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from zsim.autograd.aten.call import Call
from zsim.ir.ops import ATTENTION_BACKWARD, CLONE, HEAD, SOFTMAX_PRODUCT, Kernel
from zsim.models.spec import Parameter
from zsim.models.training_options import DTYPE_NBYTES


def forward_kernels(calls: Sequence[Call], *, dtype: str) -> tuple[Kernel, ...]:
    """Kernels of forward, in order."""
    made = [call for call in calls if call.moved and not call.from_cache]
    return tuple(
        kernel
        for call in made
        for kernel in (
            Kernel(
                _operator(call), call.flops, call.moved, call.dtype or dtype, shape=call.shape,
                singly=call.singly,
            ),
            *_bias(call, call.dtype or dtype),
        )
    )


def _bias(call: Call, dtype: str) -> tuple[Kernel, ...]:
    """A linear of one node adds its bias in place, by a kernel of its own."""
    return (Kernel("bias", 0, 2 * call.nbytes, dtype),) if call.bias else ()


def _operator(call: Call) -> str:
    """The operator of the kernels of `call`."""
    return HEAD if call.head else call.operator


def backward_kernels(
    calls: Sequence[Call],
    *,
    dtype: str,
    needs_gradient: Collection[str],
    nbytes: Mapping[str, int],
    parameters: Mapping[str, Parameter],
    made: Counter[str],
) -> Iterator[Kernel]:
    """Kernels of backward, in reverse order of `calls`; `nbytes` are the sizes of values, of which
    those in `needs_gradient` get gradients, `parameters` the model's.

    `made` counts the gradients of each value and parameter that later modules have made, and learns
    of these: all but the first are added.
    """
    for call in reversed(calls):
        if not call.differentiable:
            continue
        kind = call.dtype or dtype
        if (call.moved or call.backward_moved) and not call.from_cache:
            yield from (
                _of_products(call, kind, needs_gradient)
                if call.shape
                else _of_call(call, kind, needs_gradient)
            )
        for value in (*call.gradients, *call.passes):
            if value in call.parameters:
                made[value] += 1
                if made[value] > 1:
                    yield Kernel("add", 0, 3 * parameters[value].numel * DTYPE_NBYTES[dtype], dtype)
            elif value in needs_gradient:
                made[value] += 1
                if made[value] > 1:
                    yield Kernel("add", 0, 3 * nbytes.get(value, 0), kind)


def _of_call(call: Call, dtype: str, needs_gradient: Collection[str]) -> Iterator[Kernel]:
    """A call whose inputs need no gradient makes only its parameters' gradients."""
    if call.backward_moved:
        flops = (
            call.backward_flops
            if any(value in needs_gradient for value in call.inputs)
            else call.backward_flops // 2
        )
        yield Kernel(
            CLONE if call.view else call.operator, flops, call.backward_moved, dtype,
            singly=call.backward_singly,
        )
    if call.backward_first:
        yield Kernel(SOFTMAX_PRODUCT, 0, call.backward_first, dtype)


def _of_products(call: Call, dtype: str, needs_gradient: Collection[str]) -> Iterator[Kernel]:
    """The products that make the gradients of a product's factors; fused attention's backward is
    one kernel of the same shape."""
    if call.operator == "attention":
        yield Kernel(
            ATTENTION_BACKWARD, call.backward_flops, call.backward_moved, dtype, shape=call.shape
        )
        return
    count, m, n, k = call.shape
    first, last = (
        value in needs_gradient and value in call.gradients
        for value in (call.inputs[0], call.inputs[-1])
    )
    trained = call.parameters or call.weights
    if not call.crossed:  # each of the two products is as large as forward's
        last = call.backward_flops > call.flops * first
    shapes = [((count, m, k, n), False)] if first else []
    if last:
        shapes.append(((count, k, n, m) if call.crossed else (count, n, k, m), True))
    for shape, transposed in shapes:
        yield Kernel(
            _operator(call), call.flops, call.moved, dtype, shape=shape, transposed=transposed
        )
    # the weight comes first, if it is trained
    if any(name in call.gradients for name in trained[last:]):
        yield Kernel("bias", 0, call.nbytes, dtype)
