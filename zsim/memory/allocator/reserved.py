"""A Program in torch's caching allocator for CUDA: what is reserved on the device for what the
Program allocates.

The allocator acts when the host issues, so reserved bytes are a function of the Program alone, as
allocated bytes are. A free returns its block at once, as where the subject keeps references instead
of record_stream (FSDP2, DDP). With record_stream (FSDP1, and what our executor reduces), blocks
come back once the device has come so far; then the reserved bytes are a lower bound. With FSDP1's
limiter they lacked 0.5 of 42 GiB, and without it 26, of which `zsim run` warns. It knows no
strategy and no time; the rules of the allocator are in zsim.memory.allocator.caching_allocator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from zsim.engine.equal_micro_batches import FEWEST
from zsim.errors import ProgramError
from zsim.ir.ledger import begins_with, during, label
from zsim.ir.ops import Alloc, DriverCalls, Op
from zsim.ir.program import PHASES, SECOND, PhaseName, RankProgram, begin_alike
from zsim.memory.allocator.caching_allocator import CachingAllocator, DeviceFullError, Peak
from zsim.memory.allocator.heap import Heap
from zsim.memory.equal_micro_batches import STEPS, micro_batches, repeat

SETTLED = 3
"""Further steady steps, as the first finds the cache of other steps. On a full H100 each further
one was alike, or alike to that before the last (tests/measured/full_device.json)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorRecord:
    """State of the allocator in one phase on one rank, in bytes."""

    peak_reserved_bytes: int
    end_reserved_bytes: int
    peak_active_bytes: int
    """The most bytes of live blocks, rounding included."""
    rounding_bytes: int
    """Bytes in live blocks beyond those asked for, when active bytes are at their peak for the
    first time."""
    workspace_bytes: int
    """Bytes of cuBLAS's workspaces, at that moment."""
    num_segments: int
    """Contiguous pieces of reserved memory at the end of the phase."""
    num_releases: int
    """Times in the phase that the device was full and the allocator gave all cached memory back,
    which stalls the device."""
    reserved_by_pool: Mapping[str, int]
    """Reserved bytes at the end of the phase, by "stream small" and "stream large"."""
    driver_calls: Mapping[int, DriverCalls] = field(default_factory=dict, compare=False)
    """Segments freed and allocated, by the index of the op."""
    repeats: bool = field(default=False, compare=False)
    """True where the fourth of five micro-batches did nothing that more of them would not do."""


def built_elsewhere(program: RankProgram) -> RankProgram:
    """`program` with its model built on the meta device or in host memory: on the device is only
    what construction leaves there."""
    live: dict[str, Alloc] = {}
    for op in program.construction:
        for event in op.memory:
            if isinstance(event, Alloc):
                live[event.buffer] = event
            else:
                live.pop(event.buffer, None)
    left = [
        replace(
            op,
            memory=tuple(
                event
                for event in op.memory
                if isinstance(event, Alloc) and live.get(event.buffer) is event
            ),
        )
        for op in program.construction
    ]
    return replace(program, construction=tuple(left))


def replay(
    program: RankProgram,
    *,
    expandable_segments: bool = False,
    workspace_bytes: int = 0,
    capacity: int | None = None,
    empty_cache: PhaseName | None = None,
) -> Mapping[PhaseName, AllocatorRecord]:
    """Reserved and active bytes of each phase.

    `workspace_bytes` is what cuBLAS takes per handle and `capacity` what the device has for the
    allocator; zsim.memory.non_torch knows both. Without a capacity nothing is released within a
    phase. The steady step is repeated, up to `SETTLED` times, until it calls the driver no more;
    the last counts. `empty_cache`: the phase before which torch.cuda.empty_cache is called.

    ProgramError where a buffer is allocated twice or freed without being live; DeviceFullError
    where `capacity` does not suffice.
    """
    allocator = CachingAllocator(expandable_segments=expandable_segments, capacity=capacity)
    try:
        return _records(program, Heap(allocator, workspace_bytes), empty_cache)
    finally:
        allocator.forget()


def replay_each(
    programs: Sequence[RankProgram], *, expandable_segments: bool, workspace_bytes: int
) -> list[Mapping[PhaseName, AllocatorRecord]]:
    """`replay` of programs, with the cache emptied before the first step. The passes of that step
    are followed once where they are the same objects."""
    lead, begins = programs[0], micro_batches(programs[0], "first")
    same = min(begin_alike(lead.first, each.first) for each in programs)
    if len(programs) == 1 or not begins or same <= begins[-1] or any(
        each.construction != lead.construction for each in programs
    ):
        return [
            replay(
                each, expandable_segments=expandable_segments, workspace_bytes=workspace_bytes,
                empty_cache="first",
            )
            for each in programs
        ]
    heap = Heap(CachingAllocator(expandable_segments=expandable_segments), workspace_bytes)
    construction = replay_phase(heap, lead.construction, "construction")
    heap.allocator.release()
    passes, records = _Walk.of(heap, "first", begins), list[Mapping[PhaseName, AllocatorRecord]]()
    passes.follow(lead.first[:same])
    for program in programs:
        walk = passes.copy()
        walk.end(program.first[same:])
        first = walk.record()
        replay_phase(walk.heap, program.second, SECOND)
        steady = _settled(walk.heap, program)
        records.append({"construction": construction, "first": first, "steady": steady})
        walk.heap.allocator.forget()
    heap.allocator.forget()
    return records


def _records(
    program: RankProgram, heap: Heap, empty_cache: PhaseName | None
) -> Mapping[PhaseName, AllocatorRecord]:
    records: dict[PhaseName, AllocatorRecord] = {}
    for phase in PHASES:
        replay_phase(heap, program.before(phase), SECOND)
        if empty_cache == phase:
            heap.allocator.release()
        records[phase] = _settled(heap, program) if phase == "steady" else replay_phase(
            heap, program.phase(phase), phase, begins=micro_batches(program, phase)
        )
    return records


def _settled(heap: Heap, program: RankProgram) -> AllocatorRecord:
    """The record of a steady step that calls the driver no more, or of the last that is tried.

    A step finds free blocks that the one before has left, in other places than that one found them.
    So hsdp and fsdp1 reserve up to 15 % more in their third step than in the second.
    """
    walk = _Walk.of(heap, "steady", micro_batches(program, "steady"))
    walk.follow(program.steady)
    steady = walk.record()
    for _ in range(SETTLED):
        if not steady.driver_calls:
            break
        walk = _Walk.of(heap, "steady", walk.begins, earlier=walk)
        walk.follow(program.steady)
        steady = walk.record()
    return steady


@dataclass(slots=True)
class _Walk:
    """A phase so far, whose micro-batches begin at `begins`, with the state of the heap there.
    `earlier`: the step before, of the same ops."""

    heap: Heap
    phase: str
    begins: Sequence[int]
    earlier: _Walk | None
    releases: int
    calls: dict[int, DriverCalls] = field(default_factory=dict)
    states: list[int] = field(default_factory=list)
    peaks: list[tuple[Peak, int]] = field(default_factory=list)
    """Peaks by micro-batch, each with the bytes of cuBLAS's workspaces there."""

    @classmethod
    def of(
        cls, heap: Heap, phase: str, begins: Sequence[int], *, earlier: _Walk | None = None
    ) -> _Walk:
        """The beginning of a phase."""
        heap.begin_peak()
        allocator = heap.allocator
        return cls(heap, phase, begins, earlier, allocator.num_releases)

    def copy(self) -> _Walk:
        """The phase so far, to be ended in another way."""
        return replace(
            self, heap=self.heap.copy(), calls=dict(self.calls), states=list(self.states),
            peaks=list(self.peaks),
        )

    def follow(self, ops: tuple[Op, ...]) -> None:
        """All micro-batches. One that finds the state of the one before, and begins with the same
        allocations and frees, ends these in that state. So they are passed over. And so is all that
        is left, once a micro-batch finds the state that it found in the earlier step."""
        before: tuple[Op, ...] = ()
        states, heap = self.states, self.heap
        for begin, end in pairwise((0, *self.begins[1:], len(ops))):
            micro_batch, known = ops[begin:end], len(self.calls)
            states.append(heap.state if len(self.begins) > 1 else 0)
            if self._goes_on_as_earlier():
                return
            is_as_before = states[-1:] == states[-2:-1] and begins_with(micro_batch, before)
            if not is_as_before:  # or else the peak of the one before is its peak as well
                heap.begin_peak()
            self.end(micro_batch[is_as_before * len(before) :])
            self.peaks.append((heap.allocator.peak, heap.peak_workspaces_bytes))
            before = micro_batch if len(self.calls) == known else ()

    def _goes_on_as_earlier(self) -> bool:
        """True where a micro-batch begins from which on all is known: the earlier step was in this
        state there and called the driver no more. Its peaks are taken over."""
        earlier, number = self.earlier, len(self.states) - 1
        if (
            not number or earlier is None or self.calls
            or self.states[number] != earlier.states[number]
            or max(earlier.calls) >= self.begins[number]
        ):
            return False
        self.states += earlier.states[number + 1 :]
        self.peaks += earlier.peaks[number:]
        return True

    def end(self, ops: tuple[Op, ...]) -> None:
        """More ops of the last micro-batch."""
        follow = self.heap.follow
        for op in ops:
            try:
                calls = follow(op)
            except ProgramError as error:
                raise during(op, self.phase, error) from None
            except DeviceFullError as error:
                step = f" of the {self.phase} step" if self.phase in STEPS else ""
                full = DeviceFullError(
                    where=f"{label(op)}{step}", expected=error.expected, found=error.found
                )
                full.repeats = self.heap.repeats and (len(self.states) < FEWEST or self._repeats())
                raise full from None
            if calls is not None:
                self.calls[op.index] = calls

    def _repeats(self) -> bool:
        return repeat(self.states, self.begins, self.calls)

    def record(self) -> AllocatorRecord:
        """The record of the phase, which is over."""
        heap, allocator = self.heap, self.heap.allocator
        peaks = [*self.peaks, (allocator.peak, heap.peak_workspaces_bytes)]
        peak, workspaces = max(peaks, key=lambda each: each[0].active)
        if self.begins:
            heap.repeats = heap.repeats and self._repeats()
        return AllocatorRecord(
            peak_reserved_bytes=max(each.most_reserved for each, _ in peaks),
            end_reserved_bytes=allocator.reserved, peak_active_bytes=peak.active,
            rounding_bytes=peak.active - peak.allocated, workspace_bytes=workspaces,
            num_segments=allocator.num_segments,
            num_releases=allocator.num_releases - self.releases,
            reserved_by_pool={
                f"{pool.stream} {'small' if pool.small else 'large'}": pool.reserved
                for pool in allocator.pools.values()
            },
            driver_calls=self.calls, repeats=bool(self.begins) and heap.repeats,
        )


def replay_phase(
    heap: Heap, ops: tuple[Op, ...], phase: str, *, begins: Sequence[int] = ()
) -> AllocatorRecord:
    """The record of `heap` over `ops`, which belong to `phase`; `begins`: the first ops of its
    micro-batches. Errors as of `replay`."""
    walk = _Walk.of(heap, phase, begins)
    walk.follow(ops)
    return walk.record()
