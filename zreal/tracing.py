"""nn.Module to TracedModel: one forward and one backward on fake tensors, watched. No weights, no GPU, no memory.

What is seen is what torch on a CPU does with such inputs: which storages live how long, which operators run, in which unit.
Two runs of frees, with nothing allocated between them, have another order than torch's. The loss and its gradient come last, after what a
Function keeps on its ctx. And what a function of torch.nn.functional drops when it returns, as normalize does with `out`, comes before its
arguments that nobody else holds: the modes that watch it hold them longer.
Whatever does not follow from the shapes alone is refused by name. It must not know strategies.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zreal import batching, torch_private
from zreal.boundaries import Boundaries, ParameterGradients, cast_floats, tensors_in
from zreal.changed_views import ChangedViews
from zreal.device_kernels import KernelChoices
from zreal.faking import Faked, Inputs, Units, default_batch, fake, made, refuse, require_word, total
from zreal.initial import DTYPES
from zreal.known_values import as_on_real_tensors
from zreal.recomputing import recomputing
from zreal.storages import Born, Lives, Place, StorageLog, merged
from zreal.stretches import Step, traced_model
from zreal.untraceable import UntraceableError
from zsim.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.checkpointing import problems as checkpointing_problems
from zsim.traced import DEVICES, TracedModel
from zsim.training import Batch, Device, Dtype, Precision
from zsim.units import format_bytes


def trace(
    module: nn.Module | Callable[[], nn.Module],
    inputs: Inputs,
    *,
    units: Units = None,
    dtype: Dtype | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    casts_input: bool = True,
    autocast: Dtype | Literal["none"] = "none",
    batch: Batch | None = None,
    sums_in_place: bool = True,
    device: Device = "cpu",
    checkpointing: Sequence[Checkpointing] = (),
    name: str = "",
) -> TracedModel:
    """What one step of `module` on `inputs` computes, allocates and frees, unit by unit; the module is left as it was.

    `module` may live on any device ("meta" for one too large) or be a function that makes it, called without memory.
    Parameters that do not require gradients are frozen: read, but without a gradient.
    `inputs`: positional (a sequence) or by name (a mapping); each a tensor, a (shape, dtype) pair, or any other value as
    it is. Values count only of small integer tensors, where the module asks for them (is the mask all ones?).
    `units`: fqns, or a predicate of fqn and module; by default the children of the longest ModuleList. All else is the
    root's; a unit in a unit owns what is its own. `dtype`: that of the parameters, by default the one that they have; parameters
    that are all in float32, as constructors make them, may be traced in another. Refused are any others: mixed dtypes, float64, integers,
    complex numbers. `casts_input`: floating-point inputs of the model and of units are cast to `dtype`, as fully_shard does;
    otherwise the model's come in it. `loss` makes the scalar of the
    output; by default `output.loss` where there is one, else `output` if it is one number, else `output.float().sum()`. It
    counts as a part of the model's forward, and the output is dropped with it. `autocast`: the dtype of torch.autocast around
    forward and loss. `batch`: by default dim 0 of the first input,
    and dim 1 if it is integer.
    `sums_in_place=False` gives what torch does while a dispatch mode such as `zreal.meters` watches it: several
    gradients of one value are then never added in place.

    `device`: whose kernels; where none of them depends on that, the trace stands for both. `checkpointing`: traced once more with
    the units recomputed so, as torch's checkpoint_wrapper around each does; a scenario may then ask for any of them. UntraceableError,
    which names what stands in the way, for anything that shapes alone do not determine.
    """
    if dtype is not None:
        require_word("dtype", dtype, tuple(DTYPES))
    require_word("device", device, DEVICES)
    if autocast != "none":
        require_word("device", device, ("cpu",))  # on CUDA autocast casts other operators

    seen = partial(
        _seen,
        module,
        inputs,
        units=units,
        dtype=dtype,
        autocast=autocast,
        loss=loss,
        casts_input=casts_input,
        batch=batch,
        sums_in_place=sums_in_place,
        device=device,
        name=name,
    )
    plain = seen()
    variants = tuple((asked, _alike(plain, seen(asked, _require_known(asked, plain)), asked).lowered) for asked in checkpointing)
    return replace(plain, recomputing=variants)


def _require_known(asked: Checkpointing, model: TracedModel) -> frozenset[str]:
    """The units that `asked` is of; UntraceableError for what a trace cannot know."""
    expected = 'mode "full", or "selective" with `save`, of its units'
    if asked.mode == "none" or asked.recompute:
        raise refuse("checkpointing", expected, str(asked), "wrap the parts in torch.utils.checkpoint inside the module")
    found = next(checkpointing_problems(asked, model), "")
    if found or not model.blocks:
        raise refuse("checkpointing", expected, found or "a module without units", "name its blocks by units=")
    return asked.applies_to(model)


def _alike(plain: TracedModel, again: TracedModel, asked: Checkpointing) -> TracedModel:
    """`again`, which recomputes; UntraceableError where it is not cut into the same parts."""
    if again.modules != plain.modules or again.devices != plain.devices:
        raise refuse(str(asked), "the same parts with activation checkpointing as without", "others", "give each block a unit of its own")
    return again


def _seen(
    module: nn.Module | Callable[[], nn.Module],
    inputs: Inputs,
    asked: Checkpointing = NO_CHECKPOINTING,
    recomputed: Iterable[str] = (),
    *,
    units: Units,
    dtype: Dtype | None,
    autocast: Dtype | Literal["none"],
    loss: Callable[[Any], Tensor] | None,
    casts_input: bool,
    batch: Batch | None,
    sums_in_place: bool,
    device: Device,
    name: str,
) -> TracedModel:
    """One trace, in which the modules called `recomputed` are so as `asked`."""
    with torch_private.fake_mode():
        log, choices = StorageLog(device), KernelChoices(device)
        with log:
            model = module if isinstance(module, nn.Module) else made(module)
        log.restart()
        step = fake(model, inputs, units=units, dtype=dtype, casts_input=casts_input)
        casts = Precision(parameters=step.dtype, autocast=autocast)
        with choices, ChangedViews(), recomputing(model, recomputed, asked):
            run, held = _steady(step, log, loss, casts, sums_in_place=sums_in_place)
    traced = Step(
        name=name or type(model).__name__,
        groups=step.groups,
        dtype=step.dtype,
        batch=batch or default_batch(step),
        casts_input=step.cast is not None,
        autocast=autocast,
        buffer_nbytes=total(step.buffers.values()) + held,
        input_nbytes=total(tensors_in((step.args, step.kwargs))),
        devices=(device,) if choices.seen or log.device_matters or autocast != "none" else DEVICES,
        visits=tuple(run.boundaries.visits),
        cast_inputs=tuple(run.cast_inputs),
        registered=tuple(step.parameters),
        buffers=tuple((str(b.dtype).removeprefix("torch."), total([b])) for b in step.buffers.values()),
    )
    return traced_model(traced, lives=run.lives, reads=run.reads, gradients=run.gradients, loss=run.loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    boundaries: Boundaries
    gradients: ParameterGradients
    lives: Lives
    reads: dict[Place, dict[str, None]]
    left: dict[int, Born]
    loss: tuple[int, int]
    cast_inputs: list[int]


def _steady(
    step: Faked, log: StorageLog, loss: Callable[[Any], Tensor] | None, casts: Precision, *, sums_in_place: bool
) -> tuple[_Run, int]:
    """A step as all later ones are, and the bytes that the module keeps from its first one."""
    for fqn, parameter in step.parameters.items():
        log.ignore(parameter, parameter=fqn)
    for tensor in (*step.buffers.values(), *tensors_in((step.args, step.kwargs))):
        log.ignore(tensor)
    run = _run(step, log, loss, casts, sums_in_place=sums_in_place)
    held = sum(born.nbytes for born in run.left.values())
    if held:  # what the first forward has left in the module is there in the second
        run = _run(step, log, loss, casts, sums_in_place=sums_in_place)
        _require_nothing_left(run.left)
    return run, held


def _run(
    step: Faked, log: StorageLog, loss: Callable[[Any], Tensor] | None, casts: Precision, *, sums_in_place: bool
) -> _Run:
    """One forward and backward. Garbage collection waits for the end, so that it frees nothing at random."""
    boundaries, gradients = Boundaries(log, units=step.units, dtype=step.cast), ParameterGradients(log)
    collects = gc.isenabled()
    gc.disable()
    try:
        with (
            boundaries.hooks(),
            gradients.hooks(step.parameters),
            _root_cast(step, log) as cast_inputs,
            as_on_real_tensors(),
            step.in_place(),
            log,
        ):
            numbers = _forward_backward(step, log, loss, casts, boundaries=boundaries, gradients=gradients)
    finally:
        if collects:
            gc.enable()
    boundaries.end_backward()
    gc.collect()
    lives, reads = merged(log.entries, in_place=sums_in_place), log.reads
    for parameter in step.parameters.values():
        if parameter.grad is not None:
            log.ignore(parameter.grad)
        parameter.grad = None
    return _Run(
        boundaries=boundaries,
        gradients=gradients,
        lives=lives,
        reads=reads,
        left=log.restart(),
        loss=numbers,
        cast_inputs=cast_inputs,
    )


def _forward_backward(
    step: Faked,
    log: StorageLog,
    loss: Callable[[Any], Tensor] | None,
    casts: Precision,
    *,
    boundaries: Boundaries,
    gradients: ParameterGradients,
) -> tuple[int, int]:
    """The numbers of the storages of the loss's gradient and of the loss, which are dropped last and in this order."""
    try:
        with batching.autocast(casts, device="cpu"):
            result = (loss or _default_loss)(step.model(*step.args, **step.kwargs))
            if casts.autocast != "none":
                boundaries.leave_autocast()
        if not isinstance(result, Tensor) or result.numel() != 1 or not result.requires_grad:
            found = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise refuse(
                "loss", "one number that depends on the parameters", found, "give loss=, a function of the output"
            )
        boundaries.begin_backward()
        gradients.follow(result, step.parameters)
        with torch.no_grad():
            seed = torch.ones_like(result)
        numbers = log.number(seed), log.number(result)
        torch_private.run_backward(result, seed)  # not hidden from KernelChoices where it recomputes
    except UntraceableError:
        raise
    except Exception as error:  # whatever a user's module may raise
        lines = str(error).strip().splitlines() or [""]
        found = f"{type(error).__name__}: {lines[0][:200]}"
        raise refuse(_where(boundaries), "a module that runs on these inputs", found, "") from error
    del seed
    del result
    return numbers


def _where(boundaries: Boundaries) -> str:
    return next(iter(boundaries.visits[boundaries.log.place.stretch :]), boundaries.visits[0]).unit


def _default_loss(output: Any) -> Tensor:
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    if not isinstance(output, Tensor):
        found = f"an output of type {type(output).__name__} without a loss"
        raise refuse("loss", "a tensor, or an output with .loss", found, "give loss=, a function of the output")
    return output if output.numel() == 1 else output.float().sum()


@contextmanager
def _root_cast(step: Faked, log: StorageLog) -> Iterator[list[int]]:
    """The model's own inputs cast when it is called, as the root of fully_shard does; the storages of what was cast."""
    casts: list[int] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = {id(tensor) for tensor in tensors_in((args, kwargs))}
        found = cast_floats((args, kwargs), step.cast)
        casts.extend(log.number(tensor) for tensor in tensors_in(found) if id(tensor) not in given)
        return found

    handle = step.model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    try:
        yield casts
    finally:
        handle.remove()


def _require_nothing_left(left: Mapping[int, Born]) -> None:
    if left:
        counts = Counter(born.operator for born in left.values())
        operator, _ = counts.most_common(1)[0]
        raise refuse(
            operator,
            "memory that is free again after backward",
            f"{format_bytes(sum(born.nbytes for born in left.values()))} that the module keeps anew in every step",
            "do not store outputs in the module",
        )
