"""Bytes that torch's allocator was asked for, measured where operators are dispatched.

The meter sees every storage that an operator returns, `UntypedStorage.resize_` (which is how FSDP2
frees and allocates unsharded parameters), and the end of each storage's life. It does not see
scratch inside an operator. What a collective of gloo leaves to its `wait()` is such scratch too,
and kept apart in `scratch`: a reduce-scatter is an all-reduce of a copy, from which `wait()` cuts
the result. On a CUDA device the same bytes are what `memory_allocated` counts before rounding. It
must not know strategies.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from zreal import torch_private
from zsim.ir.program import PartName
from zsim.ir.run import MemoryRecord, PartRecord


@dataclass(slots=True)
class Span:
    """Allocated bytes of a stretch of the run, and of the parts of a step in it, once it is over.
    """

    start: int
    peak: int = 0
    end: int = 0
    parts: tuple[PartRecord, ...] = ()


class MemoryMeter(TorchDispatchMode):
    """Counts live bytes of storages made while it is active; `watch` adds ones made before.

    `allocated` is the running total, `peak` the largest total since the last `reset_peak`, `events`
    the deltas in order when `log` is asked for. Storages of fake or meta tensors count nothing.
    """

    def __init__(self, *, log: bool = False) -> None:
        super().__init__()
        self.allocated = 0
        self.peak = 0
        self.events: list[tuple[str, int]] | None = [] if log else None
        self._live: dict[int, int] = {}
        self.scratch: list[int] = []
        """Bytes of what was first seen while a collective was waited for, in order."""
        self._away = False
        self._waiting = False
        self._parts: list[PartRecord] = []
        """Of the span so far; the last one is not over."""

    def begin(self, part: PartName, *, micro_batch: int = 0) -> None:
        """What is allocated from here on, in the span that there is, belongs to this part of a
        step."""
        self._parts.append(PartRecord(part, micro_batch, self.allocated, self.allocated))

    def _grow_part(self) -> None:
        """The last part has peaked where bytes are now, if that is higher."""
        if self._parts and self._parts[-1].peak_bytes < self.allocated:
            self._parts[-1] = replace(self._parts[-1], peak_bytes=self.allocated)

    def reset_peak(self) -> None:
        """Start a new peak at what is allocated now."""
        self.peak = self.allocated

    def watch(self, *tensors: torch.Tensor) -> None:
        """Count the storages of `tensors` from now on."""
        for tensor in tensors:
            self._register(tensor, "watch")

    def _change(self, delta: int, label: str) -> None:
        if delta:
            self.allocated += delta
            self.peak = max(self.peak, self.allocated)
            self._grow_part()
            if self.events is not None:
                self.events.append((label, delta))

    def _register(self, value: object, label: str) -> None:
        if isinstance(value, list | tuple):
            for item in value:
                self._register(item, label)
        elif isinstance(value, torch.Tensor):
            if is_traceable_wrapper_subclass(value):
                names, _ = value.__tensor_flatten__()
                for name in names:
                    self._register(getattr(value, name), label)
            elif value.device.type != "meta" and not torch_private.is_fake(value):
                self._register_storage(value.untyped_storage(), label)

    def _register_storage(self, storage: torch.UntypedStorage, label: str) -> None:
        key = id(storage)
        if key not in self._live:
            if self._waiting:
                self.scratch.append(storage.nbytes())
            nbytes = 0 if self._away or self._waiting else storage.nbytes()
            self._live[key] = nbytes
            weakref.finalize(storage, self._forget, key, label).atexit = False
            self._change(nbytes, label)

    def _forget(self, key: int, label: str) -> None:
        self._change(-self._live.pop(key, 0), f"free {label}")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(torch_private.is_dtensor_type(kind) for kind in types):
            # let DTensor turn into operators on local tensors first, then see those
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self._register(result, func.name())
        return result

    def __enter__(self) -> MemoryMeter:
        self._original_resize = torch.UntypedStorage.resize_
        meter, original = self, self._original_resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = cast(Any, original)(storage, size)
            key = id(storage)
            if key not in meter._live:
                meter._register_storage(storage, "resize_")
            else:
                before, meter._live[key] = meter._live[key], storage.nbytes()
                meter._change(storage.nbytes() - before, "resize_")
            return result

        def wait(work: dist.Work, *arguments: Any, **options: Any) -> Any:
            meter._waiting = True
            try:
                return cast(Any, meter._original_wait)(work, *arguments, **options)
            finally:
                meter._waiting = False

        self._original_wait, dist.Work.wait = dist.Work.wait, wait  # type: ignore[method-assign, assignment]
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        torch.UntypedStorage.resize_ = self._original_resize  # type: ignore[method-assign]
        dist.Work.wait = self._original_wait  # type: ignore[method-assign]

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Storages made inside, and views of them made later, count nothing."""
        before, peak, events, parts = self.allocated, self.peak, self.events, list(self._parts)
        self._away = True
        self.events = None
        yield
        self._away = False
        self.allocated, self.peak, self.events, self._parts = before, peak, events, parts

    @contextmanager
    def span(self) -> Iterator[Span]:
        """A stretch of the run: the yielded span gets its bytes, and those of the parts that began
        in it, when it closes."""
        span = Span(start=self.allocated)
        self.reset_peak()
        self._parts = []
        yield span
        span.peak, span.end, span.parts = self.peak, self.allocated, tuple(self._parts)


def as_record(span: Span, held: Mapping[str, int] | None = None) -> MemoryRecord:
    """A span as a Run has it, with what the rank held by kind where that is known."""
    return MemoryRecord(
        start_bytes=span.start, peak_bytes=span.peak, end_bytes=span.end, held=held or {},
        parts=span.parts,
    )
