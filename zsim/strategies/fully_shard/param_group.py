"""Param groups cut along dim 0, as `fully_shard` cuts them: what a rank holds of each, and what of
it is alive now."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Final, Literal, NamedTuple

from zsim.ir.buffers import Buffer, Form, form_of, unsharded_gradient_of
from zsim.ir.sharding import Dim0Layout, shard_size
from zsim.models.spec import ROOT, ModelSpec, Parameter
from zsim.strategies.building.parameters import trained_parameters


@dataclass(slots=True, unsafe_hash=True)
class Sharded:
    """One parameter as every rank holds it: `shard` padded elements of it, some of which may be
    padding.

    One that is not `trained`, frozen or of a unit that forward skips, gets no gradient.
    """

    fqn: Final[str]
    numel: Final[int]
    shard: Final[int]
    padded: Final[int]
    trained: Final[bool] = True


@dataclass(slots=True, kw_only=True, eq=False)
class FSDPParamGroup:
    """A param group on one rank, and what of it is alive now."""

    fqn: str
    parameters: tuple[Sharded, ...]
    unsharded: bool = False
    gathered: bool = False
    state: Literal["idle", "pre_backward", "post_backward"] = "idle"
    """State of its backward, as torch's TrainingState says."""
    in_backward: bool = False
    """The pre-backward hook has run in this backward: a recomputation begins and ends no forward.
    """
    resharded_to: int = 0
    """Ranks that a group kept in `1/ranks` parts after forward is spread over; 0 when it is not."""
    part: Form | None = None
    """Form of its parameters in that part. Without a backward they outlive it until the next part
    is there."""

    forward_prefetch: tuple[FSDPParamGroup, ...] = ()
    """Gathered when its forward begins (set_modules_to_forward_prefetch)."""
    backward_prefetch: tuple[FSDPParamGroup, ...] = ()
    """Gathered when its backward begins (set_modules_to_backward_prefetch)."""
    post_forward_indices: list[int] = field(default_factory=list)
    """Positions in the order in which forwards ended; backward uses up the last one."""

    totals: dict[str, int] = field(init=False)
    """The sums over parameters of "numel", "shard" and "padded"."""

    trained: tuple[Sharded, ...] = field(init=False)
    """The parameters that get gradients: those that are reduced, in their order."""

    reduces: dict[str, int] = field(init=False)
    """`totals` of the trained parameters alone."""

    whole: tuple[Buffer, ...] = field(init=False)
    """The unsharded parameters."""

    gradients: tuple[Buffer, ...] = field(init=False)
    """The unsharded gradients of the trained parameters."""

    def __post_init__(self) -> None:
        self.trained = tuple([parameter for parameter in self.parameters if parameter.trained])
        self.totals = _totals(self.parameters)
        self.whole = tuple([form_of(parameter.fqn, "unsharded") for parameter in self.parameters])
        self.gradients = tuple([unsharded_gradient_of(p.fqn) for p in self.trained])
        self.reduces = self.totals if self.trained == self.parameters else _totals(self.trained)


def _totals(parameters: tuple[Sharded, ...]) -> dict[str, int]:
    return {
        "numel": sum([parameter.numel for parameter in parameters]),
        "shard": sum([parameter.shard for parameter in parameters]),
        "padded": sum([parameter.padded for parameter in parameters]),
    }


def sharded_groups(model: ModelSpec, *, num_shards: int) -> dict[str, FSDPParamGroup]:
    """The units of `model` by fqn, cut along dim 0: padded to equal shards, so that every rank
    holds the same."""
    trained, layouts = model.trained, _layouts(model.parameters, num_shards)
    sizes = {
        shape: (prod(shape), layout.shard_numel, layout.padded_numel)
        for shape, layout in layouts.items()
    }
    groups = {}
    for unit in model.units:
        parameters = [Sharded(p.fqn, *sizes[p.shape], p.fqn in trained) for p in unit.parameters]
        groups[unit.fqn] = FSDPParamGroup(fqn=unit.fqn, parameters=tuple(parameters))
    return groups


def local_numels(model: ModelSpec, *, num_shards: int, rank: int) -> list[int]:
    """The elements, without padding, that `rank` holds of each trained parameter, in the
    optimizer's order."""
    parameters = trained_parameters(model)
    local = {
        shape: layout.local_numel(rank)
        for shape, layout in _layouts(parameters, num_shards).items()
    }
    return [local[parameter.shape] for parameter in parameters]


def _layouts(
    parameters: tuple[Parameter, ...], num_shards: int
) -> dict[tuple[int, ...], Dim0Layout]:
    """Each shape's layout: a model has many parameters, but of few shapes."""
    return {
        shape: Dim0Layout(shape=shape, num_shards=num_shards)
        for shape in {parameter.shape for parameter in parameters}
    }


class ReshardPlan(NamedTuple):
    """`reshard_after_forward` as fully_shard reads it: of blocks, of the root, and the ranks that
    share what is kept (0: all ranks)."""

    blocks: bool
    root: bool
    to: int = 0

    @classmethod
    def of(cls, value: Literal["auto"] | bool | int, *, num_shards: int) -> ReshardPlan:
        """All ranks are True, another number holds for the root too."""
        if value == "auto":
            return cls(blocks=True, root=False)
        if isinstance(value, bool):
            return cls(blocks=value, root=value)
        return cls(blocks=True, root=True, to=value if value != num_shards else 0)

    def frees(self, group: FSDPParamGroup) -> bool:
        """True where forward reshards `group`."""
        return self.root if group.fqn == ROOT else self.blocks


def first_of_each_kind(model: ModelSpec, *, num_shards: int) -> list[int]:
    """The first rank of each run of ranks with equal shards.

    Full shards come first, then for each size of dim 0 a last partial one, then empty ones.
    """
    starts = {0}
    for rows in {rows for parameter in model.parameters for rows in parameter.shape[:1] if rows}:
        full = rows // shard_size(rows, num_shards)
        starts |= {full, full + 1} if rows % shard_size(rows, num_shards) else {full}
    return sorted(start for start in starts if start < num_shards)
