"""A user's own module, made by a function that the user names: `mypackage.mymodel:build`.

It is loaded only where a command line or a call names it. No scenario file can: files are
untrusted, and to import a module is to run it.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from zreal.modules.initial_values import DTYPES, generator_of
from zreal.modules.own.deferred import Deferred, recording
from zreal.modules.own.user_code import user_code_error
from zsim.autograd.traced.model import TracedModel
from zsim.errors import ArgumentError, listed
from zsim.io.system.signals import handlers_kept

KEYS = ("module", "inputs", "loss", "units")
DEFERRED = "_zreal_deferred"
"""Attribute of a module on the meta device that has the values of its parameters."""
EXAMPLE = "zreal/README.md has an example"
RETURNS = "a dict with module and inputs, and perhaps loss and units"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnModule:
    """The answer of the user's function, and how to ask it again."""

    name: str
    make: Callable[[int], nn.Module]
    """The module from a seed, the same on every rank: on the meta device unless it is built whole.
    """
    whole: str
    """The reason for which it is built whole; "" where it is not."""
    inputs: Mapping[str, Tensor] | tuple[Tensor, ...]
    """One micro-batch, by name or by position. Those of ranks and steps are drawn after it."""
    loss: Callable[[Any], Tensor]
    """The loss of the module's output."""
    units: Sequence[str] | Callable[[str, nn.Module], bool] | None

    def batch(self, *key: int, dtype: str) -> tuple[Tensor, ...]:
        """The micro-batch of a key: numbers are normally distributed, integers are those of
        `inputs` in another order. `dtype` is that of float32 ones."""
        generator = generator_of(*key)
        shapes = self.inputs.values() if isinstance(self.inputs, Mapping) else self.inputs
        return tuple(_drawn(tensor, generator, DTYPES[dtype]) for tensor in shapes)

    def loss_of(self, module: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """The loss of `module`, wrapped or not, on one micro-batch."""
        if isinstance(self.inputs, Mapping):
            return self.loss(module(**dict(zip(self.inputs, batch, strict=True))))
        return self.loss(module(*batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnModel(TracedModel):
    """A traced model with the module beside it, so that it can be run for real."""

    own: OwnModule = field(compare=False, repr=False)
    made_whole: bool = False
    draws: bool = field(default=False, compare=False, repr=False)
    """True where forward draws random numbers, as dropout does: on each rank others than one
    process."""


def draws(own: OwnModule, traced: TracedModel, *, seed: int) -> bool:
    """True where the forward of the module draws random numbers.

    Its kernels tell. Fused attention on CUDA draws or does not, so a module with it is run once.
    """
    kernels = {kernel.operator for module in traced.lowered for kernel in module.forward.kernels}
    drawing = {name for name in kernels if _draws(name) and not name.endswith("_for_cpu")}
    if any("attention" not in name for name in drawing):
        return True
    return bool(drawing) and _draws_when_run(own, seed)


def _draws(operator: str) -> bool:
    packet = getattr(torch.ops.aten, operator, None)
    return packet is not None and any(
        torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags
        for overload in packet.overloads()
    )


def _draws_when_run(own: OwnModule, seed: int) -> bool:
    module = load(own.name, whole="to be run").make(seed)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        own.loss_of(module, own.batch(seed, dtype="float32"))
        return not torch.equal(before, torch.get_rng_state())


@handlers_kept()
def load(name: str, *, whole: str = "") -> OwnModule:
    """The user's own module; ArgumentError where `name` says none, or what it names is none.

    `whole`: a reason to build it whole. Without one it is so where the meta device cannot do.
    """
    if not isinstance(name, str):  # of a notebook
        raise ArgumentError(
            where="module", found=f"a {type(name).__name__}",
            expected="a function's name, as mypackage.mymodel:build, which each rank imports",
        )
    path, _, attribute = name.partition(":")
    if not attribute or not all(part.isidentifier() for part in path.split(".")):
        raise _unfit(name, "a function as mypackage.mymodel:build", name[:60])
    if "" not in sys.path:
        sys.path.insert(0, "")  # the folder that the command runs in, as python -m has it
    build = None
    try:
        build = getattr(import_module(path), attribute)
        try:
            answer = _answer(build, 0, name, whole=bool(whole))
        except Exception as error:  # whatever a user's code may raise that reads no values
            if whole:
                raise
            whole = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
            answer = _answer(build, 0, name, whole=True)
    except ArgumentError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's code may raise
        raise user_code_error(
            name, "a function that can be called", error, remedy=_remedy(error, path), code=build
        ) from error
    inputs = answer["inputs"]
    return OwnModule(
        name=name, whole=whole,
        make=lambda seed: _module(_answer(build, seed, name, whole=bool(whole)), name),
        inputs=dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs),
        loss=answer.get("loss") or _loss, units=answer.get("units"),
    )


def _remedy(error: BaseException, path: str) -> str:
    missing = isinstance(error, ModuleNotFoundError) and error.name
    if missing and (path == missing or path.startswith(f"{missing}.")):
        return (
            f"start it in the folder that has {missing}, or install it, on "
            f"{socket.gethostname()} too"
        )
    return EXAMPLE


@handlers_kept()
def _answer(build: Any, seed: int, name: str, *, whole: bool) -> Mapping[str, Any]:
    """The answer of the user's function, from the same random numbers on every rank."""
    deferred = Deferred(seed)
    with (
        torch.random.fork_rng(devices=[]), nullcontext() if whole else recording(deferred)
    ):
        torch.manual_seed(seed)
        answer = build()
    _require_answer(answer, name)
    if whole:
        return answer
    module = _module(answer, name)
    deferred.fill_rest(module)
    deferred.keep_parameters(module)
    object.__setattr__(module, DEFERRED, deferred)
    return {**answer, "inputs": deferred.filled(answer["inputs"])}


def _require_answer(answer: Any, name: str) -> None:
    """ArgumentError where the user's function answers something else."""
    if not isinstance(answer, Mapping):
        raise _unfit(name, RETURNS, type(answer).__name__)
    if missing := {"module", "inputs"} - set(answer):
        raise _unfit(name, RETURNS, f"one without {listed(sorted(missing))}")
    if unknown := sorted(set(answer) - set(KEYS)):
        raise _unfit(name, RETURNS, str(unknown[0])[:60])
    inputs = answer["inputs"]
    tensors = list(inputs.values()) if isinstance(inputs, Mapping) else inputs
    if not isinstance(tensors, list | tuple) or not tensors:
        raise _unfit(name, "inputs as a list or a dict of tensors", type(inputs).__name__)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise _unfit(name, "inputs that are tensors", type(tensor).__name__)


def _module(answer: Mapping[str, Any], name: str) -> nn.Module:
    module = answer["module"]
    if not isinstance(module, nn.Module):
        raise _unfit(name, "an nn.Module", type(module).__name__)
    return module


def _loss(output: Any) -> Tensor:
    """`output.loss`, a scalar itself, or the sum of a tensor, as the tracer takes it."""
    own = getattr(output, "loss", None)
    value: Tensor = own if isinstance(own, Tensor) else output
    if not isinstance(value, Tensor):
        raise TypeError(
            f'an output that is a {type(value).__name__} needs a loss: "loss": lambda output: …'
        )
    return value if value.numel() == 1 else value.float().sum()


def _drawn(like: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Values like those of `like`, in its layout. Operators copy inputs by how these lie."""
    once = like[tuple(slice(1 if step == 0 else None) for step in like.stride())]
    if like.is_floating_point():
        values = torch.randn(once.shape, generator=generator).to(
            dtype if like.dtype == torch.float32 else like.dtype
        )
    else:
        order = torch.randperm(once.numel(), generator=generator)
        values = once.flatten()[order].reshape(once.shape)
    laid = torch.empty_strided(once.shape, once.stride(), dtype=values.dtype)
    return laid.copy_(values).expand(like.shape)


def _unfit(name: str, expected: str, found: str) -> ArgumentError:
    return ArgumentError(
        where=f"module {name[:60]}", expected=expected, found=found,
        remedy=EXAMPLE,
    )
