"""A scenario's checkpoint: files, time to save and load with its band, memory, and resharding.

Saves and loads are Programs, simulated as steps are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zsim.analysis.alternatives import moved
from zsim.analysis.checkpoints.conversion import Conversion, conversion
from zsim.analysis.checkpoints.files.file_reads import FileRead, file_reads
from zsim.analysis.checkpoints.files.formats import (
    CheckpointFile,
    files,
    files_on_drives,
    rank_tensors,
    saved_state,
)
from zsim.analysis.checkpoints.files.universal import universal_files, universal_reads
from zsim.analysis.checkpoints.load import LOADS, SMALL, load_to_drives
from zsim.analysis.checkpoints.phase import CheckpointPhase, phase_of
from zsim.analysis.checkpoints.program import RankFiles, program_of
from zsim.analysis.checkpoints.reshard import CheckpointError
from zsim.analysis.checkpoints.save import SAVES, batches
from zsim.analysis.checkpoints.state import StateTensor, TrainingState
from zsim.analysis.checkpoints.weights import save_weights, weights_file
from zsim.errors import ScenarioError
from zsim.ir.host_ledger import replay_host
from zsim.ir.ledger_replay import replay
from zsim.ir.program import Program
from zsim.models.saving import CheckpointFormat
from zsim.scenario.checks import checkpoint_checks
from zsim.scenario.derived import derived
from zsim.scenario.plan import planned
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES
from zsim.strategies.building.step_builder import StepBuilder

MOST_TENSORS = 1_000_000
"""Most tensors of all ranks together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """The checkpoint of a scenario. `reads` are those of the loading ranks, which may be others
    than the saving ones."""

    scenario: Scenario
    files: tuple[CheckpointFile, ...]
    save: CheckpointPhase
    load: CheckpointPhase
    conversion: Conversion | None = None
    """Between the two, of a universal checkpoint, whose files are told."""
    reads: tuple[tuple[FileRead, ...], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in all files."""
        return sum(file.nbytes for file in self.files)


def checkpoint(scenario: Scenario, *, to_ranks: int | None = None) -> CheckpointReport:
    """The scenario's checkpoint, loaded by its own ranks or by `to_ranks` that shard one copy.

    ScenarioError for what `checkpoint_checks` refuses. CheckpointError where a format cannot be
    loaded by so many ranks, CheckpointMemoryError where a device or a host has no room.
    """
    if problems := tuple(checkpoint_checks.problems(scenario)):
        raise ScenarioError(tuple(f"{scenario.name}: {problem}" for problem in problems))
    state = saved_state(scenario)
    loading = scenario if to_ranks is None else _on(scenario, to_ranks)
    wanted = saved_state(loading)
    most = max(state.num_ranks, wanted.num_ranks)
    if (number := most * sum(1 for _ in state.pairs())) > MOST_TENSORS:
        raise CheckpointError(
            where="checkpoint",
            expected=f"at most {MOST_TENSORS:,} tensors of all ranks, to be done in seconds",
            found=f"{number:,}", remedy="take fewer ranks, or fewer layers (model.num_layers)",
        )
    if scenario.checkpoint.format == "deepspeed" and wanted.num_shards != state.num_shards:
        raise CheckpointError(
            where="--to-ranks", expected=f"{state.num_shards}, the ranks that saved it",
            found=str(to_ranks),
            remedy="DeepSpeed loads optimizer states on as many data-parallel ranks only; "
                   'any number loads checkpoint.format = "universal", which ds_to_universal makes',
        )
    tensors = rank_tensors(scenario, state)
    written, converted = files(scenario, state, tensors), None
    if scenario.checkpoint.format == "universal":
        own, written = written, universal_files(scenario, state, tensors[0])
        converted = conversion(scenario, state, own, written)
        reads = universal_reads(written, wanted)
    else:
        reads = _reads(scenario, state, tensors, wanted)
    if scenario.checkpoint.gather_16bit_weights:
        written = (*written, weights_file(scenario))
    return CheckpointReport(
        scenario=scenario, files=written, reads=reads, conversion=converted,
        save=phase_of(scenario, _save(scenario, state, tensors), "save"),
        load=phase_of(loading, _load(loading, wanted, reads), "load"),
    )


def _on(scenario: Scenario, num_ranks: int) -> Scenario:
    """The scenario on `num_ranks` of its cluster's devices, which shard one copy."""
    if num_ranks > 1 and STRATEGIES[scenario.strategy].on_several_ranks:
        scenario = moved(scenario, STRATEGIES[scenario.strategy].on_several_ranks)
    strategy = STRATEGIES[scenario.strategy]
    per_node = scenario.cluster.devices_per_node
    nodes = num_ranks if scenario.cluster.kind == "cpu" else -(-num_ranks // per_node)
    cluster = replace(
        scenario.cluster, num_ranks=num_ranks,
        num_nodes=1 if scenario.cluster.kind == "cpu" else nodes,
        devices_per_node=num_ranks if scenario.cluster.kind == "cpu" else per_node,
    )
    sizes = dict.fromkeys(strategy.axes, 1) | dict.fromkeys(strategy.axes[-1:], num_ranks)
    mesh = type(scenario.mesh)(**sizes)
    return derived(scenario, cluster=cluster, mesh=mesh)


def _reads(
    scenario: Scenario, state: TrainingState, tensors: Sequence[Sequence[StateTensor]],
    wanted: TrainingState,
) -> tuple[tuple[FileRead, ...], ...]:
    """The reads of each rank that loads, by format."""
    if scenario.checkpoint.format == "sharded":
        return file_reads(state, tensors, wanted)
    if scenario.checkpoint.format == "consolidated":
        own = tuple(
            FileRead(file=0, nbytes=tensor.nbytes, used=tensor.nbytes) for tensor in tensors[0]
        )
        return (own, *((),) * (wanted.num_ranks - 1))
    if files_on_drives(scenario):
        return tuple(
            tuple(
                FileRead(
                    file=rank, nbytes=tensor.nbytes,
                    used=tensor.nbytes if tensor.key[0] == "master" else 0,
                )
                for tensor in own if tensor.on_drive
            )
            for rank, own in enumerate(tensors)
        )
    weights = [tensor for tensor in tensors[0] if tensor.key[0] == "parameters"]
    return tuple(
        tuple(
            FileRead(file=file, nbytes=tensor.nbytes, used=tensor.nbytes)
            for file, tensor in [
                *((0, tensor) for tensor in weights),
                *((rank, tensor) for tensor in tensors[rank % state.num_shards]
                  if tensor.key[0] != "parameters"),
            ]
        )
        for rank in range(wanted.num_ranks)
    )


def _save(
    scenario: Scenario, state: TrainingState, tensors: Sequence[Sequence[StateTensor]]
) -> Program:
    chosen, on_device = scenario.checkpoint, _is_on_device(scenario)
    save, held = SAVES[chosen.format], _held(scenario)

    def make(rank: int) -> StepBuilder:
        ops = RankFiles(
            num_ranks=state.num_ranks, on_device=on_device, has_gpu=scenario.cluster.kind != "cpu"
        )
        if chosen.gather_16bit_weights:
            save_weights(ops, scenario, rank)
        return save(ops, state, tensors[rank], rank, chosen)

    return program_of(
        scenario.mesh, make,
        moved=[tuple(batches(own)) for own in tensors],
        held=held,
    )


def _load(
    scenario: Scenario, state: TrainingState, reads: Sequence[Sequence[FileRead]]
) -> Program:
    form, on_device = scenario.checkpoint.format, _is_on_device(scenario)
    written = [each.parameters_nbytes for each in files_on_drives(scenario).values()]

    def load(rank: int) -> StepBuilder:
        ops = RankFiles(num_ranks=state.num_ranks, on_device=on_device)
        if written:
            ahead = scenario.offload.pipeline_read
            return load_to_drives(ops, reads[rank], written, ahead=ahead)
        return LOADS[form](ops, state, reads[rank], rank)

    return program_of(
        scenario.mesh, load,
        moved=[_sizes(own, form) for own in reads],
        held=_held(scenario),
    )


def _sizes(own: Sequence[FileRead], form: CheckpointFormat) -> tuple[int, ...]:
    """The sizes of reads, large ones in order and small ones in sum, as `load` issues them; of a
    universal checkpoint all in order."""
    if form == "universal":
        return tuple([size for read in own for size in (read.nbytes, read.used)])
    large = [size for read in own if read.nbytes > SMALL for size in (read.nbytes, read.used)]
    return (*large, sum(read.nbytes for read in own if read.nbytes <= SMALL))


def _is_on_device(scenario: Scenario) -> bool:
    """True where the state lies on devices that copy it over a link. Where the optimizer's is
    offloaded, all counts as in host memory."""
    by_option = STRATEGIES[scenario.strategy].offloads(scenario.options)
    return scenario.cluster.kind != "cpu" and not (by_option or scenario.offload.optimizer)


def _held(scenario: Scenario) -> list[tuple[int, int]]:
    """Bytes that each rank holds between two steps, on its device and in host memory."""
    program = planned(scenario).program
    ends = [
        (
            replay(rank, timeline=False)["steady"].end_bytes,
            replay_host(rank)["steady"].end_bytes,
        )
        for rank in program.ranks
    ]
    return [ends[kind] for kind in program.assignment]


