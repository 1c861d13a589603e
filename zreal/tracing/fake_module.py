"""A module without its memory: fake parameters, buffers and inputs in place of its own, and its
parameters by unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from zreal import torch_private
from zreal.modules.initial_values import DTYPES
from zreal.tracing.errors import UntraceableError, refuse
from zreal.tracing.fakes.known_values import tell
from zreal.tracing.module_values import mapped, tensors_in
from zreal.tracing.units.param_groups import UnitChoice, find_units, param_groups
from zsim.errors import ZsimError, listed
from zsim.models.spec import ParamGroup
from zsim.models.training_options import Batch, Dtype

Inputs = Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Faked:
    """A module with what stands in for its tensors. `dtype` is its parameters', `cast` what
    floating-point inputs are cast to."""

    model: nn.Module
    units: dict[str, nn.Module]
    groups: tuple[ParamGroup, ...]
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: Dtype
    cast: torch.dtype | None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the module has the fakes for its parameters and buffers, tied ones tied; then its
        own again. UntraceableError for a buffer that it replaces meanwhile."""
        own: list[tuple[nn.Module, str, Any]] = []
        fakes: dict[str, Tensor] = {**self.parameters, **self.buffers}
        by_tensor: dict[int, Tensor] = {}
        named = [
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        ]
        for fqn, tensor in named:
            fake = by_tensor.setdefault(id(tensor), fakes.get(fqn, tensor))
            path, _, name = fqn.rpartition(".")
            own.append((self.model.get_submodule(path), name, tensor))
            setattr(self.model.get_submodule(path), name, fake)
        try:
            yield
            for fqn, buffer in self.buffers.items():
                if self.model.get_buffer(fqn) is not buffer:
                    raise refuse(
                        fqn, "a buffer that forward changes in place", "one that it replaces",
                        f"write into it, as by self.{fqn.rpartition('.')[2]}.copy_(…)",
                    )
        finally:
            for module, name, tensor in own:
                setattr(module, name, tensor)


def fake(
    model: nn.Module, inputs: Inputs, *, units: UnitChoice, dtype: Dtype | None, casts_input: bool
) -> Faked:
    """`model` and its inputs without memory. To be called in fake mode; UntraceableError for what
    cannot be traced."""
    _require_shapes(model)
    _require_local(model)
    taken = _dtype(model, dtype)
    wanted = DTYPES[taken]
    units_of_model = find_units(model, units)
    groups = param_groups(model, units_of_model)
    named = isinstance(inputs, Mapping)
    args = () if named else tuple(_input(f"inputs[{i}]", value) for i, value in enumerate(inputs))
    kwargs = (
        {key: _input(key, inputs[key]) for key in inputs} if isinstance(inputs, Mapping) else {}
    )
    if not casts_input:  # numbers of another dtype than the module's own stay as they are
        args, kwargs = mapped(
            lambda t: t.to(wanted) if t.dtype == torch.float32 else t, (args, kwargs)
        )
    return Faked(
        model=model,
        units=units_of_model,
        groups=groups,
        parameters={fqn: _fake_parameter(p, wanted) for fqn, p in model.named_parameters()},
        buffers={fqn: _fake(buffer) for fqn, buffer in model.named_buffers()},
        args=args,
        kwargs=kwargs,
        dtype=taken,
        cast=wanted if casts_input and taken != "float32" else None,
    )


REAL = "make the module beforehand, with real tensors, and give it itself"
RUN_ONCE = (
    "make the module beforehand, run it on a batch so that its lazy parameters get their shapes, "
    "and give it itself"
)
BEFOREHAND = 'make the module beforehand, as under torch.device("meta"), and give it itself'


def made(make: Any) -> nn.Module:
    """The module that `make` makes; UntraceableError for anything else."""
    expected, remedy = (
        "a module, or a function without arguments that makes one",
        "wrap it in a function without arguments, as lambda: MyModel(config)",
    )
    if not callable(make):
        raise refuse("module", expected, type(make).__name__, remedy)
    try:
        with torch_private.nothing_drawn():
            model = make()
    except UntraceableError as error:  # the examples, which it knows nothing of, would not help, nor would a module on "meta"  # noqa: E501
        raise refuse(error.where, error.expected, error.found, REAL) from error
    except ZsimError:
        raise
    except Exception as error:  # whatever a user's constructor may raise
        lines = str(error).strip().splitlines() or [""]
        raise refuse(
            "module", expected, f"{type(error).__name__}: {lines[0][:200]}",
            _other_way(error, remedy),
        ) from error
    if not isinstance(model, nn.Module):
        raise refuse("module", expected, f"one that makes {type(model).__name__}", remedy)
    return model


def _require_shapes(model: nn.Module) -> None:
    """UntraceableError for a lazy module that has not run."""
    for fqn, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise refuse(fqn, "a shape", "none yet: its module is lazy and has not run", RUN_ONCE)


def _require_local(model: nn.Module) -> None:
    """UntraceableError for a module that communicates in forward, or that no hook can watch."""
    for fqn, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise refuse(
                fqn or type(model).__name__, "modules of Python, which hooks can watch",
                "one that torch.jit has compiled", "give the module that it was made of",
            )
        if isinstance(module, nn.SyncBatchNorm):
            raise refuse(
                fqn or type(model).__name__, "modules that compute on their own rank alone",
                "SyncBatchNorm, whose collectives are no strategy's",
                "take BatchNorm, or a norm without running statistics",
            )


def _other_way(error: Exception, wrap: str) -> str:
    """The remedy for a function that did not make its module without memory; `wrap` is for one
    that asks for arguments."""
    if isinstance(error, TypeError):
        return wrap
    if "Uninitialized" in str(error):  # of a lazy module, whose first batch gives it its shapes
        return RUN_ONCE
    if "Couldn't swap" in str(error):  # torch does not change the dtype of a fake parameter
        return (
            f"leave the cast (.to, .bfloat16 and the like) out of it and give dtype=, or "
            f"{BEFOREHAND}"
        )
    return BEFOREHAND


def require_word(where: str, word: Any, known: Sequence[str]) -> None:
    """UntraceableError for a word that is not `known`."""
    if word not in known:
        raise refuse(where, listed(known), repr(word), "")


def _dtype(model: nn.Module, requested: Dtype | None) -> Dtype:
    """The dtype that its parameters are taken in; UntraceableError where they are neither all
    float32 nor all in that one."""
    own = {fqn: parameter.dtype for fqn, parameter in model.named_parameters()}
    counts = Counter(own.values())
    common, _ = next(iter(counts.most_common(1)), (DTYPES["float32"], 0))
    if len(counts) > 1:
        odd, other = next((fqn, dtype) for fqn, dtype in own.items() if dtype != common)
        remedy = f"mixed dtypes are not modelled: {_cast_first(other)}"
        raise refuse(
            odd, f"parameters of one dtype, as most are {_word(common)}", _word(other), remedy
        )
    names = {dtype: cast(Dtype, word) for word, dtype in DTYPES.items()}
    if common in names and requested in (None, names[common]):
        return names[common]
    if common == torch.float32 and requested is not None:
        return requested
    known = (
        listed(DTYPES)
        if requested is None
        else listed(dict.fromkeys((requested, "float32")))
    )
    remedy = _cast_first(common)
    if common in names:
        remedy = (
            f"cast the module, or ask for {_word(common)}: precision.parameters of a scenario, "
            f"dtype= of trace"
        )
    raise refuse(next(iter(own)), f"parameters in {known}", _word(common), remedy)


def _cast_first(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "cast the module first, as by .float()"
    return "make it a buffer, which no strategy shards, or real numbers"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fake_parameter(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(
        torch.empty(parameter.shape, dtype=dtype), requires_grad=parameter.requires_grad
    )


def _fake(tensor: Tensor) -> Tensor:
    # channels of images may come last
    stand_in = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    tell(stand_in, tensor)
    return stand_in


def _input(where: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise refuse(
                where, "an input that needs no gradient", "one with requires_grad=True",
                "give it detached",
            )
        return _fake(value)
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype | str):
        shape, dtype = value
        kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if not isinstance(kind, torch.dtype):
            raise refuse(where, "a dtype of torch", repr(dtype), 'write it as "int64"')
        sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
        if not all(isinstance(size, int) and size >= 0 for size in sizes):
            raise refuse(where, "a shape of whole numbers, none below 0", repr(shape), "")
        return torch.empty(sizes, dtype=kind)
    return value


def default_batch(step: Faked) -> Batch:
    """Dim 0 of the first input, and dim 1 if it holds tokens."""
    first = next(tensors_in((step.args, step.kwargs)), None)
    if first is None or not first.dim():
        raise refuse(
            "inputs", "a tensor with a batch dimension", "none",
            "make dim 0 of the first input the batch, or give trace batch="
        )
    tokens = not first.is_floating_point() and first.dim() > 1
    return Batch(micro_batch=first.shape[0], sequence_length=first.shape[1] if tokens else 1)
