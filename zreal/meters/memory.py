"""Bytes requested of torch's allocator, counted where torch dispatches operators.

The meter sees every storage that an operator returns, each `UntypedStorage.resize_` (with which
FSDP2 allocates and frees unsharded parameters), and the end of each storage's life. It does not see
scratch memory inside an operator.

Memory that a gloo collective allocates in `wait()` is such scratch, listed apart in `scratch`.
Gloo's reduce-scatter all-reduces a copy, from which `wait()` cuts the result. On a CUDA device the
same bytes are `memory_allocated` before rounding; host memory is not counted there, such as AdamW's
step counters. The meter must not know strategies.
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
class MeteredSpan:
    """Allocated bytes of a span of the run and of the step's parts in it; complete at its end."""

    start: int
    peak: int = 0
    end: int = 0
    parts: tuple[PartRecord, ...] = ()


class MemoryMeter(TorchDispatchMode):
    """Counts live bytes of storages allocated while it is active; `watch` adds earlier ones.

    `allocated` is the running total, `peak` the largest total since the last `reset_peak`. With
    `log`, `events` lists the changes in order. Storages of fake tensors and of devices other than
    `device` count nothing.
    """

    def __init__(self, *, device: str = "cpu", log: bool = False) -> None:
        super().__init__()
        self._device = torch.device(device).type
        self.allocated = 0
        self.peak = 0
        self.events: list[tuple[str, int]] | None = [] if log else None
        self._live: dict[int, int] = {}
        self.scratch: list[int] = []
        """Bytes of storages first seen while torch waits for a collective, in order."""
        self._uncounted = False
        self._waiting = False
        self._parts: list[PartRecord] = []
        """Parts of the current span; the last one is still running."""

    def begin_part(self, part: PartName, *, micro_batch: int = 0) -> None:
        """Attribute allocations of the current span to this part of the step from here on."""
        self._parts.append(PartRecord(part, micro_batch, self.allocated, self.allocated))

    def _grow_part(self) -> None:
        """Raise the peak of the running part to the bytes allocated now."""
        if self._parts and self._parts[-1].peak_bytes < self.allocated:
            self._parts[-1] = replace(self._parts[-1], peak_bytes=self.allocated)

    def reset_peak(self) -> None:
        """Restart the peak from the bytes allocated now."""
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
            elif value.device.type == self._device and not torch_private.is_fake(value):
                self._register_storage(value.untyped_storage(), label)

    def _register_storage(self, storage: torch.UntypedStorage, label: str) -> None:
        key = id(storage)
        if key not in self._live:
            if self._waiting:
                self.scratch.append(storage.nbytes())
            nbytes = 0 if self._uncounted or self._waiting else storage.nbytes()
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
            # DTensor dispatches operators on local tensors next; the meter sees those
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
            if storage.device.type != meter._device:
                pass
            elif key not in meter._live:
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
    def uncounted(self) -> Iterator[None]:
        """Storages allocated inside, and later views of them, count nothing."""
        before, peak, events, parts = self.allocated, self.peak, self.events, list(self._parts)
        self._uncounted = True
        self.events = None
        yield
        self._uncounted = False
        self.allocated, self.peak, self.events, self._parts = before, peak, events, parts

    @contextmanager
    def span(self) -> Iterator[MeteredSpan]:
        """Meter a span of the run; the yielded object gets its bytes and parts at the end."""
        span = MeteredSpan(start=self.allocated)
        self.reset_peak()
        self._parts = []
        yield span
        span.peak, span.end, span.parts = self.peak, self.allocated, tuple(self._parts)


def memory_record(span: MeteredSpan, held: Mapping[str, int] | None = None) -> MemoryRecord:
    """The record of a span in a Run, with the held bytes by kind where they are known."""
    return MemoryRecord(
        start_bytes=span.start, peak_bytes=span.peak, end_bytes=span.end, held=held or {},
        parts=span.parts,
    )
