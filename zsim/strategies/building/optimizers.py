"""States and temporaries of torch's optimizers: AdamW and SGD; foreach, for-loop and fused; and
of torchao's AdamW8bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from zsim.ir.buffers import STEP, Buffer, form_of, numbered, state_of
from zsim.ir.ops import MOVE_GRADIENT, Alloc, Free, Kernel, MemoryEvent
from zsim.models.training_options import DTYPE_NBYTES, Optimizer
from zsim.strategies.building.kernels import copy_kernel

STEP_NBYTES = 4
"""torch keeps AdamW's step counter as one float32 per parameter."""

MULTI_TENSOR = 320 * 65_536
"""Most elements that one launch over many tensors steps: 320 blocks of 65,536 (torch's
MultiTensorApply.cuh)."""
QUANTIZED_FROM, BLOCK, MAP_NBYTES = 4096, 256, 1024
"""torchao quantizes the states of tensors of so many elements and of whole blocks. A block has a
float32 scale, a state a map of its 256 codes. Source: torchao/optim/adam.py and subclass_8bit.py of
torchao 0.18; Dettmers et al., "8-bit Optimizers", arXiv 2110.02861."""


def state_names(optimizer: Optimizer) -> tuple[str, ...]:
    """The states of the size of their parameter, in the order in which torch makes them."""
    if optimizer.name != "sgd":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if optimizer.momentum else ()


def step_nbytes(optimizer: Optimizer, *, device: str) -> int:
    """Bytes of AdamW's step counter on the device; on CUDA all but the fused implementation keep it
    in host memory."""
    on_device = device == "cpu" or optimizer.implementation == "fused"
    return STEP_NBYTES if optimizer.name != "sgd" and on_device else 0


def is_quantized(numel: int, optimizer: Optimizer) -> bool:
    """True where a tensor of `numel` elements has states of 8 bits."""
    return optimizer.name == "adamw8bit" and numel >= QUANTIZED_FROM and numel % BLOCK == 0


def states(
    numels: Sequence[int], *, optimizer: Optimizer, dtype: str, device: str, owner: str
) -> tuple[Alloc, ...]:
    """The state buffers that the first step makes, in its order: per parameter the step counter,
    then full-size states.

    `numels` are the elements of each parameter that this rank steps (a shard, a flat buffer, a
    whole parameter); an empty one still has a step counter. States have the `dtype` of the
    parameter. Buffers are called "<owner>.<place>.<state>", with `owner` unique within the rank.
    """
    return tuple(_states(numels, optimizer=optimizer, dtype=dtype, device=device, owner=owner))


def _states(
    numels: Sequence[int], *, optimizer: Optimizer, dtype: str, device: str, owner: str
) -> Iterator[Alloc]:
    step, names, element = (
        step_nbytes(optimizer, device=device), state_names(optimizer), DTYPE_NBYTES[dtype],
    )
    for index, numel in enumerate(numels):
        if step:
            yield Alloc(state_of(owner, index, STEP), "optimizer_states", step)
        if is_quantized(numel, optimizer):
            for name in names:
                for part, nbytes in (
                    ("codes", numel), ("scale", 4 * (numel // BLOCK)), ("map", MAP_NBYTES)
                ):
                    yield Alloc(state_of(owner, index, name, part), "optimizer_states", nbytes)
        elif numel:
            for name in names:
                yield Alloc(state_of(owner, index, name), "optimizer_states", numel * element)


def step_memory(
    numels: Sequence[int], *, optimizer: Optimizer, dtype: str, device: str, owner: str
) -> tuple[MemoryEvent, ...]:
    """The temporaries of one `optimizer.step()`, in order; all of them are freed by its end.

    foreach: for a moment AdamW's 1.0, which is added to step counters in host memory. Then one set
    as large as all parameters: AdamW's square roots, SGD's decayed gradients. for-loop: AdamW's
    square root and its quotient, which outlives the next parameter's; SGD's decayed gradient.
    fused: none. AdamW8bit: none, as torch.compile makes one pass of a parameter's step (assumed).
    """
    if (
        optimizer.implementation == "fused" or optimizer.name == "adamw8bit"
        or (optimizer.name == "sgd" and not optimizer.weight_decay)
    ):
        return ()
    element = DTYPE_NBYTES[dtype]
    if optimizer.name == "adamw" and optimizer.implementation != "foreach":
        names = [numbered(owner, index) for index in range(len(numels))]
        sizes = [numel * element for numel in numels]
        return tuple(_adamw_loop(zip(names, sizes, strict=True)))
    made = [
        Alloc(state_of(owner, index, "temporary"), "temporaries", numel * element)
        for index, numel in enumerate(numels) if numel
    ]
    if optimizer.implementation != "foreach":
        return tuple([event for alloc in made for event in (alloc, Free(alloc.buffer))])
    counted = _counted(numels, device=device, owner=owner) if optimizer.name == "adamw" else ()
    return (*counted, *made, *[Free(alloc.buffer) for alloc in reversed(made)])


def _counted(numels: Sequence[int], *, device: str, owner: str) -> tuple[MemoryEvent, ...]:
    """The tensor that foreach adds to all step counters at once; on CUDA it is in host memory, as
    they are."""
    increment = Alloc(form_of(owner, "one"), "temporaries", STEP_NBYTES)
    return (increment, Free(increment.buffer)) if device == "cpu" and numels else ()


def _adamw_loop(sizes: Iterable[tuple[Buffer, int]]) -> Iterator[MemoryEvent]:
    """An empty parameter, which has an empty quotient, lets the previous one's go too."""
    previous = ""
    for name, nbytes in sizes:
        if nbytes:
            yield Alloc(form_of(name, "root"), "temporaries", nbytes)
            yield Alloc(form_of(name, "quotient"), "temporaries", nbytes)
            yield Free(form_of(name, "root"))
        if previous:
            yield Free(form_of(previous, "quotient"))
        previous = name if nbytes else ""
    if previous:
        yield Free(form_of(previous, "quotient"))


def memory(
    numels: Sequence[int], *, optimizer: Optimizer, dtype: str, device: str, owner: str, first: bool
) -> tuple[MemoryEvent, ...]:
    """All that one `optimizer.step()` allocates and frees; the first makes the states too.

    for-loop SGD makes each momentum from the decayed gradient, which it then drops; all others make
    their states first.
    """
    temporaries = step_memory(numels, optimizer=optimizer, dtype=dtype, device=device, owner=owner)
    if not first:
        return temporaries
    made = states(numels, optimizer=optimizer, dtype=dtype, device=device, owner=owner)
    return _with_states(made, temporaries, optimizer)


def first_and_later(
    numels: Sequence[int], *, optimizer: Optimizer, dtype: str, device: str, owner: str
) -> tuple[tuple[MemoryEvent, ...], tuple[MemoryEvent, ...]]:
    """`memory` of the first step and of a later one; the temporaries of both are the same events.
    """
    later = step_memory(numels, optimizer=optimizer, dtype=dtype, device=device, owner=owner)
    made = states(numels, optimizer=optimizer, dtype=dtype, device=device, owner=owner)
    return _with_states(made, later, optimizer), later


def _with_states(
    made: tuple[Alloc, ...], temporaries: tuple[MemoryEvent, ...], optimizer: Optimizer
) -> tuple[MemoryEvent, ...]:
    if (
        not made
        or not temporaries
        or (optimizer.name, optimizer.implementation) != ("sgd", "for-loop")
    ):
        return (*made, *temporaries)
    turns = zip(temporaries[::2], made, temporaries[1::2], strict=True)
    return tuple(event for turn in turns for event in turn)


def kernels(
    numels: Sequence[int], *, optimizer: Optimizer, dtype: str, device: str, of: str = "",
    gradients: str = "",
) -> tuple[Kernel, ...]:
    """Kernels of one step, with the bytes that they read and write: parameter, gradient, states.

    With parameters `of` another dtype, the optimizer steps master copies. Their `gradients` ("": of
    the parameters' dtype) are cast to `dtype` before, and parameters back after: in one call, or
    one for each tensor by for-loop.

    A fused step is one pass: it reads the gradient, and reads and writes parameter and states.
    foreach and for-loop read each operand of an aten call once, and write its result once. foreach
    makes its calls for all tensors, which count as one kernel on a GPU with its launches. On a CPU
    it loops over the tensors, each of which counts as one. for-loop makes one kernel per call and
    tensor.
    """
    if of not in ("", dtype):
        together = numels if optimizer.implementation == "for-loop" else [sum(numels)]
        casts = (
            replace(copy_kernel(n, source=of, target=dtype), operator=MOVE_GRADIENT)
            for n in together
        )
        back = (copy_kernel(n, source=dtype, target=of) for n in together)
        own = kernels(numels, optimizer=optimizer, dtype=dtype, device=device)
        return (*(casts if gradients != dtype else ()), *own, *back)
    size = DTYPE_NBYTES[dtype]
    if optimizer.name == "adamw8bit":
        return tuple(_adamw8bit(numels, optimizer, size, dtype))
    num_states = len(state_names(optimizer))
    flops = {0: 4, 1: 6, 2: 14}[num_states]
    if optimizer.implementation == "for-loop":
        calls = _accesses_by_call(optimizer)
        each = {
            n: tuple(
                Kernel(optimizer.name, flops * n // len(calls), call * n * size, dtype)
                for call in calls
            )
            for n in set(numels)
        }
        return tuple(kernel for n in numels for kernel in each[n])
    accesses = (
        3 + 2 * num_states
        if optimizer.implementation == "fused"
        else sum(_accesses_by_call(optimizer))
    )
    together = numels if device == "cpu" else [sum(numels)]
    num_calls = 1 if optimizer.implementation == "fused" else len(_accesses_by_call(optimizer))
    return tuple(
        Kernel(
            optimizer.name, flops * n, accesses * n * size, dtype,
            launches=0 if device == "cpu" else num_calls * -(-n // MULTI_TENSOR),
        )
        for n in together
    )


def _adamw8bit(
    numels: Sequence[int], optimizer: Optimizer, size: int, dtype: str
) -> Iterator[Kernel]:
    """A compiled pass for each tensor: gradient and parameter, and states read and written."""
    for numel in filter(None, numels):
        state = 1 + 4 / BLOCK if is_quantized(numel, optimizer) else size
        yield Kernel("adamw8bit", 14 * numel, round(numel * (3 * size + 4 * state)), dtype)


def _accesses_by_call(optimizer: Optimizer) -> tuple[int, ...]:
    """Operands read and results written by each aten call of torch.optim's _single_tensor
    functions.

    AdamW: weight decay, the first moment, the second's decay and addition, root, division, epsilon,
    update. SGD: weight decay, momentum's decay and addition, update.
    """
    if optimizer.name == "adamw":
        return (*([2] if optimizer.weight_decay else []), 3, 2, 3, 2, 2, 2, 4)
    return (
        *([3] if optimizer.weight_decay else []), *([2, 3] if state_names(optimizer) else []), 3
    )
