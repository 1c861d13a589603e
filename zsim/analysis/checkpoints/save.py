"""The Programs in which ranks save a checkpoint, by format.

A sharded one is DCP's: plans are exchanged, tensors copied to the host from the smallest on, one
batch ahead of what is written. torch keeps every copy until its file is closed
(torch/distributed/checkpoint/filesystem.py of torch 2.13, `_write_files_from_queue`). torch.save,
which writes the others, copies and writes one tensor after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from zsim.analysis.checkpoints.program import PLANNED_NBYTES, RankFiles, pageable
from zsim.analysis.checkpoints.state import StateTensor, TrainingState
from zsim.ir.buffers import Buffer, numbered
from zsim.ir.ops import Alloc, Free, MemoryEvent
from zsim.models.saving import Checkpoint, CheckpointFormat
from zsim.strategies.building.step_builder import StepBuilder

COPIED_AHEAD = 10_000_000
"""Bytes of a batch that is copied to the host while the one before it is written: DCP's
per_thread_copy_ahead."""
STAGED = "staging"
"""Unit of the copies for which training waits where the rest goes on beside it."""

Saves = Callable[
    [RankFiles, TrainingState, Sequence[StateTensor], int, Checkpoint], StepBuilder
]
"""Issues the ops of one rank, which writes the tensors, and returns them."""


def batches(tensors: Sequence[StateTensor]) -> Iterator[int]:
    """Bytes of tensors from the smallest on, together until they are `COPIED_AHEAD`."""
    total = 0
    for nbytes in sorted(tensor.nbytes for tensor in tensors):
        total += nbytes
        if total >= COPIED_AHEAD:
            yield total
            total = 0
    if total:
        yield total


def _sharded(
    ops: RankFiles, state: TrainingState, tensors: Sequence[StateTensor], rank: int,
    checkpoint: Checkpoint,
) -> StepBuilder:
    sizes, staged = list(batches(tensors)), checkpoint.asynchronous
    copies: list[int] = []
    if staged:
        for number, nbytes in enumerate(sizes):
            copies.append(ops.to_host(
                STAGED, nbytes, waits=(), host=(pageable(numbered(STAGED, number), nbytes),)
            ))
        ops.last = copies[-1] if copies else None
    plans = PLANNED_NBYTES * sum(1 for _ in state.pairs()) * state.num_ranks
    ops.exchange("all_gather", plans, "plans")
    ops.exchange("broadcast", plans, "plans")
    planned, writes = ops.last, list[int]()
    for number, nbytes in enumerate(sizes):
        if not staged and ops.on_device:  # one batch is copied while the one before is written
            earlier = writes[number - 2 : number - 1] if number > 1 else []
            copies.append(ops.to_host(
                "shards", nbytes, waits=ops.after(*earlier),
                host=(pageable(numbered("copy", number), nbytes),),
            ))
        waits = ops.after(*copies[number : number + 1])
        writes.append(ops.files("write", "shards", nbytes, waits=waits))
    ops.last = writes[-1] if writes else planned
    kept = [numbered(STAGED if staged else "copy", number) for number in range(len(copies))]
    ops.step.issue("free", "shards", stream="host", host=tuple(map(Free, kept)))
    ops.exchange("all_gather", plans, "results")
    if rank == 0:
        ops.last = ops.files("write", "metadata", plans, waits=ops.after())
    ops.exchange("broadcast", 1, "end")
    return ops.step


def _consolidated(
    ops: RankFiles, state: TrainingState, tensors: Sequence[StateTensor], rank: int,
    checkpoint: Checkpoint,
) -> StepBuilder:
    """Gather tensor by tensor; rank 0 keeps each, in host memory if it is offloaded, and so do all
    others on their devices if not. Shards in host memory go to a GPU for their gather."""
    kept, copied = list[Buffer](), list[Buffer]()
    for part, _, entry in state.pairs():
        name, whole = numbered(part.name, entry.fqn), state.whole_nbytes(part, entry)
        is_gathered = part.is_sharded and not part.is_counter and state.num_shards > 1
        on_gpu = ops.on_device or (is_gathered and ops.has_gpu)
        if is_gathered:
            nbytes, held = state.gathered_nbytes(part, entry), state.nbytes(part, entry, rank)
            moved = numbered(name, "shard") if on_gpu and not ops.on_device else None
            if moved:
                ops.last = ops.to_device(
                    name, held, waits=ops.after(), over_link=True,
                    memory=(Alloc(moved, "communication", held),),
                )
            ops.last = ops.step.issue(
                "all_gather", name, stream="all_gather", waits=ops.after(), group="dp_shard",
                nbytes=nbytes,
                memory=(
                    *_gathered(name, nbytes, state, held), *((Free(moved),) if moved else ()),
                ),
            )
        if checkpoint.cpu_offload and on_gpu and rank == 0:
            copied.append(name)
            ops.last = ops.to_host(
                name, whole, waits=ops.after(), host=(pageable(name, whole),), over_link=True
            )
        if is_gathered and checkpoint.cpu_offload and (on_gpu or rank):
            ops.step.issue("free", name, stream="host", memory=(Free(name),))
        elif is_gathered:
            kept.append(name)
    if rank == 0 and ops.on_device and not copied:
        _one_by_one(ops, tensors, "whole")
    elif rank == 0:
        total = sum(tensor.nbytes for tensor in tensors)
        ops.last = ops.files("write", "whole", total, waits=ops.after())
    ops.exchange("all_reduce", 1, "end")
    ops.step.issue(
        "free", "whole", stream="host", waits=ops.after(), memory=tuple(map(Free, kept)),
        host=tuple(map(Free, copied)),
    )
    return ops.step


def _gathered(
    name: Buffer, nbytes: int, state: TrainingState, held: int
) -> Iterator[MemoryEvent]:
    """The memory of an all-gather of `nbytes`; a rank that has `held` less than others pads it."""
    shard, padded = nbytes // state.num_shards, numbered(name, "padded")
    if held < shard:
        yield Alloc(padded, "communication", shard)
    yield Alloc(name, "unsharded_parameters", nbytes)
    if held < shard:
        yield Free(padded)


def _deepspeed(
    ops: RankFiles, state: TrainingState, tensors: Sequence[StateTensor], rank: int,
    checkpoint: Checkpoint,
) -> StepBuilder:
    """A barrier and two all-reduces that check the tag come first, a barrier last. Files on drives
    are copied one after another."""
    for nbytes in (1, 20, 20):
        ops.exchange("all_reduce", nbytes, "tag")
    _one_by_one(ops, [tensor for tensor in tensors if not tensor.on_drive], "partition")
    for tensor in tensors:
        if tensor.on_drive:
            ops.drive("read", "drives", tensor.nbytes)
            ops.last = ops.files("write", "drives", tensor.nbytes, waits=ops.after())
    ops.exchange("all_reduce", 1, "end")
    return ops.step


def _one_by_one(ops: RankFiles, tensors: Sequence[StateTensor], unit: str) -> None:
    """Copy and write one tensor after another, small ones together, as torch.save does."""
    for number, nbytes in enumerate(batches(tensors)):
        name = numbered(unit, number)
        if ops.on_device:
            ops.last = ops.to_host(
                unit, nbytes, waits=ops.after(), host=(pageable(name, nbytes),)
            )
        freed = (Free(name),) if ops.on_device else ()
        ops.last = ops.files("write", unit, nbytes, waits=ops.after(), host=freed)


SAVES: Mapping[CheckpointFormat, Saves] = {
    "sharded": _sharded, "consolidated": _consolidated, "deepspeed": _deepspeed,
    "universal": _deepspeed,
}
"""The ops of a rank that saves, by format."""
