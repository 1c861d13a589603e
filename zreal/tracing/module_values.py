"""Tensors nested in arguments and outputs of modules: tuples, lists, mappings and dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with every tensor in its tuples, lists, dicts and dataclasses mapped."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(function, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(function, item) for item in value)
    if type(value) is dict:
        return {key: mapped(function, item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, Mapping | type):
        value = copy(value)
        for slot in fields(value):
            object.__setattr__(value, slot.name, mapped(function, getattr(value, slot.name)))
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a module's arguments or output: tuples, lists, mappings, ModelOutput among
    them, and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for slot in fields(value):
            yield from tensors_in(getattr(value, slot.name))


def cast_floats(value: Any, dtype: torch.dtype | None) -> Any:
    """`value` with floating-point tensors in `dtype`, as fully_shard casts a module's inputs; None
    casts nothing."""
    if dtype is None:
        return value
    return mapped(lambda t: t.to(dtype) if t.is_floating_point() else t, value)
