"""A module without its memory: fake parameters, buffers and inputs in place of its own, and its
parameters by unit."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from zreal import torch_private
from zreal.modules.initial_values import DTYPES
from zreal.tracing.errors import UntraceableError
from zreal.tracing.fakes.known_values import tell
from zreal.tracing.unit_hooks import cast_floats, tensors_in
from zsim.io.json_reader import is_name
from zsim.io.units import format_bytes
from zsim.models.spec import ROOT, Parameter, ParamGroup
from zsim.models.training_options import Batch, Dtype

Units = Sequence[str] | Callable[[str, nn.Module], bool] | None
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
        own again."""
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
        finally:
            for module, name, tensor in own:
                setattr(module, name, tensor)


def fake(
    model: nn.Module, inputs: Inputs, *, units: Units, dtype: Dtype | None, casts_input: bool
) -> Faked:
    """`model` and its inputs without memory. To be called in fake mode; UntraceableError for what
    cannot be traced."""
    _require_shapes(model)
    taken = _dtype(model, dtype)
    wanted = DTYPES[taken]
    found = _find_units(model, units)
    groups = _groups(model, found)
    named = isinstance(inputs, Mapping)
    args = () if named else tuple(_input(f"inputs[{i}]", value) for i, value in enumerate(inputs))
    kwargs = (
        {key: _input(key, inputs[key]) for key in inputs} if isinstance(inputs, Mapping) else {}
    )
    if not casts_input:
        args, kwargs = cast_floats((args, kwargs), wanted)
    return Faked(
        model=model,
        units=found,
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
    """What `make` makes; UntraceableError for anything but a module."""
    expected, remedy = (
        "a module, or a function without arguments that makes one",
        "wrap it: lambda: MyModel(config)",
    )
    if not callable(make):
        raise refuse("module", expected, type(make).__name__, remedy)
    try:
        with torch_private.nothing_drawn():
            model = make()
    except UntraceableError as error:  # the examples, which it knows nothing of, would not help, nor would a module on "meta"  # noqa: E501
        raise refuse(error.where, error.expected, error.found, REAL) from error
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


def _other_way(error: Exception, wrap: str) -> str:
    """What to do about a function that did not make its module without memory; `wrap` is for one
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


def require_word(where: str, word: Any, words: Sequence[str]) -> None:
    """UntraceableError for a word that is none of `words`."""
    if word not in words:
        raise refuse(where, f"one of {', '.join(words)}", repr(word), "")


def _dtype(model: nn.Module, asked: Dtype | None) -> Dtype:
    """The dtype that its parameters are taken in; UntraceableError where they are neither all
    float32 nor all in that one."""
    own = {fqn: parameter.dtype for fqn, parameter in model.named_parameters()}
    counts = Counter(own.values())
    common, _ = next(iter(counts.most_common(1)), (DTYPES["float32"], 0))
    if len(counts) > 1:
        odd, found = next((fqn, dtype) for fqn, dtype in own.items() if dtype != common)
        remedy = f"mixed dtypes are not modelled: {_cast_first(found)}"
        raise refuse(
            odd, f"parameters of one dtype, as most are {_word(common)}", _word(found), remedy
        )
    words = {dtype: cast(Dtype, word) for word, dtype in DTYPES.items()}
    if common in words and asked in (None, words[common]):
        return words[common]
    if common == torch.float32 and asked is not None:
        return asked
    known = (
        f"one of {', '.join(DTYPES)}"
        if asked is None
        else " or ".join(dict.fromkeys((asked, "float32")))
    )
    remedy = (
        "leave dtype= out, or cast the module first" if common in words else _cast_first(common)
    )
    raise refuse(next(iter(own)), f"parameters in {known}", _word(common), remedy)


def _cast_first(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "cast the module first, as by .float(), and give dtype="
    return "make it a buffer, which no strategy shards, or real numbers"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fake_parameter(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(
        torch.empty(parameter.shape, dtype=dtype), requires_grad=parameter.requires_grad
    )


def _fake(tensor: Tensor) -> Tensor:
    # channels of images may come last
    found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    tell(found, tensor)
    return found


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
            "inputs", "a tensor with a batch dimension", "none", "give batch=Batch(micro_batch=…)"
        )
    tokens = not first.is_floating_point() and first.dim() > 1
    return Batch(micro_batch=first.shape[0], sequence_length=first.shape[1] if tokens else 1)


def _find_units(model: nn.Module, units: Units) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    if units is None:
        return _default_units(model, modules)
    wanted = (
        [fqn for fqn, module in modules.items() if fqn and units(fqn, module)]
        if callable(units)
        else list(units)
    )
    for fqn in wanted:
        if fqn not in modules or fqn == ROOT:
            raise refuse(
                fqn, "the fqn of a module in the model", "none of that name",
                "see model.named_modules()",
            )
    return {fqn: module for fqn, module in modules.items() if fqn in wanted}


def _default_units(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    lists = [(fqn, module) for fqn, module in modules.items() if isinstance(module, nn.ModuleList)]
    if lists:
        fqn, longest = max(lists, key=lambda item: len(item[1]))
        return {f"{fqn}.{i}" if fqn else str(i): child for i, child in enumerate(longest)}
    nbytes = total(model.parameters())
    warnings.warn(
        f"{type(model).__name__} has no ModuleList: the whole model is one unit, so that sharded "
        f"strategies gather all of "
        f"its parameters at once ({format_bytes(nbytes)} as they are) and communicate only before "
        f"and after it; name units=",
        stacklevel=4,
    )
    return {}


def _groups(model: nn.Module, units: Mapping[str, nn.Module]) -> tuple[ParamGroup, ...]:
    """The root's parameters, then each unit's; UntraceableError for one that two of them share, and
    for a unit without any."""
    owners: dict[int, str] = {}
    for fqn, unit in units.items():
        own = [
            (name, p)
            for name, p in unit.named_parameters()
            if _innermost(f"{fqn}.{name}", units) == fqn
        ]
        if not own:
            raise refuse(
                fqn, "a unit with parameters of its own", "none",
                "leave it out of units: it then belongs to what contains it",
            )
        for name, parameter in own:
            _require_own(owners.get(id(parameter), fqn), fqn, name)
            owners[id(parameter)] = fqn
    members: dict[str, list[Parameter]] = {fqn: [] for fqn in (ROOT, *units)}
    for fqn, parameter in _in_order_of_fully_shard(model):
        if not is_name(fqn):
            raise refuse(
                repr(fqn), "a name without blanks, commas and bars", "another one",
                "rename the module",
            )
        if not parameter.is_contiguous():
            raise refuse(
                fqn,
                "a contiguous parameter, as fully_shard takes alone",
                "one with its dimensions in another order in memory, as "
                ".to(memory_format=torch.channels_last) makes it",
                "leave that out of the module; its inputs may have channels that come last",
            )
        if not parameter.shape:
            raise refuse(
                fqn, "a parameter of at least one dimension, as fully_shard does", "a scalar",
                "give it the shape (1,)",
            )
        found = Parameter(
            fqn=fqn, shape=tuple(parameter.shape), requires_grad=parameter.requires_grad
        )
        members[owners.get(id(parameter), ROOT)].append(found)
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        owner = owners.get(id(parameter), ROOT)
        if owner != ROOT:
            _require_own(owner, _innermost(fqn, units), fqn)
    if not any(members.values()):
        raise refuse(
            type(model).__name__, "a module with parameters", "none", "there is nothing to shard"
        )
    return tuple(ParamGroup(fqn=fqn, parameters=tuple(own)) for fqn, own in members.items() if own)


def _innermost(fqn: str, units: Iterable[str]) -> str:
    """The unit that the parameter `fqn` lies in, the inner one of several, or the root."""
    return max((unit for unit in units if fqn.startswith(f"{unit}.")), key=len, default=ROOT)


def _in_order_of_fully_shard(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """`named_parameters()`, but those of a module after those of its children."""
    names = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    seen: set[nn.Module] = set()

    def own(module: nn.Module) -> Iterator[nn.Parameter]:
        seen.add(module)
        for child in module.children():
            if child not in seen:
                yield from own(child)
        yield from module.parameters(recurse=False)

    for parameter in own(model):
        if id(parameter) in names:
            yield names.pop(id(parameter)), parameter


def _require_own(owner: str, unit: str, parameter: str) -> None:
    if owner != unit:
        remedy = "tie weights inside one unit only, or leave both modules to the root"
        raise refuse(
            parameter, "a parameter of one unit", f"one tied between {owner} and {unit}", remedy
        )


def total(tensors: Any) -> int:
    """Bytes of the elements of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def refuse(where: str, expected: str, found: str, remedy: str) -> UntraceableError:
    """The error to raise; its four parts."""
    return UntraceableError(where=where, expected=expected, found=found, remedy=remedy)
