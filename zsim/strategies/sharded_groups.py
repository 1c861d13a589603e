"""Param groups cut along dim 0, as `fully_shard` cuts them: what one rank holds of each, and what of it is alive now."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from zsim.model import ParamGroup
from zsim.sharding import Dim0Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """One parameter on one rank: every rank stores `shard` padded elements, of which `local` are its own."""

    fqn: str
    numel: int
    shard: int
    padded: int
    local: int


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

    def __post_init__(self) -> None:
        self.totals = {
            "numel": sum([parameter.numel for parameter in self.parameters]),
            "shard": sum([parameter.shard for parameter in self.parameters]),
            "padded": sum([parameter.padded for parameter in self.parameters]),
        }


def sharded_group(unit: ParamGroup, *, num_shards: int, rank: int) -> Group:
    """`unit` cut along dim 0 for `rank` of `num_shards`."""
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
            )
        )
    return Group(fqn=unit.fqn, parameters=tuple(parameters))
