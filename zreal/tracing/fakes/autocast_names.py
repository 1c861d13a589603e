"""Names of torch by which a module enters CUDA's autocast or asks for it, on fake tensors of a CPU.

A torch without CUDA turns torch.autocast("cuda") off, and a trace's tensors are a CPU's. So inside
a trace for CUDA the autocast of "cuda" is that of "cpu", as which it is traced. It knows no
operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from zreal import torch_private
from zreal.tracing.errors import refuse
from zsim.models.training_options import Device

_ASKED = (
    "is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype",
)
"""Functions of torch whose first argument is a type of device: without one it is "cuda"."""
_DEVICES = ("cuda", "cpu")


class AutocastNames:
    """Inside, autocast is off at first, and for CUDA has CUDA's default dtype. `seen`: a module has
    turned it on.

    `in_order` calls what clears autocast's cache, which torch frees in the order of addresses.
    """

    def __init__(
        self, device: Device, *, in_order: Callable[[Callable[[], None]], None] | None = None
    ) -> None:
        self.seen = False
        self._device: Device = device
        self._in_order = in_order

    def __enter__(self) -> None:
        enable, set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype
        with ExitStack() as stack:
            stack.callback(enable, "cpu", torch.is_autocast_enabled("cpu"))
            stack.callback(set_dtype, "cpu", torch.get_autocast_dtype("cpu"))
            enable("cpu", False)
            if self._device == "cuda":
                set_dtype("cpu", torch.get_autocast_dtype("cuda"))
                stack.enter_context(torch_private.inputs_cast_by_custom_fwd())
            for owner, name, replacement in self._replacements():
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, replacement)
            self._undo = stack.pop_all()

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _replacements(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        autocast, on_cuda = torch.autocast, self._device == "cuda"
        yield autocast, "__init__", self._made(autocast.__init__, on_cuda=on_cuda)
        yield autocast, "__enter__", self._entered(autocast.__enter__, on_cuda=on_cuda)
        if self._in_order is not None:
            clear = partial(self._in_order, torch.clear_autocast_cache)
            yield torch, "clear_autocast_cache", clear
        if on_cuda:
            for name in _ASKED:
                yield torch, name, _asked_of_cpu(getattr(torch, name))
            yield torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cuda")

    def _made(self, original: Callable[..., None], *, on_cuda: bool) -> Callable[..., None]:
        """`torch.autocast.__init__`, which on CUDA takes any dtype."""

        def made(
            context: Any, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True,
            cache_enabled: bool | None = None,
        ) -> None:
            self.seen |= enabled and device_type in _DEVICES
            if not on_cuda or device_type not in _DEVICES:
                original(context, device_type, dtype, enabled, cache_enabled)
                return
            original(context, "cpu", torch.bfloat16, enabled, cache_enabled)
            context.fast_dtype = dtype or torch.get_autocast_dtype("cuda")

        return made

    def _entered(self, original: Callable[..., Any], *, on_cuda: bool) -> Callable[..., Any]:
        """`torch.autocast.__enter__`, which on CUDA refuses what was made before on a torch without
        CUDA."""

        def entered(context: Any) -> Any:
            if on_cuda and context.device == "cuda":
                raise refuse(
                    'torch.autocast("cuda")', "one that is made while the module is traced",
                    "one that was made before, as by a decorator, where torch may have turned it "
                    "off", "write with torch.autocast(…) inside forward, or trace it by zsim trace",
                )
            self.seen |= context._enabled and context.device in _DEVICES
            return original(context)

        return entered


def _asked_of_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch that answers of a CPU what it is asked of CUDA."""

    def asked(*args: Any, **options: Any) -> Any:
        if options.get("device_type") == "cuda":
            return original(*args, **{**options, "device_type": "cpu"})
        if args and isinstance(args[0], str):
            return original("cpu" if args[0] == "cuda" else args[0], *args[1:], **options)
        return original(*(() if options else ("cpu",)), *args, **options)

    return asked
