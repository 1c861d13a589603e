"""The conversion of DeepSpeed's files into a universal checkpoint, by ds_to_universal on one host.

Its first processes cut each rank's file into parameters, and write a fragment for each tensor. The
next ones read the fragments of a parameter and write it whole. The main process then copies what is
common. It does so offline, and no device takes part.
Source: DeepSpeed 0.19.8, checkpoint/ds_to_universal.py, as measured on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zsim.analysis.checkpoints.files.formats import CheckpointFile
from zsim.analysis.checkpoints.files.universal import (
    ELEMENT_NBYTES,
    STEP,
    TENSORS,
    keys_of,
    pieces,
)
from zsim.analysis.checkpoints.phase import CheckpointPhase, phase_of
from zsim.analysis.checkpoints.program import InSequence, RankFiles, pageable, program_of
from zsim.analysis.checkpoints.state import TrainingState
from zsim.ir.buffers import Buffer, numbered
from zsim.ir.ops import Free
from zsim.ir.sharding import Piece
from zsim.scenario.derived import derived
from zsim.scenario.scenario import Scenario
from zsim.strategies.building.optimizers import STEP_NBYTES
from zsim.strategies.building.step_builder import StepBuilder

Work = Callable[[InSequence, int], None]
"""Adds the work of a process, by its number."""
FILE, WEIGHTS = Buffer("file"), Buffer("weights")
FRAGMENT, STEPS = Buffer("fragment"), Buffer("steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The phases of a conversion, one after the other. At its end there are bytes of files that it
    has read, of those that it makes, and of fragments."""

    phases: tuple[CheckpointPhase, ...]
    files_bytes: int

    def moved_bytes(self, operator: str) -> int:
        """Bytes that it moves by `operator`: "read" or "write"."""
        return sum(
            kernel.nbytes
            for phase in self.phases
            for rank in range(phase.program.mesh.world_size)
            for op in phase.program.of_rank(rank).steady
            for kernel in op.kernels
            if (kernel.location, kernel.operator) == ("files", operator)
        )


def conversion(
    scenario: Scenario, state: TrainingState, own: Sequence[CheckpointFile],
    universal: Sequence[CheckpointFile],
) -> Conversion:
    """The conversion of a checkpoint's `own` files into `universal` ones.

    CheckpointMemoryError where the host has no room for its processes.
    """
    shards, has_steps = pieces(state), STEP in keys_of(state)
    cuts: list[list[int]] = [[] for entry in state.entries for _ in entry.numels]
    for piece in (piece for shard in shards for piece in shard):
        cuts[piece.parameter].append(piece.interval.numel * ELEMENT_NBYTES)
    partitions = [file.nbytes for file in own if "optim_states" in file.name]
    weights = universal[0].nbytes if has_steps else 0
    chosen = scenario.checkpoint
    ranks = _shared(partitions, chosen.extract_workers)
    # DeepSpeed takes parameters from a set, in no order; the largest together take most memory
    cuts.sort(key=sum, reverse=True)
    parameters = _shared(list(map(sum, cuts)), chosen.merge_workers)

    def extract(work: InSequence, process: int) -> None:
        if process == 0:  # which waits for the main one, that asks for the stage and for shapes
            for nbytes in (partitions[0], weights):
                work.add(pageable(FILE, nbytes), Free(FILE), read=nbytes)
        for rank in ranks[process]:
            _extract(work, partitions[rank], shards[rank], has_steps=has_steps)

    def merge(work: InSequence, process: int) -> None:
        for number in parameters[process]:
            _merge(work, cuts[number], has_steps=has_steps)

    def finish(work: InSequence, process: int) -> None:
        _finish(work, partitions[0], weights)

    fragments = sum(len(TENSORS) * sum(own) + STEP_NBYTES * has_steps * len(own) for own in cuts)
    return Conversion(
        phases=(
            _phase(scenario, len(ranks), extract), _phase(scenario, len(parameters), merge),
            _phase(scenario, 1, finish),
        ),
        files_bytes=fragments + sum(file.nbytes for file in (*own, *universal)),
    )


def _shared(nbytes: Sequence[int], workers: int) -> list[list[int]]:
    """The numbers of the tasks of each process that has some; the first idle one takes the next."""
    shares: list[list[int]] = [[] for _ in range(min(workers, len(nbytes)))]
    busy = [0] * len(shares)
    for number, size in enumerate(nbytes):
        idle = busy.index(min(busy))
        shares[idle].append(number)
        busy[idle] += size
    return [share for share in shares if share]


def _extract(
    work: InSequence, partition: int, shard: Sequence[Piece], *, has_steps: bool
) -> None:
    """Read a rank's file, and write a copy of each piece in it."""
    pieces_nbytes = sum(piece.interval.numel for piece in shard) * ELEMENT_NBYTES
    _read(work, partition, pieces_nbytes, has_steps=has_steps)
    for piece in shard:
        nbytes = piece.interval.numel * ELEMENT_NBYTES
        for _ in TENSORS:
            work.add(
                pageable(FRAGMENT, nbytes), Free(FRAGMENT), copied=nbytes, written=nbytes
            )
        work.add(written=STEP_NBYTES * has_steps)
    work.add(Free(FILE))


def _read(work: InSequence, partition: int, numel_nbytes: int, *, has_steps: bool) -> None:
    """Read a rank's file. Without stage 3, moments with padding are replaced by copies without."""
    work.add(pageable(FILE, partition), read=partition)
    is_padded = len(TENSORS) * numel_nbytes + STEP_NBYTES < partition
    if has_steps and is_padded:
        work.add(pageable(FRAGMENT, numel_nbytes), Free(FRAGMENT), copied=2 * numel_nbytes)


def _merge(work: InSequence, cuts: Sequence[int], *, has_steps: bool) -> None:
    """Put the tensors of a parameter together, one after the other, and the weights first.

    What is made of one tensor is held until the next has come as far. Fragments of weights require
    a gradient, so autograd holds them as long. With steps, which is without stage 3, slices of
    tensor parallelism are joined as well: one slice, and a copy of it.
    """
    steps, nbytes = STEP_NBYTES * has_steps, sum(cuts)
    if steps:
        work.add(pageable(STEPS, steps), read=steps * len(cuts), written=steps)
    kinds = ("slice", "whole") if has_steps else ("slice",)
    for number in range(len(TENSORS)):
        fragments = numbered("fragments", number)
        work.add(pageable(fragments, nbytes), read=nbytes)
        for kind in kinds:
            work.add(pageable(numbered(kind, number), nbytes), copied=nbytes)
            if kind == "slice" and number:
                work.add(Free(fragments))
            if number:
                work.add(Free(numbered(kind, number - 1)))
        if number == 1:
            work.add(Free(numbered("fragments", 0)))
        work.add(written=nbytes)
    work.add(*(Free(numbered(kind, len(TENSORS) - 1)) for kind in kinds))
    if steps:
        work.add(Free(STEPS))


def _finish(work: InSequence, partition: int, weights: int) -> None:
    """Copy the model's file, or at stage 3 all of rank 0's file; the main process reads both."""
    if weights:
        work.add(pageable(WEIGHTS, weights), read=weights)
    work.add(
        pageable(FILE, partition), Free(FILE), read=partition, written=0 if weights else partition
    )
    if weights:
        work.add(Free(WEIGHTS), read=weights, written=weights)


def _phase(scenario: Scenario, num_processes: int, add: Work) -> CheckpointPhase:
    """Processes of one host that work side by side, as ranks that hold no state."""

    def made(process: int) -> StepBuilder:
        work = InSequence(ops=RankFiles(num_ranks=1, on_device=False), unit="universal")
        add(work, process)
        work.flush()
        return work.ops.step

    cluster, mesh = scenario.cluster, type(scenario.mesh)(dp_shard=num_processes)
    converting = derived(scenario, mesh=mesh, cluster=replace(
        cluster, num_ranks=num_processes, num_nodes=1,
        devices_per_node=max(num_processes, cluster.devices_per_node),
    ))
    program = program_of(
        mesh, made, moved=[(process,) for process in range(num_processes)],
        held=[(0, 0)] * num_processes,
    )
    return phase_of(converting, program, "convert")
