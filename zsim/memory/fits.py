"""Memory verdict: the bytes that a rank needs of its device, by use, against the device's capacity.
With offloading, those of a node's ranks against its host's memory too.

Allocated bytes are exact; what the allocator reserves for them follows from its rules; what lies
outside is banded. It reads Programs and knows no strategy and no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.host import HostMemory
from zsim.ir.ledger import label
from zsim.ir.ledger_replay import replay_each
from zsim.ir.ops import Alloc, DriverCalls, Op
from zsim.ir.program import PhaseName, Program, RankProgram
from zsim.ir.run import MemoryRecord
from zsim.memory.allocator import reserved as allocator
from zsim.memory.allocator.out_of_memory import Pressure, pressure
from zsim.memory.equal_micro_batches import STEPS, bytes_repeat
from zsim.memory.holdings import until_end
from zsim.memory.host import host_memory
from zsim.memory.inputs_and_buffers import belongings
from zsim.memory.non_torch import NonTorchMemory, capacity, cublas_workspace, outside, total
from zsim.memory.rank_classes import rank_classes
from zsim.scenario.plan import Planned

FitsVerdict = Literal["FITS", "TIGHT", "OOM"]
WORSE: tuple[FitsVerdict, ...] = ("FITS", "TIGHT", "OOM")
MOST_REPLAYED = 4
"""Most rank programs whose allocator is replayed: those with the highest allocated bytes and
non-torch memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesBand:
    """Bytes as expected, and the least and the most that they may be."""

    nbytes: int
    low: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryVerdict:
    """Memory that `rank`, the one that may need most, needs of its device, and the verdict. What is
    offloaded counts to the `host` of a node.

    The peak is that of `phase`, inside the op `peak_at`.
    """

    rank: int
    phase: PhaseName
    peak_at: str
    allocated_bytes: int
    by_kind: Mapping[str, int]
    by_part: Mapping[str, int]
    """The highest allocated bytes of each part of the step: forward, backward, optimizer,
    zero_grad."""
    rounding_bytes: int
    workspace_bytes: int
    """Reserved bytes that are cuBLAS's workspaces."""
    cached_bytes: int
    """Reserved and in no live block: fragmentation, and blocks kept for reuse."""
    reserved_bytes: int
    outside: tuple[NonTorchMemory, ...]
    construction_bytes: int
    """Allocated bytes while model and optimizer are built, were it on the device."""
    needed: BytesBand
    capacity: BytesBand
    expandable_segments: bool
    pressure: Pressure | None = None
    """The allocator's releases where it would reserve more than the device is expected to have;
    None where all of it has room, and where live bytes alone are too many."""
    driver_calls: Mapping[int, Mapping[int, DriverCalls]] = field(default_factory=dict)
    """Calls of the driver that are expected in a steady step, by rank program and op."""

    host: HostMemory | None = None
    """Offloaded states in host memory; None where there are none."""
    repeats: bool = field(default=False, compare=False)
    """True where more micro-batches than these five change nothing."""

    @property
    def verdict(self) -> FitsVerdict:
        """The worse verdict of device and host; a host of unknown size has none."""
        if self.host is None or self.host.verdict == "UNKNOWN":
            return self.on_device
        return max(self.on_device, self.host.verdict, key=WORSE.index)

    @property
    def host_is_short(self) -> bool:
        """True where the host may lack memory for what is offloaded."""
        return self.host is not None and self.host.verdict in ("TIGHT", "OOM")

    @property
    def on_device(self) -> FitsVerdict:
        """FITS, OOM, or TIGHT between the two.

        FITS: the device has even the most that may be needed. OOM: live bytes alone exceed the
        largest capacity, or the allocator fails there after it has released its cache.
        """
        if self.needed.high <= self.capacity.low:
            return "FITS"
        if self.needed.low > self.capacity.high or (
            self.pressure is not None and self.pressure.runs is None
        ):
            return "OOM"
        return "TIGHT"

    @property
    def releases_per_step(self) -> int | None:
        """Cache releases expected in a steady step, each of which stalls the device; None where the
        step is not expected to run."""
        if self.pressure is None:
            return 0 if self.margin_bytes >= 0 else None
        return None if self.pressure.expected is None else self.pressure.expected.steady

    @property
    def running(self) -> str:
        """Text on the cache releases of a TIGHT step, such as "flushing cached memory twice a
        steady step"; "" for any other."""
        if self.on_device != "TIGHT" or self.margin_bytes >= 0:
            return ""
        expected = None if self.pressure is None else self.pressure.expected
        return "not expected to run" if expected is None else expected.sentence

    @property
    def built_on_device(self) -> bool:
        """True where the device has room to build the model, whose cache is emptied afterwards;
        else the model is taken to be built elsewhere."""
        return self.construction_bytes <= self.capacity.nbytes

    @property
    def margin_bytes(self) -> int:
        """Bytes of the device expected to stay free; negative where it is too small, unless the
        allocator can release enough (`pressure`)."""
        return self.capacity.nbytes - self.needed.nbytes


def assess(planned: Planned, *, ranks: Sequence[Standing] = ()) -> MemoryVerdict:
    """Verdict of a planned scenario on its own cluster, its batch and buffers included; `ranks` as
    of `assess_program`."""
    scenario = planned.scenario
    return assess_program(
        planned.program, scenario.cluster, expandable_segments=scenario.expandable_segments,
        besides=belongings(scenario), ranks=ranks,
    )


def assess_program(
    program: Program, cluster: ClusterSpec, *, expandable_segments: bool = False,
    besides: tuple[NonTorchMemory, ...] = (), ranks: Sequence[Standing] = (),
) -> MemoryVerdict:
    """Verdict of the rank of `program` that may need most of `cluster`'s device.

    It counts the peak of the rank's program, and NCCL's buffers by the rank's position in its node.
    `besides`: device memory that no Program has (`zsim.memory.inputs_and_buffers`). `ranks`: the
    `standings` where they are known.
    """
    capacity = device_capacity(cluster)
    ranks = ranks or standings(program, cluster)
    highest = ranks[:MOST_REPLAYED]
    needs = [*zip(highest, _reserved(
        highest, cluster, capacity, expandable_segments=expandable_segments
    ), strict=True)]
    standing, (reserved, active, workspaces, _) = max(
        needs, key=lambda need: (need[1][0] + total(need[0].outside).high, -need[0].index)
    )
    items = (*besides, *standing.outside)
    needed = _needed(reserved, active, total(items))
    pressures = {
        each.index: _pressure(
            each, cluster, _needed(most, live, beyond), capacity, beyond,
            expandable_segments=expandable_segments,
        )
        for each, (most, live, _, _) in needs
        for beyond in [total((*besides, *each.outside))]
    }
    return MemoryVerdict(
        rank=standing.rank, phase=standing.phase, peak_at=standing.highest.peak_at,
        allocated_bytes=standing.allocated, by_kind=standing.highest.by_kind,
        by_part=standing.highest.highest_by_part,
        rounding_bytes=active - standing.allocated - workspaces, workspace_bytes=workspaces,
        cached_bytes=reserved - active, reserved_bytes=reserved, outside=items,
        construction_bytes=standing.built, needed=needed, capacity=capacity,
        expandable_segments=expandable_segments, pressure=pressures[standing.index],
        driver_calls={
            kind: pressed.expected.driver_calls
            for kind, pressed in pressures.items()
            if pressed is not None and pressed.expected is not None
        },
        host=host_memory(program, cluster),
        repeats=all(each.repeats for each in ranks) and all(need[3] for _, need in needs)
        and all(pressed is None or pressed.repeats for pressed in pressures.values()),
    )


_Reserved = tuple[int, int, int, bool]
"""Reserved bytes, the most in live blocks, what cuBLAS has there, and whether micro-batches repeat.
"""


def _needed(reserved: int, active: int, beyond: NonTorchMemory) -> BytesBand:
    return BytesBand(
        nbytes=reserved + beyond.nbytes, low=active + beyond.low, high=reserved + beyond.high
    )


def least_needed(
    ranks: Sequence[Standing], *, besides: tuple[NonTorchMemory, ...] = ()
) -> BytesBand:
    """Bytes that a verdict has at least, without the allocator's: what lives, and what is outside.
    """
    bands = [
        _needed(each.allocated, each.allocated, total((*besides, *each.outside))) for each in ranks
    ]
    return BytesBand(
        nbytes=min(band.nbytes for band in bands), low=min(band.low for band in bands),
        high=min(band.high for band in bands),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The rank with most non-torch memory among those that run the rank program at `index`, and the
    step with its highest peak."""

    index: int
    rank: int
    program: RankProgram
    phase: PhaseName
    highest: MemoryRecord
    built: int
    repeats: bool
    outside: tuple[NonTorchMemory, ...]

    @property
    def allocated(self) -> int:
        return self.highest.peak_bytes

    def built_here(self, capacity: BytesBand) -> RankProgram:
        """The program with its model built on the device where that has room for it."""
        return (
            self.program
            if self.built <= capacity.nbytes
            else allocator.built_elsewhere(self.program)
        )


def standings(
    program: Program, cluster: ClusterSpec, *,
    replayed: Sequence[Mapping[PhaseName, MemoryRecord]] = (),
) -> list[Standing]:
    """One rank for each rank program, the one that may need most before the allocator does anything
    first. `replayed`: the records of each, where they are known."""
    kinds, replayed = [], replayed or replay_each(program.ranks, timeline=False)
    for index, (ranks, records) in enumerate(
        zip(rank_classes(program, cluster), replayed, strict=True)
    ):
        rank, items = max(
            ((rank, outside(program, cluster, rank=rank)) for rank in ranks),
            key=lambda held: (total(held[1]).high, -held[0]),
        )
        phase = max((records[name].peak_bytes, name) for name in STEPS)[1]
        kinds.append(
            Standing(
                index=index,
                rank=rank,
                program=program.ranks[index],
                phase=phase,
                highest=records[phase],
                built=records["construction"].peak_bytes,
                repeats=bytes_repeat(records),
                outside=items,
            )
        )
    return sorted(
        kinds, key=lambda each: (-each.allocated - total(each.outside).high, each.index)
    )


def _pressure(
    standing: Standing, cluster: ClusterSpec, needed: BytesBand, capacity: BytesBand,
    beyond: NonTorchMemory, *, expandable_segments: bool,
) -> Pressure | None:
    if cluster.kind != "cuda" or needed.nbytes <= capacity.nbytes or needed.low > capacity.high:
        return None
    return pressure(
        standing.built_here(capacity),
        room=capacity.nbytes - beyond.nbytes,
        most=capacity.high - beyond.low,
        workspace_bytes=cublas_workspace(cluster.device),
        expandable_segments=expandable_segments,
    )


def _reserved(
    ranks: Sequence[Standing], cluster: ClusterSpec, capacity: BytesBand, *,
    expandable_segments: bool,
) -> list[_Reserved]:
    """The allocator's answer for each of `ranks`; on a CPU nothing is reserved ahead."""
    if cluster.kind != "cuda":
        return [(each.allocated, each.allocated, 0, True) for each in ranks]
    replayed = allocator.replay_each(
        [each.built_here(capacity) for each in ranks], expandable_segments=expandable_segments,
        workspace_bytes=cublas_workspace(cluster.device),
    )
    return [_of_records(*each) for each in zip(ranks, replayed, strict=True)]


def _of_records(
    standing: Standing, records: Mapping[PhaseName, allocator.AllocatorRecord]
) -> _Reserved:
    reserved = max(records[phase].peak_reserved_bytes for phase in STEPS)
    highest = max((records[phase] for phase in STEPS), key=lambda record: record.peak_active_bytes)
    # at another moment than the ledger's peak it may hold more than is rounded
    beyond = highest.peak_active_bytes - standing.allocated
    workspaces = min(highest.workspace_bytes, beyond)
    return reserved, highest.peak_active_bytes, workspaces, records["steady"].repeats


def device_capacity(cluster: ClusterSpec) -> BytesBand:
    """Bytes of a device that a rank may have."""
    if cluster.kind != "cuda":
        memory = cluster.device.memory
        return BytesBand(nbytes=memory, low=memory, high=memory)
    reported = capacity(cluster.device)
    return BytesBand(nbytes=reported.nbytes, low=reported.low, high=reported.high)


def ridges(program: RankProgram, phase: PhaseName) -> tuple[tuple[str, int], ...]:
    """The highest allocated bytes from each computation of `phase` to the next, or to the end of
    its part: (op in words, bytes).

    What comes before the first computation of a part counts to that.
    """
    points, ahead, begun = list[tuple[str, int]](), 0, False
    begins = {part.start for part in program.parts(phase)}
    for op, highest in _highest(program, phase):
        begun = begun and op.index not in begins
        if op.kind in ("forward", "recompute", "backward", "optimizer"):
            points.append((label(op), max(ahead, highest)))
            ahead, begun = 0, True
        elif not begun:
            ahead = max(ahead, highest)
        else:
            computation, before = points[-1]
            points[-1] = computation, max(before, highest)
    return tuple(points)


def _highest(program: RankProgram, phase: PhaseName) -> Iterator[tuple[Op, int]]:
    """The ops of `phase`, each with the highest allocated bytes while it is issued."""
    live, allocated = dict[str, int](), 0
    for op, is_inside in until_end(program, phase):
        highest = allocated
        for event in op.memory:
            if type(event) is Alloc:
                live[event.buffer] = event.nbytes
                allocated += event.nbytes
                if allocated > highest:
                    highest = allocated
            else:
                allocated -= live.pop(event.buffer)
        if is_inside:
            yield op, highest
