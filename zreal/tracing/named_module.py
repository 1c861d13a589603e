"""A module by its name, traced: one of the user's, or one that transformers makes of a config.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from zreal.modules.own.user_code import add_location, user_code_error
from zreal.tracing.errors import UntraceableError
from zreal.tracing.fakes.autocast_names import AutocastNames
from zreal.tracing.trace import trace
from zsim.autograd.traced.model import TracedModel
from zsim.autograd.traced.traced_file import MAX_SIZES
from zsim.errors import ArgumentError, BackendUnavailableError, listed
from zsim.models.checkpointing import Checkpointing
from zsim.models.training_options import Batch, Device, Dtype

HUB = "hf:"
"""Beginning of the name of a config.json whose module transformers makes."""
DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "bool")
SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Words of the other options and of scenarios."""
MOST_ELEMENTS = 2**40
MICRO_BATCH, LENGTH = "B", "S"
"""Letters in the shape of an input: its sizes are --micro-batch and --sequence-length."""


def trace_named(
    name: str, inputs: Sequence[str], *, dtype: Dtype | None,
    autocast: Dtype | Literal["none"] = "none", device: Device, recomputed: bool,
    micro_batches: Sequence[int] = (), lengths: Sequence[int] = (),
    units: Sequence[str] | None = None,
) -> tuple[TracedModel, ...]:
    """The trace of `mine:MyModel` or `hf:config.json` on inputs as "2x2048:int64", or one for each
    size on inputs as "BxS:int64". An input may have a name before an equals sign.

    `recomputed`: its units are traced recomputed as well. `units`: their fqns, as layers.*.
    ArgumentError where there is no such module; UntraceableError where it cannot be traced.
    """
    marked = _marks(inputs)
    sizes = _sizes(marked, micro_batches=micro_batches, lengths=lengths)
    ways = (Checkpointing(mode="full"),) if recomputed else ()
    short = Path(name.removeprefix(HUB)).stem if name.startswith(HUB) else name.rpartition(":")[2]
    models = []
    for size in sizes:
        shapes = [_input(text, size) for text in inputs]
        if name.startswith(HUB):
            make, arguments = _of_transformers(name.removeprefix(HUB), shapes)
        else:
            make, arguments = _of_user(name, device), _arguments(shapes)
        try:
            models.append(trace(
                partial(_made, make, name), arguments, units=units, dtype=dtype,
                autocast=autocast, device=device, checkpointing=ways, name=short,
                batch=Batch(micro_batch=size[MICRO_BATCH], sequence_length=size.get(LENGTH, 1))
                if size else None,
            ))
        except UntraceableError as error:
            constructs = error.where == "module"
            add_location(error, None if constructs else getattr(make, "forward", None))
            raise
    return tuple(models)


def _marks(inputs: Sequence[str]) -> set[str]:
    """The letters that stand for sizes in the inputs."""
    parts = {part for text in inputs for part in _parts(text)[1]}
    return parts & {MICRO_BATCH, LENGTH}


def _sizes(
    marked: set[str], *, micro_batches: Sequence[int], lengths: Sequence[int]
) -> list[dict[str, int]]:
    """Each letter's size for every trace; one empty table where no input has a letter."""
    options = (
        (MICRO_BATCH, "--micro-batch", micro_batches), (LENGTH, "--sequence-length", lengths),
    )
    for letter, option, values in options:
        if bool(values) != (letter in marked):
            raise ArgumentError(
                where=option if letter in marked else "--input",
                expected=f"sizes of {letter} in the inputs, as {option} 1,2,4" if letter in marked
                else f"{letter} in an input's shape beside {option}, as BxS:int64",
                found="none",
            )
        if any(type(value) is not int or value < 1 for value in values):
            raise ArgumentError(where=option, expected="numbers from 1 on", found=str(values)[:60])
    if LENGTH in marked and MICRO_BATCH not in marked:
        raise ArgumentError(
            where="--input", expected="B in an input's shape beside S, as BxS:int64", found="none"
        )
    chosen = {letter: sorted(set(values)) for letter, _, values in options if values}
    sizes = [dict(zip(chosen, size, strict=True)) for size in product(*chosen.values())]
    if len(sizes) > MAX_SIZES:
        raise ArgumentError(
            where="sizes", expected=f"at most {MAX_SIZES} traces in a file", found=str(len(sizes))
        )
    return sizes


def _of_user(name: str, device: Device) -> Callable[[], nn.Module]:
    """The class or function that makes the user's module. Decorators of its forward are made as on
    `device`."""
    path, _, attribute = name.partition(":")
    if not attribute or not all(part.isidentifier() for part in (*path.split("."), attribute)):
        raise ArgumentError(
            where="module", expected="mymodel:MyModel, or hf:config.json", found=name[:60]
        )
    if "" not in sys.path:
        sys.path.insert(0, "")  # the folder that the command runs in, as python -m has it
    try:
        with AutocastNames(device):
            make = getattr(import_module(path), attribute)
    except (Exception, SystemExit) as error:  # whatever a user's code may raise
        raise user_code_error(
            name, "a module of Python that can be imported", error,
            remedy="start it in the folder that has it",
        ) from error
    if not callable(make):
        raise ArgumentError(
            where=f"module {name[:60]}", expected="a class or function without arguments",
            found=type(make).__name__,
        )
    return make


def _made(make: Callable[[], Any], name: str) -> nn.Module:
    with torch.device("meta"):  # no memory, whatever its size
        module = make()
    if not isinstance(module, nn.Module):
        raise ArgumentError(
            where=f"module {name[:60]}", expected="a torch.nn.Module", found=type(module).__name__,
            remedy="name its class, or a function without arguments that returns it alone",
        )
    return module


def _of_transformers(
    path: str, shapes: Sequence[tuple[str, tuple[int, ...], torch.dtype]]
) -> tuple[Callable[[], nn.Module], Mapping[str, Any]]:
    """The module of a config.json, and its inputs: tokens, and labels of the same shape."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise BackendUnavailableError(
            where=f"module {HUB}{path[:60]}", expected="transformers, which makes the module",
            found="no transformers", remedy="pip install 'zsim[huggingface]'",
        ) from None
    file = Path(path)
    if not file.is_file():
        raise ArgumentError(
            where=f"module {HUB}{path[:60]}", expected="a config.json", found="no such file"
        )
    try:
        config = AutoConfig.from_pretrained(str(file), local_files_only=True)
    except Exception as error:  # transformers raises what it likes
        line = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ArgumentError(
            where=f"module {HUB}{path[:60]}", expected="a config.json of a causal language model",
            found=line,
        ) from None
    config.use_cache = False
    if len(shapes) != 1 or len(shapes[0][1]) != 2:
        raise ArgumentError(
            where="--input", expected="one shape of tokens with a config.json, as 2x2048",
            found=str(len(shapes)),
        )
    shape = shapes[0][1]
    inputs = {"input_ids": (shape, torch.int64), "labels": (shape, torch.int64)}
    return lambda: AutoModelForCausalLM.from_config(config), inputs


def _arguments(shapes: Sequence[tuple[str, tuple[int, ...], torch.dtype]]) -> Any:
    """Inputs by position, or by name where each has one."""
    if all(name for name, _, _ in shapes):
        return {name: (shape, dtype) for name, shape, dtype in shapes}
    if any(name for name, _, _ in shapes):
        raise ArgumentError(
            where="--input", expected="a name of every input, or of none", found="of some"
        )
    return [(shape, dtype) for _, shape, dtype in shapes]


def _parts(text: str) -> tuple[str, list[str], str]:
    """Name, sizes and dtype of an input as text."""
    name, equals, rest = text.partition("=")
    sizes, _, dtype = (rest if equals else text).partition(":")
    return (name if equals else ""), sizes.split("x"), SHORT.get(dtype, dtype) or "int64"


def _input(text: str, size: Mapping[str, int]) -> tuple[str, tuple[int, ...], torch.dtype]:
    """Name, shape and dtype of an input, from "tokens=2x2048:int64"; `size` has the letters'."""
    name, parts, dtype = _parts(text)
    shape = [str(size.get(part, part)) for part in parts]
    numel = 1
    for part in shape:
        numel *= int(part) if part.isascii() and part.isdigit() and len(part) < 12 else 0
    if not 0 < numel <= MOST_ELEMENTS or dtype not in DTYPES:
        raise ArgumentError(
            where="--input", expected=f"sizes and a dtype of {listed(DTYPES)}, as 2x2048:int64 "
                                      f"or, for several sizes, BxS:int64",
            found=text[:60],
        )
    kind: torch.dtype = getattr(torch, dtype)
    return name, tuple(map(int, shape)), kind
