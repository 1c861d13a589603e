"""The streams of a Program's ops: each op runs on its own, behind the ops that it waits for.

Ranks issue ops in the Program's order and do not ask for the device. `DeviceStreams` are streams
and events of CUDA. On a CPU they are torch's empty ones, where each op is over once it is issued.
`CollectiveQueue` carries out collectives beside timers. This file must not know strategies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from zreal.executor.flat_buffers import release
from zsim.ir.ops import COLLECTIVES, Op

PRIORITY = -1
"""Priority of streams beside compute, as FSDP2's: a free multiprocessor takes their kernels first.
"""


class OpStreams(Protocol):
    """The streams of one rank's ops. An op with a lower index than the one before begins a phase,
    which comes after all ops of earlier phases."""

    def wait(self, op: Op) -> None:
        """Let the compute of `op`, which the caller issues next, come after what `op` waits for."""
        ...

    def on(self, op: Op) -> AbstractContextManager[None]:
        """Inside, kernels run on the stream of `op` and come after what it waits for."""
        ...

    def issue(self, call: Callable[[], object], op: Op, *tensors: Tensor) -> None:
        """Carry out the collective of `op`, which uses `tensors`; only inside `on(op)`."""
        ...

    def free(self, tensor: Tensor, *streams: str) -> None:
        """Free memory that ops on these streams, or collectives, may still use."""
        ...

    def join(self) -> None:
        """Let compute that the caller issues next come after all ops so far."""
        ...


@dataclass(slots=True)
class DeviceStreams:
    """Streams and events of a device by `torch.get_device_module`.

    The host waits for none of them, unless an op of the host does. Memory goes back to the pool of
    the stream that it was allocated on. Compute is on the current stream.
    """

    module: Any
    _streams: dict[str, Any] = field(default_factory=dict)
    _ends: dict[int, tuple[str, Any]] = field(default_factory=dict)
    """Stream of each op of this phase and the event behind it, by the op's index."""
    _last: int = 0
    _computing: Op | None = None
    """The op whose compute the caller issues; its end is marked when the next op comes."""

    def wait(self, op: Op) -> None:
        """Let the current stream wait for the events of `op.waits`."""
        self._begin(op)
        self._await(op, self.module.current_stream())
        self._computing = op

    @contextmanager
    def on(self, op: Op) -> Iterator[None]:
        """The stream of `op` is the current one inside; an event marks its end."""
        self._begin(op)
        with self.module.stream(stream := self._stream(op.stream)):
            self._await(op, stream)
            yield
            self._mark(op)

    def issue(self, call: Callable[[], object], op: Op, *tensors: Tensor) -> None:
        """Call it: torch puts a collective that is not asynchronous on the current stream."""
        for tensor in tensors:
            self._use(tensor, op.stream)
        call()

    def free(self, tensor: Tensor, *streams: str) -> None:
        """Return the memory to its pool; the allocator reuses it once `streams` have come here."""
        for stream in streams:
            self._use(tensor, stream)
        release(tensor)

    def join(self) -> None:
        """Let the current stream wait for all others."""
        for stream in self._streams.values():
            self.module.current_stream().wait_stream(stream)

    def _use(self, tensor: Tensor, stream: str) -> None:
        """Keep the memory from reuse until `stream` has done what is issued; of no effect on the
        stream that it was allocated on. A host's memory is on no stream."""
        if tensor.is_cuda:
            tensor.record_stream(self._stream(stream))

    def _stream(self, name: str) -> Any:
        if name in ("compute", "host"):
            return self.module.current_stream()
        if name not in self._streams:
            self._streams[name] = self.module.Stream(priority=PRIORITY)
            self._streams[name].wait_stream(self.module.current_stream())
        return self._streams[name]

    def _begin(self, op: Op) -> None:
        """Mark the end of compute before `op`; at a phase's first op let all streams meet."""
        if self._computing is not None:
            self._mark(self._computing)
            self._computing = None
        if op.index == 0 or op.index < self._last:
            self._ends.clear()
            self.join()
            for stream in self._streams.values():
                stream.wait_stream(self.module.current_stream())
        self._last = op.index

    def _await(self, op: Op, stream: Any) -> None:
        for index in op.waits:
            name, end = self._ends.get(index, (op.stream, None))
            if op.stream == "host" and end is not None:
                end.synchronize()
            elif name != op.stream:
                stream.wait_event(end)

    def _mark(self, op: Op) -> None:
        end = self.module.Event()
        end.record(self.module.current_stream())
        self._ends[op.index] = op.stream, end


@dataclass(slots=True)
class CollectiveQueue:
    """Collectives that go on in a thread while the host computes by timers.

    They have one thread, since a communicator is one queue. A process group of gloo has two, which
    carry out two collectives at once. The queue holds tensors until it is done with them, so memory
    that is freed meanwhile is dropped and not resized.
    """

    _queue: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _calls: dict[int, tuple[str, Future[object]]] = field(default_factory=dict)
    """Stream and call of collectives that nobody has waited for, by the op's index."""

    def wait(self, op: Op) -> None:
        """Wait for the collectives that `op` waits for, and for those before it on its stream."""
        for index, (stream, call) in list(self._calls.items()):
            on_its_stream = stream == op.stream and op.kind not in COLLECTIVES
            if index in op.waits or on_its_stream:
                call.result()
                del self._calls[index]

    @contextmanager
    def on(self, op: Op) -> Iterator[None]:
        """The caller's thread does inside what is no collective, after what `op` waits for."""
        self.wait(op)
        yield

    def issue(self, call: Callable[[], object], op: Op, *tensors: Tensor) -> None:
        """Queue the collective."""
        self._calls[op.index] = op.stream, self._queue.submit(call)

    def free(self, tensor: Tensor, *streams: str) -> None:
        """Free the memory now where no collective is under way; else it goes with the tensor."""
        if not self._calls:
            release(tensor)

    def join(self) -> None:
        """Wait for all collectives."""
        for _, call in self._calls.values():
            call.result()
        self._calls.clear()
