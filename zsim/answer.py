"""Does it fit? What one rank needs of its device against what there is, and what every byte of it is for.

Allocated bytes are exact; what the allocator reserves for them follows from its rules; what lies outside is banded. It reads
Programs and knows no strategy and no time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from zsim import allocator
from zsim.hardware import ClusterSpec
from zsim.memory import Ledger, label, replay
from zsim.ops import Alloc, MemoryKind
from zsim.outside import Outside, cublas_workspace, gpu, outside, total
from zsim.program import PhaseName, Program, RankProgram

Verdict = Literal["FITS", "TIGHT", "OOM"]
STEPS: tuple[PhaseName, ...] = ("first", "steady")


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Bytes as expected, and the least and the most that they may be."""

    nbytes: int
    low: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What lives at the peak: bytes of one kind that belong to one unit, and how many buffers they are."""

    kind: MemoryKind
    unit: str
    nbytes: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What `rank`, the one that needs most, needs. The peak is that of `phase`, inside the op `peak_at`."""

    rank: int
    phase: PhaseName
    peak_at: str
    allocated_bytes: int
    by_kind: Mapping[str, int]
    by_part: Mapping[str, int]
    """The highest allocated bytes of each part of the step: forward, backward, optimizer, zero_grad."""
    holdings: tuple[Holding, ...]
    """Largest first."""
    rounding_bytes: int
    workspace_bytes: int
    """What cuBLAS has of what is reserved."""
    cached_bytes: int
    """Reserved and in no live block: fragmentation, and blocks kept for reuse."""
    reserved_bytes: int
    outside: tuple[Outside, ...]
    construction_bytes: int
    """Allocated bytes while model and optimizer are built, were it on the device."""
    needed: Band
    capacity: Band
    expandable_segments: bool

    @property
    def verdict(self) -> Verdict:
        """FITS when even the most that may be needed is there, OOM when even the least is not, TIGHT between the two."""
        if self.needed.high <= self.capacity.low:
            return "FITS"
        return "OOM" if self.needed.low > self.capacity.high else "TIGHT"

    @property
    def built_on_device(self) -> bool:
        """Whether the model is taken to be built on the device, whose cache is emptied afterwards; else where there is room for it."""
        return self.construction_bytes <= self.capacity.nbytes

    @property
    def margin_bytes(self) -> int:
        """What is expected to be left of the device; negative when it is short of."""
        return self.capacity.nbytes - self.needed.nbytes


def answer(
    program: Program, cluster: ClusterSpec, *, expandable_segments: bool = False, besides: tuple[Outside, ...] = ()
) -> Answer:
    """The answer for the rank of `program` with the highest peak of a step, on `cluster`'s device.

    `besides`: what lies there that the Program knows nothing of (`zsim.belongings`).
    """
    records = [replay(rank, timeline=False) for rank in program.ranks]
    phases = [max((of[name].peak_bytes, name) for name in STEPS)[1] for of in records]
    kind = max(range(len(records)), key=lambda place: (records[place][phases[place]].peak_bytes, -place))
    rank, one, phase = program.assignment.index(kind), program.ranks[kind], phases[kind]
    highest = records[kind][phase]
    allocated = highest.peak_bytes
    live = live_at_peak(one, phase)
    items = (*besides, *outside(program, cluster, rank=rank))
    capacity, built = _capacity(cluster), records[kind]["construction"].peak_bytes
    here = one if built <= capacity.nbytes else allocator.built_elsewhere(one)
    reserved, active, workspaces = _reserved(here, cluster, allocated, expandable_segments=expandable_segments)
    beyond, rounding = total(items), active - allocated - workspaces
    return Answer(
        rank=rank,
        phase=phase,
        peak_at=highest.peak_at,
        allocated_bytes=allocated,
        by_kind=highest.by_kind,
        by_part=highest.highest_by_part,
        holdings=_holdings(live),
        rounding_bytes=rounding,
        workspace_bytes=workspaces,
        cached_bytes=reserved - active,
        reserved_bytes=reserved,
        outside=items,
        construction_bytes=built,
        needed=Band(nbytes=reserved + beyond.nbytes, low=active + beyond.low, high=reserved + beyond.high),
        capacity=capacity,
        expandable_segments=expandable_segments,
    )


def live_at_peak(program: RankProgram, phase: PhaseName) -> tuple[tuple[Alloc, str], ...]:
    """Every buffer that lives when allocated bytes of `phase` are first at their highest, with the unit that made it."""
    peak = replay(program, timeline=False)[phase].peak_bytes
    ledger, owner = Ledger(), dict[str, str]()
    for name in ("construction", *STEPS):
        for op in program.phase(name):
            for event in op.memory:
                if isinstance(event, Alloc):
                    ledger.allocate(event)
                    owner[event.buffer] = op.unit
                else:
                    ledger.free(event.buffer)
                if name == phase and ledger.allocated == peak:
                    return tuple((alloc, owner[alloc.buffer]) for alloc in ledger.live.values())
        if name == phase:
            break
    return tuple((alloc, owner[alloc.buffer]) for alloc in ledger.live.values())


def _holdings(live: tuple[tuple[Alloc, str], ...]) -> tuple[Holding, ...]:
    nbytes: Counter[tuple[MemoryKind, str]] = Counter()
    count: Counter[tuple[MemoryKind, str]] = Counter()
    for alloc, unit in live:
        nbytes[alloc.kind, unit] += alloc.nbytes
        count[alloc.kind, unit] += 1
    ordered = sorted(nbytes.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Holding(kind=kind, unit=unit, nbytes=size, count=count[kind, unit]) for (kind, unit), size in ordered)


def _reserved(
    program: RankProgram, cluster: ClusterSpec, allocated: int, *, expandable_segments: bool
) -> tuple[int, int, int]:
    """Reserved bytes, the most in live blocks, and what cuBLAS has there; on a CPU nothing is reserved ahead."""
    if cluster.kind != "cuda":
        return allocated, allocated, 0
    records = allocator.replay(
        program,
        expandable_segments=expandable_segments,
        workspace_bytes=cublas_workspace(cluster.device),
        empty_cache=True,
    )
    reserved = max(records[phase].peak_reserved_bytes for phase in STEPS)
    highest = max((records[phase] for phase in STEPS), key=lambda record: record.peak_active_bytes)
    beyond = highest.peak_active_bytes - allocated  # at another moment than the ledger's peak it may hold more than is rounded
    return reserved, highest.peak_active_bytes, min(highest.workspace_bytes, beyond)


def _capacity(cluster: ClusterSpec) -> Band:
    if cluster.kind != "cuda":
        memory = cluster.device.memory
        return Band(nbytes=memory, low=memory, high=memory)
    found = gpu(cluster.device).capacity
    return Band(nbytes=found.nbytes, low=found.low, high=found.high)


def ridges(program: RankProgram, phase: PhaseName) -> tuple[tuple[str, int], ...]:
    """The highest allocated bytes up to and during each computation of `phase`: (op in words, bytes), for reading."""
    ledger, points, highest = Ledger(), list[tuple[str, int]](), 0
    for name in ("construction", *STEPS):
        for op in program.phase(name):
            for event in op.memory:
                if isinstance(event, Alloc):
                    ledger.allocate(event)
                    highest = max(highest, ledger.allocated)
                else:
                    ledger.free(event.buffer)
            if name == phase and op.kind in ("forward", "recompute", "backward", "optimizer"):
                points.append((label(op), max(highest, ledger.allocated)))
                highest = 0
        if name == phase:
            break
        highest = 0
    return tuple(points)
