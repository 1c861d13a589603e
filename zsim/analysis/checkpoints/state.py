"""The state that a checkpoint holds: parameters, master copies and optimizer states. Each is whole
or cut as the strategy cuts it.

An entry is one parameter, of which ranks hold rows, or one flat buffer of parameters. A part is one
tensor for each entry, such as all first moments. Formats of files are not known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from zsim.analysis.checkpoints.pieces import Files, by_rows, everywhere, flat
from zsim.ir.sharding import Dim0Layout, shard_size
from zsim.models.spec import ModelSpec
from zsim.models.training_options import DTYPE_NBYTES
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES
from zsim.strategies.building.optimizers import STEP_NBYTES, state_names


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """A tensor that ranks hold shards of: a parameter of `shape`, or a flat buffer of parameters of
    `numels`. Of one that is not `trained` there are no optimizer states.

    A buffer is padded to a multiple of `alignment` elements for each rank; 0 stands for rows.
    """

    fqn: str
    numels: tuple[int, ...]
    shape: tuple[int, ...] = ()
    trained: bool = True
    alignment: int = 0
    counts: bool = True
    """The optimizer counts its steps with it, and not with the entry before it."""

    @property
    def numel(self) -> int:
        """Elements without padding."""
        return sum(self.numels)

    def shard_numel(self, num_shards: int) -> int:
        """Elements of the largest shard, padding included."""
        if not self.alignment:
            return Dim0Layout(shape=self.shape or (1,), num_shards=num_shards).shard_numel
        return shard_size(self.numel, num_shards * self.alignment) * self.alignment

    def stored_numel(self, shard: int, num_shards: int) -> int:
        """Elements that the rank of this shard writes: of a parameter its own rows alone."""
        if not self.alignment:
            layout = Dim0Layout(shape=self.shape or (1,), num_shards=num_shards)
            return layout.local_numel(shard)
        return self.shard_numel(num_shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePart:
    """A tensor for each entry: its bytes an element, and whether ranks hold shards of it. Step
    counters are one element each, and `of_optimizer` are the tensors of trained entries alone."""

    name: str
    element_nbytes: int
    is_sharded: bool
    of_optimizer: bool = True
    is_counter: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """One tensor of a rank's state. Its key is part, number of the entry, and shard, -1 for a whole
    tensor: ranks with a tensor of one key have the same. `on_drive`: the name of its file there, ""
    for none."""

    key: tuple[str, int, int]
    nbytes: int
    on_drive: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Entries and parts on a mesh of `num_replicas` × `num_shards` ranks."""

    entries: tuple[StateEntry, ...]
    parts: tuple[StatePart, ...]
    num_shards: int
    num_replicas: int = 1

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.num_shards * self.num_replicas

    def tensors(self, rank: int) -> tuple[StateTensor, ...]:
        """The tensors of `rank` in the order of torch's state dicts: parameters, then the states.
        Empty shards are one tensor."""
        tensors = []
        for part, index, entry in self.pairs():
            nbytes = self.nbytes(part, entry, rank)
            shard = rank % self.num_shards if nbytes else self.num_shards
            tensors.append(StateTensor(
                key=(part.name, index, shard if part.is_sharded else -1), nbytes=nbytes
            ))
        return tuple(tensors)

    def pairs(self) -> Iterator[tuple[StatePart, int, StateEntry]]:
        """Each part with each of its entries, and the entry's number: parameters, then entry by
        entry the optimizer's."""
        for part in self.parts:
            if not part.of_optimizer:
                yield from ((part, index, entry) for index, entry in enumerate(self.entries))
        for index, entry in enumerate(self.entries):
            for part in self.parts:
                if part.of_optimizer and entry.trained and (entry.counts or not part.is_counter):
                    yield part, index, entry

    def nbytes(self, part: StatePart, entry: StateEntry, rank: int) -> int:
        """Bytes that `rank` holds of one tensor."""
        if part.is_counter:
            return part.element_nbytes
        if not part.is_sharded:
            return entry.numel * part.element_nbytes
        shard = rank % self.num_shards
        return entry.stored_numel(shard, self.num_shards) * part.element_nbytes

    def whole_nbytes(self, part: StatePart, entry: StateEntry) -> int:
        """Bytes of the whole tensor without padding."""
        return part.element_nbytes * (1 if part.is_counter else entry.numel)

    def gathered_nbytes(self, part: StatePart, entry: StateEntry) -> int:
        """Bytes of an all-gather of the tensor, padding included."""
        return entry.shard_numel(self.num_shards) * self.num_shards * part.element_nbytes

    def pieces(self, part: StatePart, num_ranks: int) -> Files:
        """The pieces of parameters that each of `num_ranks` shards has of this part."""
        entries = [entry for entry in self.entries if entry.trained or not part.of_optimizer]
        if not part.is_sharded:
            return everywhere([(numel,) for entry in entries for numel in entry.numels], num_ranks)
        if any(entry.alignment for entry in entries):
            alignment = max(entry.alignment for entry in entries)
            return flat([entry.numels for entry in entries], num_ranks, alignment=alignment)
        return by_rows([entry.shape or (1,) for entry in entries], num_ranks)


def state_of(scenario: Scenario) -> TrainingState:
    """The state of the scenario's training between two steps, as its strategy holds it."""
    strategy = STRATEGIES[scenario.strategy]
    buffers = strategy.flat_buffers(scenario.options, scenario.model, scenario.precision.parameters)
    entries = (
        tuple(
            StateEntry(
                fqn=group.fqn, numels=tuple(p.numel for p in group.parameters), trained=trained,
                alignment=1,
            )
            for group, trained in buffers
        )
        if buffers
        else _parameters(scenario.model)
    )
    shards_states = strategy.formula.stage != "ddp"
    return TrainingState(
        entries=entries,
        parts=parts_of(
            scenario, shards_parameters=strategy.formula.stage == "zero3",
            shards_states=shards_states, shards_counters=bool(buffers),
        ),
        num_shards=scenario.mesh.size(strategy.shard_axis) if shards_states else 1,
        num_replicas=scenario.mesh.dp_replicate,
    )


def _parameters(model: ModelSpec) -> tuple[StateEntry, ...]:
    trained = model.trained
    return tuple(
        StateEntry(
            fqn=parameter.fqn, numels=(prod(parameter.shape),), shape=parameter.shape,
            trained=parameter.fqn in trained,
        )
        for parameter in model.named_parameters
    )


def parts_of(
    scenario: Scenario, *, shards_parameters: bool, shards_states: bool, shards_counters: bool
) -> tuple[StatePart, ...]:
    """The parts of a state in the order of torch's: parameters, step counters, moments.

    The optimizer steps float32 copies, or shards, of two-byte parameters, unless the precision has
    no master.
    """
    precision, formula = scenario.precision, STRATEGIES[scenario.strategy].formula
    stepped = DTYPE_NBYTES[precision.stepped]
    is_narrow = DTYPE_NBYTES[precision.parameters] < stepped
    has_copy = is_narrow and formula.keeps == "master copy"
    made = [StatePart(
        name="parameters", is_sharded=shards_parameters, of_optimizer=False,
        element_nbytes=DTYPE_NBYTES[precision.parameters] if has_copy else stepped,
    )]
    if has_copy:
        made.append(StatePart(name="master", element_nbytes=stepped, is_sharded=shards_states))
    if scenario.optimizer.name == "adamw":
        made.append(StatePart(
            name="step", element_nbytes=STEP_NBYTES, is_sharded=shards_counters, is_counter=True
        ))
    made += [
        StatePart(name=name, element_nbytes=stepped, is_sharded=shards_states)
        for name in state_names(scenario.optimizer)
    ]
    return tuple(made)
