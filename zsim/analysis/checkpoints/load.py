"""The Programs in which ranks load a checkpoint, by format.

DCP reads one stored tensor after another and copies the part that the rank needs. A tensor stays in
host memory until the next is there. Rank 0 reads a consolidated one, then broadcasts tensor by
tensor (`broadcast_from_rank0`). DeepSpeed's ranks read a file of their own, and that of the model
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from zsim.analysis.checkpoints.files.file_reads import FileRead
from zsim.analysis.checkpoints.program import PLANNED_NBYTES, RankFiles, pageable
from zsim.analysis.checkpoints.save import COPIED_AHEAD
from zsim.analysis.checkpoints.state import TrainingState
from zsim.analysis.checkpoints.universal_load import load_universal
from zsim.ir.buffers import Buffer, numbered
from zsim.ir.ops import Alloc, Free, HostEvent
from zsim.models.saving import CheckpointFormat
from zsim.strategies.building.step_builder import StepBuilder

SMALL = 1024
"""Bytes of tensors up to which they are read last and together, as step counters are."""
CHECKED = Buffer("checked")
Loads = Callable[[RankFiles, TrainingState, Sequence[FileRead], int], StepBuilder]
"""Issues the ops of one rank, which reads from files, and returns them."""


def _sharded(
    ops: RankFiles, state: TrainingState, reads: Sequence[FileRead], rank: int
) -> StepBuilder:
    plans = PLANNED_NBYTES * sum(1 for _ in state.pairs()) * state.num_ranks
    ops.exchange("all_gather", plans, "keys")
    ops.exchange("all_gather", plans, "plans")
    ops.exchange("broadcast", plans, "plans")
    large = [read for read in reads if read.nbytes > SMALL]
    small = sum(read.nbytes for read in reads if read.nbytes <= SMALL)
    host: list[HostEvent] = []
    nbytes = used = 0
    for number, read in enumerate(large):
        host.append(pageable(numbered("read", number), read.nbytes))
        host += [Free(numbered("read", number - 1))] if number else []
        nbytes, used = nbytes + read.nbytes, used + read.used
        if nbytes >= COPIED_AHEAD or number == len(large) - 1:
            ops.last = ops.files("read", "shards", nbytes, waits=ops.after(), host=tuple(host))
            ops.last = ops.to_device("shards", used, waits=ops.after())
            host, nbytes, used = [], 0, 0
    if small:
        ops.last = ops.files("read", "small", small, waits=ops.after())
        ops.last = ops.to_device("small", small, waits=ops.after())
    if large:
        last = (Free(numbered("read", len(large) - 1)),)
        ops.step.issue("free", "shards", stream="host", host=last)
    ops.exchange("all_gather", state.num_ranks, "end")
    return ops.step


def _consolidated(
    ops: RankFiles, state: TrainingState, reads: Sequence[FileRead], rank: int
) -> StepBuilder:
    total = sum(state.whole_nbytes(part, entry) for part, _, entry in state.pairs())
    if rank == 0:
        ops.last = ops.files(
            "read", "whole", total, waits=(), host=(pageable(Buffer("whole"), total),)
        )
    for part, _, entry in state.pairs():
        if part.is_counter:
            continue
        name, whole = numbered(part.name, entry.fqn), state.whole_nbytes(part, entry)
        made = (Alloc(name, "unsharded_parameters", whole),) if part.is_sharded else ()
        if rank == 0:
            ops.last = ops.to_device(name, whole, waits=ops.after(), memory=made)
        if state.num_ranks > 1:
            ops.last = ops.step.issue(
                "broadcast", name, stream="all_gather", waits=ops.after(), group="world",
                nbytes=whole, memory=made if rank else (),
            )
        if made:
            ops.step.issue("free", name, stream="host", memory=(Free(name),))
    if rank == 0:
        ops.step.issue("free", "whole", stream="host", host=(Free(Buffer("whole")),))
    return ops.step


def _deepspeed(
    ops: RankFiles, state: TrainingState, reads: Sequence[FileRead], rank: int
) -> StepBuilder:
    """Files are whole in host memory before any of their tensors is copied. That of the model is
    read once more ahead of them, to look whether it is whole (SDLoaderBase.check_ckpt_list)."""
    model = sum(
        state.whole_nbytes(part, entry)
        for part, _, entry in state.pairs() if part.name == "parameters"
    )
    checked: list[HostEvent] = [pageable(CHECKED, model), Free(CHECKED)] if model else []
    for number, read in enumerate(reads):
        ops.last = ops.files(
            "read", "partition", read.nbytes + (0 if number else model), waits=ops.after(),
            host=(*checked, pageable(numbered("read", number), read.nbytes)),
        )
        checked = []
    for number, read in enumerate(reads):
        ops.last = ops.to_device(
            "partition", read.used, waits=ops.after(), host=(Free(numbered("read", number)),)
        )
    ops.exchange("all_reduce", 1, "end")
    return ops.step


def load_to_drives(
    ops: RankFiles, reads: Sequence[FileRead], parameters: Sequence[int], *, ahead: bool
) -> StepBuilder:
    """Issue the ops of a rank whose files on drives DeepSpeed copies back one after another.

    Of them it uses float32 weights alone. It reads those, the next ones `ahead` or not, and writes
    the bytes of `parameters` and them, as in a step. It reads no tensor of its own files.
    """
    for read in reads:
        ops.last = ops.files("read", "drives", read.nbytes, waits=ops.after())
        ops.drive("write", "drives", read.nbytes)
    masters = [read.used for read in reads if read.used]
    coming: int | None = None
    for number, (nbytes, rounded) in enumerate(zip(masters, parameters, strict=True)):
        if coming is None:
            ops.drive("read", "drives", nbytes)
            coming = ops.last
        there, coming = coming, None
        if ahead and number + 1 < len(masters):
            before = ops.last
            ops.drive("read", "drives", masters[number + 1], there)
            ops.last, coming = before, ops.last
        for written in filter(None, (rounded, nbytes)):
            ops.drive("write", "drives", written, there)
    ops.exchange("all_reduce", 1, "end")
    return ops.step


LOADS: Mapping[CheckpointFormat, Loads] = {
    "sharded": _sharded, "consolidated": _consolidated, "deepspeed": _deepspeed,
    "universal": load_universal,
}
"""The ops of a rank that loads, by format."""
