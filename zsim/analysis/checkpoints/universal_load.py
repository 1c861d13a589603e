"""The Program in which ranks load a universal checkpoint.

Parameters are read in turn. At stages 1 and 2 a rank keeps its pieces of both moments in host
memory until all parameters are read. At stage 3 the float32 files say that their tensors require a
gradient. So autograd keeps each of them, whole, until all of a sub-group are copied into the flat
buffer, on every rank. The optimizer's file is there all the time.
Source: DeepSpeed 0.19.8, `load_hp_checkpoint_state_from_checkpoint_dir` of
runtime/base_optimizer.py and, with `_stage3`, of runtime/zero/stage3.py, as measured on gloo.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zsim.analysis.checkpoints.files.file_reads import FileRead
from zsim.analysis.checkpoints.files.universal import (
    ELEMENT_NBYTES,
    TENSORS,
    keys_of,
    shards_parameters,
)
from zsim.analysis.checkpoints.program import InSequence, RankFiles, pageable
from zsim.analysis.checkpoints.state import TrainingState
from zsim.ir.buffers import Buffer, buffer_of, numbered
from zsim.ir.ops import Free, HostEvent
from zsim.strategies.building.step_builder import StepBuilder

COMMON = Buffer("common")


def load_universal(
    ops: RankFiles, state: TrainingState, reads: Sequence[FileRead], rank: int
) -> StepBuilder:
    """The ops of a rank, whose parts are those of `state`."""
    work = InSequence(ops=ops, unit="universal")
    if shards_parameters(state):
        _whole_parameters(work, state, reads)
        work.flush()
        return ops.step
    _pieces(work, reads, len(keys_of(state)))
    work.flush()
    if ops.num_ranks > 1:
        weights = next(part for part in state.parts if part.name == "parameters")
        ops.last = ops.step.issue(
            "all_gather", "parameters", stream="all_gather", waits=ops.after(), group="dp_shard",
            nbytes=sum(state.gathered_nbytes(weights, entry) for entry in state.entries),
        )
    return ops.step


def _pieces(work: InSequence, reads: Sequence[FileRead], num_keys: int) -> None:
    """Read the model's file, twice, then each parameter that reaches into the rank's part."""
    for read in reads[:2]:
        work.add(pageable(COMMON, read.nbytes), Free(COMMON), read=read.nbytes)
    kept: list[list[Buffer]] = [[], []]
    steps: list[Buffer] = []
    for number, first in enumerate(range(2, len(reads), num_keys)):
        before: list[HostEvent] = []
        for key, read in enumerate(reads[first : first + len(TENSORS)]):
            file = numbered(TENSORS[key], number)
            work.add(pageable(file, read.nbytes), *before, read=read.nbytes)
            if key < len(kept):  # a moment
                kept[key].append(buffer_of(TENSORS[key], "piece", number))
                work.add(pageable(kept[key][-1], read.used), copied=read.used)
            else:
                work.add(loaded=read.used)
            before = [Free(file)]
        for read in reads[first + len(TENSORS) : first + num_keys]:
            steps.append(numbered("step", number))
            work.add(pageable(steps[-1], read.nbytes), read=read.nbytes)
        work.add(*before)
    moments = (reads[key::num_keys] for key in (2, 3))
    work.add(loaded=sum(read.used for own in moments for read in own))
    work.add(*(Free(each) for own in (*kept, steps) for each in own))


def _whole_parameters(
    work: InSequence, state: TrainingState, reads: Sequence[FileRead]
) -> None:
    """Read the optimizer's file, then of all parameters the weights, and each moment in turn."""
    work.add(pageable(COMMON, reads[0].nbytes), read=reads[0].nbytes)
    last: list[Buffer] = []
    by_autograd: list[Buffer] = []
    for number, read in enumerate(reads[1:]):
        entry = state.entries[number % len(state.entries)]
        if entry.counts:  # the buffer of the sub-group before is gone, with what autograd kept
            work.add(*(Free(each) for each in by_autograd if each not in last))
            by_autograd = []
        has_gradient = number < len(state.entries)
        file, padded = numbered("file", number), numbered("padded", number)
        work.add(pageable(file, read.nbytes), read=read.nbytes, loaded=read.used)
        own = [file]
        total = entry.shard_numel(state.num_shards) * state.num_shards * ELEMENT_NBYTES
        if total > read.nbytes:
            zeros = numbered("zeros", number)
            work.add(
                pageable(zeros, total - read.nbytes), pageable(padded, total), copied=read.nbytes
            )
            work.add(*([] if has_gradient else [Free(file)]), Free(zeros))
            own = [file, padded] if has_gradient else [padded]
        work.add(*_freed(last, by_autograd))
        if has_gradient:
            by_autograd.append(file)
        last = own
    work.add(*map(Free, last), Free(COMMON))


def _freed(last: Sequence[Buffer], by_autograd: Sequence[Buffer]) -> Iterator[HostEvent]:
    """The end of what a rank has of the parameter before, but for what autograd keeps of it."""
    return (Free(each) for each in last if each not in by_autograd)
