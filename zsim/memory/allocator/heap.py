"""The buffers of a Program in torch's caching allocator, with the workspaces of cuBLAS."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from zsim.ir.buffers import workspace_of
from zsim.ir.ops import Alloc, DriverCalls, Op, Stream
from zsim.memory.allocator.blocks import Block
from zsim.memory.allocator.caching_allocator import CachingAllocator

_THREADS = {"forward": "main", "backward": "autograd", "recompute": "autograd"}
"""The host thread in which products of an op run, by its kind."""


def pool_of(stream: Stream) -> str:
    """The stream whose pool serves an op: host ops use torch's current one, compute."""
    return "compute" if stream == "host" else stream


@dataclass(slots=True)
class Heap:
    """The buffers of a Program in a caching allocator.

    Each lives in the pool of the stream of the op that makes it.
    """

    allocator: CachingAllocator
    workspace_bytes: int = 0
    live: dict[str, Block | None] = field(default_factory=dict)
    """Live buffers; one of no bytes has no block."""
    peak_workspaces_bytes: int = 0
    """Bytes of cuBLAS's workspaces at the allocator's peak."""
    repeats: bool = True
    """False once the fourth of five micro-batches has done what more of them need not do."""
    _threads: set[str] = field(default_factory=set)

    def begin_peak(self) -> None:
        """Forget the peak."""
        self.allocator.begin_peak()
        self.peak_workspaces_bytes = self.workspaces_bytes

    def follow(self, op: Op) -> DriverCalls | None:
        """Allocate and free what `op` does. Returns the calls of the driver for it. Errors as of
        CachingAllocator.follow."""
        allocator, extra = self.allocator, self.workspace(op)
        highest, releases = allocator.peak.active, allocator.num_releases
        taken, freed = len(allocator.taken), len(allocator.freed)
        allocator.follow(
            op.memory if extra is None else (extra, *op.memory), pool_of(op.stream), self.live
        )
        if allocator.peak.active > highest:
            self.peak_workspaces_bytes = self.workspaces_bytes
        if len(allocator.taken) == taken and len(allocator.freed) == freed:
            return None
        return DriverCalls(
            allocator.num_releases - releases,
            len(allocator.freed) - freed, sum(allocator.freed[freed:]),
            len(allocator.taken) - taken, sum(size for _, size in allocator.taken[taken:]),
        )

    def copy(self) -> Heap:
        """The heap as it is, to go on in another way."""
        allocator, twins = self.allocator.copy()
        live = {name: block and twins[block] for name, block in self.live.items()}
        return replace(self, allocator=allocator, live=live, _threads=set(self._threads))

    @property
    def state(self) -> int:
        """A number of all blocks, by which what comes is decided; equal in equal states."""
        pools = self.allocator.pools.items()
        return hash((
            frozenset([(name, block and block.address) for name, block in self.live.items()]),
            tuple((key, tuple(pool.free)) for key, pool in pools),
            tuple((key, tuple(at for at, _ in pool.unmapped)) for key, pool in pools),
            self.allocator.reserved, self.allocator.active,
        ))

    @property
    def workspaces_bytes(self) -> int:
        """Bytes of cuBLAS's workspaces so far."""
        return len(self._threads) * self.workspace_bytes

    def workspace(self, op: Op) -> Alloc | None:
        """The workspace that cuBLAS keeps, when `op` is the first with products of its host
        thread; else None.

        cuBLAS has a handle, and torch a workspace for it, per thread and stream. The forward runs
        in the main thread, the backward and what it recomputes in autograd's.
        """
        thread = _THREADS.get(op.kind)
        if thread is None or thread in self._threads or not self.workspace_bytes or not op.flops:
            return None
        self._threads.add(thread)
        return Alloc(workspace_of(thread), "temporaries", self.workspace_bytes)
