"""Param groups cut along dim 0, as `fully_shard` cuts them: what one rank holds of each, and what of it is alive now."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from zsim.model import ParamGroup
from zsim.sharding import Dim0Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """One parameter on one rank: every rank stores `shard` padded elements, of which `local` are its own.

    One that is not `trained`, frozen or of a unit that forward passes by, gets no gradient.
    """

    fqn: str
    numel: int
    shard: int
    padded: int
    local: int
    trained: bool = True


@dataclass(slots=True, kw_only=True)
class Group:
    """A param group on one rank, and what of it is alive now."""

    fqn: str
    parameters: tuple[Sharded, ...]
    unsharded: bool = False
    gathered: bool = False
    state: Literal["idle", "pre_backward", "post_backward"] = "idle"
    """Where backward is with it, as torch's TrainingState says."""
    resharded_to: int = 0
    """Ranks that a group kept in `1/ranks` parts after forward is spread over; 0 when it is not."""

    totals: dict[str, int] = field(init=False)
    """The sums over parameters of "numel", "shard" and "padded"."""

    trained: tuple[Sharded, ...] = field(init=False)
    """The parameters that get gradients: those that are reduced, in their order."""

    reduces: dict[str, int] = field(init=False)
    """`totals` of the trained parameters alone."""

    def __post_init__(self) -> None:
        self.trained = tuple([parameter for parameter in self.parameters if parameter.trained])
        self.totals = _totals(self.parameters)
        self.reduces = self.totals if self.trained == self.parameters else _totals(self.trained)


def _totals(parameters: tuple[Sharded, ...]) -> dict[str, int]:
    return {
        "numel": sum([parameter.numel for parameter in parameters]),
        "shard": sum([parameter.shard for parameter in parameters]),
        "padded": sum([parameter.padded for parameter in parameters]),
    }


def sharded_group(unit: ParamGroup, *, num_shards: int, rank: int, trained: frozenset[str]) -> Group:
    """`unit` cut along dim 0 for `rank` of `num_shards`; `trained` are the fqns of the parameters that get gradients."""
    parameters = []
    for parameter in unit.parameters:
        layout = Dim0Layout(shape=parameter.shape, num_shards=num_shards)
        parameters.append(
            Sharded(
                fqn=parameter.fqn,
                numel=parameter.numel,
                shard=layout.shard_numel,
                padded=layout.padded_numel,
                local=layout.local_numel(rank),
                trained=parameter.fqn in trained,
            )
        )
    return Group(fqn=unit.fqn, parameters=tuple(parameters))
