"""Ops that saves and loads share, and the Program of all ranks.

Saving and loading are Programs of their own, whose steady phase they are. Their construction makes
what the device holds between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from zsim.ir.buffers import Buffer
from zsim.ir.mesh import Mesh
from zsim.ir.ops import PAGEABLE, Alloc, HostAlloc, HostEvent, Kernel, Location, MemoryEvent
from zsim.ir.program import Program, RankProgram
from zsim.strategies.building.step_builder import StepBuilder

STATE = Buffer("state")
MOST_AT_ONCE = 10**9
"""Bytes from which on reads and writes in sequence are issued."""
PLANNED_NBYTES = 300
"""Bytes of a tensor in the plans that ranks exchange. DCP's file of metadata has 280 B for each
tensor of a rank (measured on gloo)."""


@dataclass(slots=True, kw_only=True)
class RankFiles:
    """The ops of one rank as it saves or loads. With `on_device` its state is copied over PCIe;
    with `has_gpu` alone the state is in host memory, and gathers are on the GPU."""

    num_ranks: int
    on_device: bool
    has_gpu: bool = False
    step: StepBuilder = field(default_factory=StepBuilder)
    last: int | None = None
    """The op that the next one waits for, None at the start."""

    def after(self, *others: int | None) -> tuple[int, ...]:
        """Waits for the last op in sequence and for `others`."""
        return tuple(index for index in (self.last, *others) if index is not None)

    def exchange(self, kind: str, nbytes: int, unit: str) -> None:
        """A collective of all ranks on small objects, in sequence."""
        if self.num_ranks > 1:
            self.last = self.step.issue(
                kind, unit, stream="all_gather", waits=self.after(), group="world",  # type: ignore[arg-type]
                nbytes=max(1, nbytes),
            )

    def to_host(
        self, unit: str, nbytes: int, *, waits: Iterable[int], host: Sequence[HostEvent] = (),
        memory: Sequence[MemoryEvent] = (), over_link: bool = False,
    ) -> int:
        """A copy of `nbytes` into pageable host memory; inside it where the state is there, unless
        it is `over_link`."""
        return self._copy("to_host", unit, nbytes, waits, host, memory, over_link)

    def to_device(
        self, unit: str, nbytes: int, *, waits: Iterable[int], host: Sequence[HostEvent] = (),
        memory: Sequence[MemoryEvent] = (), over_link: bool = False,
    ) -> int:
        """A copy of `nbytes` out of pageable host memory, as of `to_host`."""
        return self._copy("to_device", unit, nbytes, waits, host, memory, over_link)

    def _copy(
        self, direction: str, unit: str, nbytes: int, waits: Iterable[int],
        host: Sequence[HostEvent], memory: Sequence[MemoryEvent], over_link: bool,
    ) -> int:
        kernels = (
            _kernels(f"{direction}{PAGEABLE}", nbytes, "link")
            if self.on_device or over_link
            else _kernels("copy", 2 * nbytes, "host")
        )
        return self.step.issue(
            "copy", unit, stream=direction, waits=waits, kernels=kernels, memory=memory,  # type: ignore[arg-type]
            host=host,
        )

    def files(
        self, operator: str, unit: str, nbytes: int, *, waits: Iterable[int],
        host: Sequence[HostEvent] = (),
    ) -> int:
        """A write or read of `nbytes`."""
        return self.step.issue(
            "copy", unit, stream="files", waits=waits, host=host,
            kernels=_kernels(operator, nbytes, "files"),
        )

    def drive(
        self, operator: Literal["read", "write"], unit: str, nbytes: int, *others: int | None
    ) -> None:
        """A read or write of `nbytes` of the node's drives, in sequence and after `others`."""
        self.last = self.step.issue(
            "copy", unit, stream="drive_read" if operator == "read" else "drive_write",
            waits=self.after(*others), kernels=_kernels(operator, nbytes, "drive"),
        )


@dataclass(slots=True, kw_only=True)
class InSequence:
    """Reads, copies and writes of one process, one after the other, and what they need of host
    memory. Many small ones are one op of each kind, as nothing overlaps."""

    ops: RankFiles
    unit: str
    host: list[HostEvent] = field(default_factory=list)
    read: int = 0
    copied: int = 0
    loaded: int = 0
    written: int = 0

    def add(
        self, *host: HostEvent, read: int = 0, copied: int = 0, loaded: int = 0, written: int = 0
    ) -> None:
        """Bytes that are read, copied in host memory, loaded to the device, and written."""
        self.host += host
        self.read, self.copied = self.read + read, self.copied + copied
        self.loaded, self.written = self.loaded + loaded, self.written + written
        if self.read + self.copied + self.loaded + self.written >= MOST_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Issue what has been added so far."""
        ops, unit = self.ops, self.unit
        if self.host:
            ops.step.issue("free", unit, stream="host", waits=ops.after(), host=tuple(self.host))
        if self.read:
            ops.last = ops.files("read", unit, self.read, waits=ops.after())
        if self.copied:
            kernels = _kernels("copy", 2 * self.copied, "host")
            ops.last = ops.step.issue(
                "copy", unit, stream="to_host", waits=ops.after(), kernels=kernels
            )
        if self.loaded:
            ops.last = ops.to_device(unit, self.loaded, waits=ops.after())
        if self.written:
            ops.last = ops.files("write", unit, self.written, waits=ops.after())
        self.host, self.read, self.copied, self.loaded, self.written = [], 0, 0, 0, 0


@lru_cache(maxsize=4096)
def _kernels(operator: str, nbytes: int, location: Location) -> tuple[Kernel, ...]:
    """One tuple for all ops that move as many bytes: the engine knows kernels by identity."""
    return (Kernel(operator, 0, nbytes, "float32", location),)


def pageable(buffer: Buffer, nbytes: int) -> HostAlloc:
    """`nbytes` of pageable host memory that a checkpoint needs."""
    return HostAlloc(buffer, "temporaries", nbytes)


def program_of(
    mesh: Mesh, make: Callable[[int], StepBuilder], *, moved: Sequence[tuple[int, ...]],
    held: Sequence[tuple[int, int]],
) -> Program:
    """The Program of ranks that `make` makes, of which each has `held` bytes on its device and in
    host memory.

    Ranks but the first are alike that move as many bytes, op by op, by `moved`.
    """
    kinds: dict[tuple[object, ...], int] = {}
    ranks: list[RankProgram] = []
    assignment = []
    for rank in range(mesh.world_size):
        key = (rank == 0, held[rank], moved[rank])
        if key not in kinds:
            kinds[key] = len(ranks)
            ops, construction = tuple(make(rank).ops), StepBuilder()
            on_device, in_host = held[rank]
            construction.issue(
                "alloc", STATE, stream="host", memory=(Alloc(STATE, "parameters", on_device),),
                host=(HostAlloc(STATE, "optimizer_states", in_host),),
            )
            ranks.append(RankProgram(construction=tuple(construction.ops), first=(), steady=ops))
        assignment.append(kinds[key])
    return Program(mesh=mesh, ranks=tuple(ranks), assignment=tuple(assignment))
