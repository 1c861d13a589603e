"""The files of the universal checkpoint that ds_to_universal makes, and what each rank reads.

It has a file for each parameter and each of its float32 tensors. A rank of stages 1 and 2 reads the
whole files of parameters that reach into its part, one of stage 3 those of all. Besides these,
ranks of stages 1 and 2 read the model's file, twice, and use nothing of it. Those of stage 3 so
read the optimizer's, into which the conversion of that stage copies all of rank 0's states.
Source: DeepSpeed 0.19.8, checkpoint/ds_to_universal.py and universal_checkpoint.py,
runtime/zero/stage3.py, as measured on gloo.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.analysis.checkpoints.files.file_reads import FileRead
from zsim.analysis.checkpoints.files.formats import CheckpointFile
from zsim.analysis.checkpoints.pieces import Files
from zsim.analysis.checkpoints.state import StatePart, StateTensor, TrainingState
from zsim.ir.sharding import Piece
from zsim.models.spec import Parameter
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES
from zsim.strategies.building.optimizers import STEP_NBYTES

MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero/optimizer_state.pt"
TENSORS = ("exp_avg", "exp_avg_sq", "fp32")
"""The tensors of each parameter, the order in which a load takes most memory."""
STEP = "step"
ELEMENT_NBYTES = 4
"""Bytes of an element of a parameter, or of a moment of it: all are float32."""


def shards_parameters(state: TrainingState) -> bool:
    """True of stage 3, whose files have no weights, and no step counter for each parameter."""
    return all(part.name != "parameters" for part in state.parts)


def keys_of(state: TrainingState) -> tuple[str, ...]:
    """Names of the files of each parameter."""
    return TENSORS if shards_parameters(state) else (*TENSORS, STEP)


def universal_files(
    scenario: Scenario, state: TrainingState, tensors: Sequence[StateTensor]
) -> tuple[CheckpointFile, ...]:
    """The files with tensors in them; `tensors` are those of rank 0 in DeepSpeed's own files."""
    is_last_stage = shards_parameters(state)
    common = CheckpointFile(
        name=OPTIMIZER if is_last_stage else MODEL, rank=0,
        tensors=tuple(
            tensor.nbytes for tensor in tensors
            if is_last_stage or tensor.key[0] == "parameters"
        ),
    )
    return (common, *(
        CheckpointFile(
            name=f"zero/{parameter.fqn}/{key}.pt", rank=0,
            tensors=(STEP_NBYTES if key == STEP else ELEMENT_NBYTES * parameter.numel,),
        )
        for parameter in _parameters(scenario) for key in keys_of(state)
    ))


def _parameters(scenario: Scenario) -> Sequence[Parameter]:
    """All parameters, as they are registered, or in the order of our own flat buffers."""
    strategy, model = STRATEGIES[scenario.strategy], scenario.model
    buffers = strategy.flat_buffers(scenario.options, model, scenario.precision.parameters)
    return [each for group, _ in buffers for each in group.parameters] or model.named_parameters


def pieces(state: TrainingState) -> Files:
    """The pieces of parameters that lie in each part of the flat buffers, by their numbers there.
    """
    part = StatePart(name="fp32", element_nbytes=ELEMENT_NBYTES, is_sharded=True)
    return state.pieces(part, state.num_shards)


def universal_reads(
    files: Sequence[CheckpointFile], wanted: TrainingState
) -> tuple[tuple[FileRead, ...], ...]:
    """The reads of each rank whose state is `wanted` from `files`, in its order."""
    made = (
        [_reads_of_all(files, shard, wanted) for shard in pieces(wanted)]
        if shards_parameters(wanted)
        else [_reads_of_pieces(files, shard, keys_of(wanted)) for shard in pieces(wanted)]
    )
    return tuple(tuple(made[rank % wanted.num_shards]) for rank in range(wanted.num_ranks))


def _reads_of_all(
    files: Sequence[CheckpointFile], shard: Sequence[Piece], wanted: TrainingState
) -> list[FileRead]:
    """The reads of a rank of stage 3: the optimizer's file, then all weights, and all moments."""
    used = {piece.parameter: piece.interval.numel * ELEMENT_NBYTES for piece in shard}
    numbers = range(len(wanted.entries))
    return [FileRead(file=0, nbytes=files[0].nbytes, used=0), *(
        FileRead(file=file, nbytes=files[file].nbytes, used=used.get(number, 0))
        for key in (2, 0, 1) for number in numbers for file in [1 + len(TENSORS) * number + key]
    )]


def _reads_of_pieces(
    files: Sequence[CheckpointFile], shard: Sequence[Piece], keys: Sequence[str]
) -> list[FileRead]:
    """The reads of a rank of stages 1 and 2: the model's file, twice, then parameters."""
    weights = FileRead(file=0, nbytes=files[0].nbytes, used=0)
    return [weights, weights, *(
        FileRead(
            file=file, nbytes=files[file].nbytes,
            used=STEP_NBYTES if key == STEP else piece.interval.numel * ELEMENT_NBYTES,
        )
        for piece in shard for file, key in enumerate(keys, 1 + len(keys) * piece.parameter)
    )]
