"""The files of each format of a checkpoint: their names, tensors and writers.

DeepSpeed's files hold flat buffers of its own cut, whatever the strategy's. Stages 1 and 2 have one
of all trained parameters. Stage 3 cuts each parameter by itself, and has one for each sub-group
that the optimizer steps. Its file of stage 3's model has no weights. Files of sub-groups on drives
are copied as they are, but for gradients.
Source: DeepSpeed 0.19.8, runtime/engine.py and runtime/zero, as measured on gloo.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from zsim.analysis.checkpoints.files.dcp_plan import written
from zsim.analysis.checkpoints.state import (
    StateEntry,
    StatePart,
    StateTensor,
    TrainingState,
    state_of,
)
from zsim.models.saving import OF_DEEPSPEED
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES
from zsim.strategies.deepspeed_engine.shards.drives import whole_kib
from zsim.strategies.strategy import DriveFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """A file that `rank` writes, and the bytes of its tensors, each of its own."""

    name: str
    rank: int
    tensors: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors; headers are not counted."""
        return sum(self.tensors)


def saved_state(scenario: Scenario) -> TrainingState:
    """The state that the scenario's checkpoint holds, cut as its format has it."""
    state = state_of(scenario)
    if scenario.checkpoint.format not in OF_DEEPSPEED:
        return state
    strategy = STRATEGIES[scenario.strategy]
    is_last_stage = strategy.formula.stage == "zero3"
    trained = [numel for entry in state.entries if entry.trained for numel in entry.numels]
    frozen = [numel for entry in state.entries if not entry.trained for numel in entry.numels]
    groups = [(numel,) for numel in trained] if is_last_stage else [tuple(trained)]
    counting = set(strategy.stepped(scenario.options, trained, state.num_shards))
    return replace(
        state,
        entries=tuple(
            StateEntry(
                fqn=f"group {index}", numels=numels, alignment=1 if is_last_stage else 2,
                trained=index < len(groups), counts=index in counting or not is_last_stage,
            )
            for index, numels in enumerate([*groups, *([tuple(frozen)] if frozen else [])])
        ),
        parts=tuple(_of_deepspeed(state.parts, has_weights=not is_last_stage)),
    )


def _of_deepspeed(parts: tuple[StatePart, ...], *, has_weights: bool) -> list[StatePart]:
    """DeepSpeed's parts: it has float32 copies of float32 parameters too."""
    weights = [part for part in parts if not part.of_optimizer and has_weights]
    master = StatePart(name="master", element_nbytes=4, is_sharded=True)
    rest = [part for part in parts if part.of_optimizer and part.name != "master"]
    return [*weights, master, *(replace(part, is_sharded=True) for part in rest)]


def rank_tensors(scenario: Scenario, state: TrainingState) -> tuple[tuple[StateTensor, ...], ...]:
    """The tensors that each rank writes; of whole ones rank 0 alone, for which it gathers them."""
    held = [state.tensors(rank) for rank in range(state.num_ranks)]
    if scenario.checkpoint.format == "sharded":
        return written(held)
    if scenario.checkpoint.format == "consolidated":
        everything = tuple(
            StateTensor(key=(part.name, index, -1), nbytes=state.whole_nbytes(part, entry))
            for part, index, entry in state.pairs()
        )
        return (everything, *((),) * (state.num_ranks - 1))
    sharded = {part.name for part in state.parts if part.is_sharded}
    on_drives = files_on_drives(scenario)
    return tuple(
        tuple(
            _on_drive(tensor, on_drives) for tensor in _sub_groups(state, own)
            if (tensor.key[0] in sharded and rank < state.num_shards) or rank == 0
        )
        for rank, own in enumerate(held)
    )


def _sub_groups(state: TrainingState, own: tuple[StateTensor, ...]) -> Iterator[StateTensor]:
    """The tensors of a rank, those of parameters that the optimizer counts together as one."""
    flat = dict[tuple[str, int, int], int]()
    numbers = dict[str, int]()
    for (part, _, entry), tensor in zip(state.pairs(), own, strict=True):
        number = numbers.get(part.name, -1) + entry.counts
        # weights are views of the flat buffer, which torch.save writes with its padding
        is_flat = entry.trained and not part.is_sharded
        nbytes = state.gathered_nbytes(part, entry) if is_flat else tensor.nbytes
        numbers[part.name] = number
        key = (part.name, number, tensor.key[2])
        flat[key] = flat.get(key, 0) + nbytes
    yield from (StateTensor(key=key, nbytes=nbytes) for key, nbytes in flat.items())


def files_on_drives(scenario: Scenario) -> Mapping[int, DriveFiles]:
    """The files on a rank's drives, by the number of the tensor that the optimizer steps."""
    return STRATEGIES[scenario.strategy].files_on_drives(
        scenario.offload, scenario.options, scenario.model, scenario.mesh, scenario.precision
    )


def _on_drive(tensor: StateTensor, known: Mapping[int, DriveFiles]) -> StateTensor:
    """The tensor with its file, where it is of a sub-group on drives, and that file's bytes."""
    part, number, _ = tensor.key
    if number not in known or part == "step":
        return tensor
    name = f"{'' if part == 'master' else f'{part}-'}{known[number].name}.tensor.swp"
    return replace(tensor, nbytes=whole_kib(tensor.nbytes), on_drive=name)


def files(
    scenario: Scenario, state: TrainingState, tensors: tuple[tuple[StateTensor, ...], ...]
) -> tuple[CheckpointFile, ...]:
    """The checkpoint's files with tensors in them, rank by rank."""
    if scenario.checkpoint.format == "consolidated":
        return (CheckpointFile(name="checkpoint.pt", rank=0, tensors=_sizes(tensors[0])),)
    if scenario.checkpoint.format == "sharded":
        return tuple(
            CheckpointFile(name=f"__{rank}_0.distcp", rank=rank, tensors=_sizes(own))
            for rank, own in enumerate(tensors)
        )
    prefix = "bf16_" if scenario.precision.parameters == "bfloat16" else ""
    made = []
    for rank, own in enumerate(tensors[: state.num_shards]):
        weights = tuple(tensor for tensor in own if tensor.key[0] == "parameters")
        states = tuple(
            tensor for tensor in own if tensor.key[0] != "parameters" and not tensor.on_drive
        )
        if weights:
            made.append(CheckpointFile(
                name="mp_rank_00_model_states.pt", rank=rank, tensors=_sizes(weights)
            ))
        name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        made.append(CheckpointFile(name=name, rank=rank, tensors=_sizes(states)))
        made += [
            CheckpointFile(
                name=f"offloaded_tensors/rank{rank:02d}/{tensor.on_drive}", rank=rank,
                tensors=(tensor.nbytes,),
            )
            for tensor in own if tensor.on_drive
        ]
    return tuple(made)


def _sizes(tensors: tuple[StateTensor, ...]) -> tuple[int, ...]:
    return tuple(tensor.nbytes for tensor in tensors)
