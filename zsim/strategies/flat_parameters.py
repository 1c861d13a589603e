"""Flat parameters, as torch's FullyShardedDataParallel makes one of each wrapped module, and what of one is alive on a rank.

The parameters of a unit are concatenated and cut into equal shards, the last of them padded. Where the original parameters stay
visible (use_orig_params), each begins at a multiple of 16 bytes of the dtype of compute, and the whole divides by the shards.
Source: torch/distributed/fsdp/_flat_param.py, FlatParamHandle._init_flat_param_and_metadata, _get_shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zsim.model import ModelSpec, ParamGroup
from zsim.sharding import FlatLayout
from zsim.strategies.building import trained_parameters
from zsim.training import DTYPE_NBYTES

ALIGNMENT_NBYTES = 16
"""Where use_orig_params puts parameters in the flat one (_get_aligned_numel)."""


@dataclass(slots=True, kw_only=True, eq=False)
class FlatParameter:
    """The flat parameter of a unit on one rank, and what of it is alive. `pieces` are (fqn, elements); padding has no name."""

    fqn: str
    pieces: tuple[tuple[str, int], ...]
    layout: FlatLayout
    unsharded: bool = False
    """Whether its unsharded storage is allocated."""
    prefetched: bool = False
    awaits_forward: bool = False
    """Whether a prefetch in forward would not come too late."""
    awaits_backward: bool = False
    """Whether its unit ran forward and has not begun backward."""

    @property
    def numel(self) -> int:
        """Elements of the unsharded flat parameter, with the padding between parameters and without that of the last shard."""
        return self.layout.numel

    @property
    def padded(self) -> int:
        """Elements of all shards."""
        return self.layout.padded_numel

    @property
    def shard(self) -> int:
        """Elements that every rank keeps."""
        return self.layout.shard_numel

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters in it."""
        return tuple([fqn for fqn, _ in self.pieces if fqn])

    @property
    def paddings(self) -> tuple[int, ...]:
        """Elements of each padding between its parameters."""
        return tuple([numel for fqn, numel in self.pieces if not fqn])

    def held(self, rank: int) -> Iterator[tuple[str, int]]:
        """Which parameters `rank` has elements of, and how many."""
        for piece in self.layout.pieces(rank):
            if self.pieces[piece.parameter][0]:
                yield self.pieces[piece.parameter][0], piece.interval.numel


def flat_parameters(model: ModelSpec, *, num_shards: int, dtype: str, aligned: bool) -> dict[str, FlatParameter]:
    """The flat parameters of `model` by unit, the root's first where it has one; `dtype` is that of compute."""
    return {unit.fqn: _flattened(unit, num_shards=num_shards, dtype=dtype, aligned=aligned) for unit in model.units}


def _flattened(unit: ParamGroup, *, num_shards: int, dtype: str, aligned: bool) -> FlatParameter:
    pieces: list[tuple[str, int]] = []
    total = 0
    multiple = ALIGNMENT_NBYTES // DTYPE_NBYTES[dtype] if aligned else 1
    ends = [*((parameter.fqn, parameter.numel, multiple) for parameter in unit.parameters), ("", 0, num_shards if aligned else 1)]
    for fqn, numel, to in ends:
        padding = -total % to
        pieces += [("", padding)] if padding else []
        pieces += [(fqn, numel)] if fqn else []
        total += padding + numel
    layout = FlatLayout(numels=tuple([numel for _, numel in pieces]), num_shards=num_shards)
    return FlatParameter(fqn=unit.fqn, pieces=tuple(pieces), layout=layout)


def stepped(model: ModelSpec, flats: dict[str, FlatParameter], *, rank: int, original: bool) -> list[int]:
    """The elements of each parameter that `rank` steps, in the optimizer's order: flat shards, or its part of each original one."""
    if not original:
        return [flat.shard for flat in flats.values()]
    held = dict(item for flat in flats.values() for item in flat.held(rank))
    return [held[parameter.fqn] for parameter in trained_parameters(model) if parameter.fqn in held]
