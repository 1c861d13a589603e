"""The tensors that each rank reads from each file, when ranks load what others saved.

torch DCP reads a stored tensor whole and takes the part that it needs. Of flat buffers, which are
ours or DeepSpeed's, only the elements that a rank needs are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zsim.analysis.checkpoints.pieces import Files
from zsim.analysis.checkpoints.reshard import CheckpointError, Read, reads
from zsim.analysis.checkpoints.state import StateEntry, StatePart, StateTensor, TrainingState


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRead:
    """Bytes that a rank reads of one stored tensor of `file`, and how many of them it `used`."""

    file: int
    nbytes: int
    used: int


def file_reads(
    saved: TrainingState, files: Sequence[Sequence[StateTensor]], wanted: TrainingState
) -> tuple[tuple[FileRead, ...], ...]:
    """The reads of each rank of `wanted` from `files` of `saved`, in the order of torch DCP.

    CheckpointError where the two are states of other shapes, or a tensor is in no file.
    """
    _require_alike(saved, wanted)
    owners = {tensor.key: file for file, own in enumerate(files) for tensor in own}
    if saved.num_shards == wanted.num_shards and not any(e.alignment for e in saved.entries):
        return tuple(_own(wanted, rank, owners) for rank in range(wanted.num_ranks))
    known: dict[tuple[bool, bool], list[list[tuple[int, Read]]]] = {}
    each: list[dict[tuple[str, int], list[FileRead]]] = [{} for _ in range(wanted.num_ranks)]
    for part in saved.parts:
        kind = part.is_sharded, part.of_optimizer
        if kind not in known and not part.is_counter:
            known[kind] = _by_shard(saved, part, wanted)
        for rank, made in enumerate(each):
            shard = rank % wanted.num_shards if part.is_sharded else 0
            own = _counters(saved) if part.is_counter else known[kind][shard]
            for index, read in own:
                made.setdefault((part.name, index), []).append(
                    _file_read(saved.entries[index], part, index, read, owners)
                )
    order = [(part.name, index) for part, index, _ in wanted.pairs()]
    return tuple(
        tuple(_by_file([read for key in order for read in made.get(key, [])])) for made in each
    )


def _own(
    wanted: TrainingState, rank: int, owners: dict[tuple[str, int, int], int]
) -> tuple[FileRead, ...]:
    """The reads of a rank that finds its very rows."""
    made = []
    for tensor in wanted.tensors(rank):
        if tensor.nbytes:
            name, index, shard = tensor.key
            file = _owner(owners, name, wanted.entries[index], index, shard)
            made.append(FileRead(file=file, nbytes=tensor.nbytes, used=tensor.nbytes))
    return tuple(_by_file(made))


def _owner(
    owners: dict[tuple[str, int, int], int], part: str, entry: StateEntry, index: int, shard: int
) -> int:
    """The file with a tensor; CheckpointError where there is none."""
    if (key := (part, index, shard)) not in owners:
        raise CheckpointError(
            where=f"checkpoint: {part} of {entry.fqn}",
            expected="the file with it" if shard < 0 else f"the file with shard {shard} of it",
            found="no such file", remedy="every rank's file is needed to load",
        )
    return owners[key]


def _require_alike(saved: TrainingState, wanted: TrainingState) -> None:
    for old, new in zip(saved.entries, wanted.entries, strict=False):
        if (old.fqn, old.shape, old.numels) != (new.fqn, new.shape, new.numels):
            raise CheckpointError(
                where=f"checkpoint: {new.fqn}",
                expected=f"a tensor of {_described(new)}",
                found=f"{old.fqn} of {_described(old)}",
                remedy="a checkpoint is loaded by the model that saved it",
            )
    if len(saved.entries) != len(wanted.entries):
        raise CheckpointError(
            where="checkpoint", expected=f"{len(wanted.entries):,} tensors of parameters",
            found=f"{len(saved.entries):,}",
            remedy="a checkpoint is loaded by the model that saved it",
        )


def _described(entry: StateEntry) -> str:
    return " × ".join(map(str, entry.shape or (entry.numel,)))


def _by_shard(
    saved: TrainingState, part: StatePart, wanted: TrainingState
) -> list[list[tuple[int, Read]]]:
    """The reads of the part by each shard of `wanted`, with the numbers of their entries."""
    entries = [
        index
        for index, entry in enumerate(saved.entries)
        if entry.trained or not part.of_optimizer
        for _ in entry.numels
    ]
    shards = wanted.num_shards if part.is_sharded else 1
    new: Files = wanted.pieces(part, shards)
    old = saved.pieces(part, saved.num_shards if part.is_sharded else 1)
    by_shard: list[list[tuple[int, Read]]] = [[] for _ in range(shards)]
    for read in reads(old, new):
        by_shard[read.rank].append((entries[read.parameter], read))
    return by_shard


def _counters(saved: TrainingState) -> Iterator[tuple[int, None]]:
    return ((index, None) for index, entry in enumerate(saved.entries) if entry.trained)


def _file_read(
    entry: StateEntry, part: StatePart, index: int, read: Read | None,
    owners: dict[tuple[str, int, int], int],
) -> FileRead:
    shard = (read.file if read else 0) if part.is_sharded else -1
    file = _owner(owners, part.name, entry, index, shard)
    if read is None:
        return FileRead(file=file, nbytes=part.element_nbytes, used=part.element_nbytes)
    used = read.interval.numel * part.element_nbytes
    whole = used if entry.alignment else read.stored * part.element_nbytes
    return FileRead(file=file, nbytes=whole, used=used)


def _by_file(made: Sequence[FileRead]) -> Iterator[FileRead]:
    """Reads grouped by file, files in the order of their first read."""
    grouped: dict[int, list[FileRead]] = {}
    for read in made:
        grouped.setdefault(read.file, []).append(read)
    for own in grouped.values():
        yield from own
