"""Clocks of a recorded step: the host's own, or events on a CUDA device's streams.

A moment is taken in a microsecond and read after the step, so that the device is never waited for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class StepClock(Protocol):
    """Takes moments, and tells later how many nanoseconds after the step's start they were."""

    overlaps: bool
    """True where the host runs ahead of the device, whose moments these are."""

    @property
    def base_ns(self) -> int | None:
        """The step's start by the machine's clock; None by a device's own."""
        ...

    def start(self) -> None:
        """Begin the step: moments are told since now."""
        ...

    def now(self) -> Any:
        """The moment at which the current stream has done what was issued."""
        ...

    def ns(self, moment: Any) -> int:
        """Nanoseconds since the start, at least 0, once the step has ended."""
        ...

    def host_ns(self) -> int:
        """Nanoseconds since the start, now and on the host."""
        ...

    def on_compute_stream(self) -> bool:
        """True where the current stream is the one that the step began on."""
        ...


@dataclass(slots=True)
class HostClock:
    """The host's clock, for devices that compute while the host waits: a CPU."""

    overlaps: bool = False
    _base: int = 0

    @property
    def base_ns(self) -> int | None:
        """The step's start, which ranks on one machine can compare."""
        return self._base

    def start(self) -> None:
        """Begin the step."""
        self._base = time.perf_counter_ns()

    def now(self) -> int:
        """The present moment."""
        return time.perf_counter_ns()

    def ns(self, moment: int) -> int:
        """Nanoseconds of `moment` since the start."""
        return max(0, moment - self._base)

    def host_ns(self) -> int:
        """Nanoseconds since the start, now."""
        return time.perf_counter_ns() - self._base

    def on_compute_stream(self) -> bool:
        """True: there is one stream."""
        return True


@dataclass(slots=True)
class DeviceClock:
    """Events on the current CUDA stream, told by the device."""

    overlaps: bool = True
    _base: Any = None
    _stream: Any = None
    _host: HostClock = field(default_factory=HostClock)

    @property
    def base_ns(self) -> int | None:
        """None: moments are the device's."""
        return None

    def start(self) -> None:
        """Begin the step on the current stream, which has nothing left to do."""
        torch.cuda.synchronize()
        self._stream = torch.cuda.current_stream()
        self._host.start()
        self._base = self.now()

    def now(self) -> Any:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ns(self, moment: Any) -> int:
        """Nanoseconds between the first event and `moment`; CUDA tells them in half microseconds.
        """
        return max(0, round(self._base.elapsed_time(moment) * 1e6))

    def host_ns(self) -> int:
        """Nanoseconds since the start, on the host."""
        return self._host.host_ns()

    def on_compute_stream(self) -> bool:
        """True outside the streams of collectives and copies."""
        return bool(torch.cuda.current_stream() == self._stream)


def clock_of(device: str) -> StepClock:
    """The clock of a "cpu" or "cuda" device."""
    return DeviceClock() if device == "cuda" else HostClock()
