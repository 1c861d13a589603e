"""Collectives under way while the host goes on, until an op of the Program waits for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from zsim.ir.ops import COLLECTIVES, Op


@dataclass(slots=True)
class UnderWay:
    """Collectives that were issued and that nobody has waited for; false without any.

    They have one thread, since a communicator is one queue. A process group of gloo has two, which
    carry out two collectives at once. The queue holds tensors until it is done with them, so a
    buffer that is freed meanwhile is dropped and not resized.
    """

    _queue: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _calls: dict[int, tuple[str, Future[object]]] = field(default_factory=dict)
    """Stream and call, by the op's index."""

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, op: Op, call: Callable[[], object]) -> None:
        """Queue the collective of `op`."""
        self._calls[op.index] = op.stream, self._queue.submit(call)

    def wait(self, op: Op) -> None:
        """Wait for the collectives that `op` waits for, and for those before it on its stream."""
        for index, (stream, call) in list(self._calls.items()):
            on_its_stream = stream == op.stream and op.kind not in COLLECTIVES
            if index in op.waits or on_its_stream:
                call.result()
                del self._calls[index]
