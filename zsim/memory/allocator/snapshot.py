"""A Program's memory as the snapshot file that PyTorch's memory visualiser opens
(pytorch.org/memory_viz).

The file is what torch.cuda.memory._dump_snapshot writes: a pickle of plain values with the segments
at the end and the trace of everything allocated and freed. Where torch has a Python stack there
stand the buffer, the op and the kind. The dicts are the file's format and go no further. It knows
no clock: `time_us` counts events.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zsim.errors import ProgramError
from zsim.io import files
from zsim.ir.ledger import during, label
from zsim.ir.ops import STREAMS, Alloc, Free, Op
from zsim.ir.program import PHASES, SECOND, RankProgram
from zsim.memory.allocator.blocks import Block, Pool
from zsim.memory.allocator.caching_allocator import CachingAllocator
from zsim.memory.allocator.heap import Heap, pool_of

PICKLE_PROTOCOL = 4
"""The visualiser reads protocols 2 to 4."""
UNKNOWN = "unknown"
"""The category of what is no buffer. The visualiser wants one of this name where there are
categories, so every trace begins with an event that has it."""

Entry = dict[str, Any]


def snapshot(
    program: RankProgram, *, expandable_segments: bool = False, workspace_bytes: int = 0,
    empty_cache: bool = False,
) -> Entry:
    """The end of `program` as torch.cuda.memory._snapshot would return it on device 0, with the
    trace of all phases.

    `empty_cache`: torch.cuda.empty_cache is called after construction. Every allocation and free
    has its kind of memory as `category`, by which the visualiser colours the timeline.
    """
    recorder = _Recorder(
        Heap(CachingAllocator(expandable_segments=expandable_segments), workspace_bytes)
    )
    for phase in PHASES:
        for op in program.before(phase):
            recorder.record(op, SECOND)
        for op in program.phase(phase):
            recorder.record(op, phase)
        if empty_cache and phase == "construction":
            recorder.empty_cache()
    return {
        "segments": list(recorder.segments()),
        "device_traces": [recorder.trace],
        "allocator_settings": {"expandable_segments": expandable_segments},
        "external_annotations": [],
    }


def write_snapshot(content: Entry, path: Path) -> None:
    """Write a `snapshot` to a file."""
    files.write(path, pickle.dumps(content, protocol=PICKLE_PROTOCOL))


class _Recorder:
    """Runs ops through a heap and writes down what torch would record."""

    def __init__(self, heap: Heap) -> None:
        self.heap = heap
        self.trace: list[Entry] = []
        self._made: dict[int, tuple[list[Entry], str]] = {}
        """The stack and the kind of what lives at an address."""
        self._num_taken = 0
        self._add("snapshot", 0, 0, 0, [], category=UNKNOWN)

    def record(self, op: Op, phase: str) -> None:
        """All memory events of `op`."""
        frame = _frame(label(op), phase, op.index)
        extra = self.heap.workspace(op)
        try:
            for event in op.memory if extra is None else (extra, *op.memory):
                if isinstance(event, Alloc):
                    self._allocate(event, op, frame)
                else:
                    self._free(event)
        except ProgramError as error:
            raise during(op, phase, error) from None

    def empty_cache(self) -> None:
        """Give memory of no live block back to the device."""
        action = "segment_unmap" if self.heap.allocator.expandable_segments else "segment_free"
        frame = _frame("torch.cuda.empty_cache", "construction")
        for address, nbytes, pool in self.heap.allocator.release():
            self._add(action, address, nbytes, _stream(pool), [frame], category=UNKNOWN)

    def segments(self) -> Iterator[Entry]:
        """Each segment with its blocks."""
        for blocks in self.heap.allocator.segments():
            live = [block for block in blocks if block.requested]
            pool = blocks[0].pool
            yield {
                "device": 0,
                "address": blocks[0].address,
                "total_size": sum(block.size for block in blocks),
                "allocated_size": sum(block.size for block in live),
                "active_size": sum(block.size for block in live),
                "requested_size": sum(block.requested for block in live),
                "stream": _stream(pool),
                "segment_type": "small" if pool.small else "large",
                "segment_pool_id": (0, 0),
                "is_expandable": self.heap.allocator.expandable_segments,
                "frames": [],
                "blocks": [self._block(block) for block in blocks],
            }

    def _block(self, block: Block) -> Entry:
        return {
            "address": block.address,
            "size": block.size,
            "requested_size": block.requested,
            "state": "active_allocated" if block.requested else "inactive",
            "frames": self._made[block.address][0] if block.requested else [],
        }

    def _allocate(self, event: Alloc, op: Op, frame: Entry) -> None:
        self.heap.allocator.follow((event,), pool_of(op.stream), self.heap.live)
        block = self.heap.live[event.buffer]
        if block is None:
            return
        allocator = self.heap.allocator
        for address, nbytes in allocator.taken[self._num_taken :]:
            action = "segment_map" if allocator.expandable_segments else "segment_alloc"
            self._add(action, address, nbytes, _stream(block.pool), [frame], category=UNKNOWN)
        self._num_taken = len(allocator.taken)
        frames = [_frame(event.buffer, "buffer"), frame, _frame(event.kind, "kind")]
        self._made[block.address] = (frames, event.kind)
        self._add(
            "alloc", block.address, event.nbytes, _stream(block.pool), frames, category=event.kind
        )

    def _free(self, event: Free) -> None:
        block = self.heap.live.get(event.buffer)
        nbytes = block.requested if block else 0
        self.heap.allocator.follow((event,), "", self.heap.live)
        if block is not None:
            frames, kind = self._made.pop(block.address)
            for action in ("free_requested", "free_completed"):
                self._add(action, block.address, nbytes, _stream(block.pool), frames, category=kind)

    def _add(
        self, action: str, address: int, nbytes: int, stream: int, frames: list[Entry], *,
        category: str,
    ) -> None:
        self.trace.append(
            {
                "action": action,
                "addr": address,
                "size": nbytes,
                "stream": stream,
                "time_us": len(self.trace),
                "compile_context": "N/A",
                "user_metadata": "",
                "frames": frames,
                "category": category,
            }
        )


def _frame(name: str, filename: str, line: int = 0) -> Entry:
    return {"name": name, "filename": filename, "line": line}


def _stream(pool: Pool) -> int:
    """A number for the stream; that of compute, torch's default stream, is 0."""
    return STREAMS.index(pool.stream)
