"""Flat parameters, as torch's FullyShardedDataParallel makes one of each wrapped module, and what
of one is alive on a rank.

The parameters of a unit are concatenated as its modules register them, and cut into equal shards,
the last of them padded. Where the original parameters stay visible (use_orig_params), each begins
at a multiple of 16 bytes of the dtype of compute, and the whole divides by the shards. Source:
torch/distributed/fsdp/_flat_param.py, FlatParamHandle._init_flat_param_and_metadata, _get_shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zsim.ir.sharding import FlatLayout
from zsim.models.spec import ModelSpec, ParamGroup
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building.kernels import MASTER_DTYPE

ALIGNMENT_NBYTES = 16
"""Where use_orig_params puts parameters in the flat one (_get_aligned_numel)."""


@dataclass(slots=True, kw_only=True, eq=False)
class FlatParameter:
    """The flat parameter of a unit on one rank, and where a step is with it. `pieces` are (fqn,
    elements); padding has no name."""

    fqn: str
    pieces: tuple[tuple[str, int], ...]
    layout: FlatLayout
    trained: bool = True
    """Whether it gets a gradient: one of its parameters is trained, and forward does not pass its
    unit by."""
    unsharded: bool = False
    """Whether its unsharded storage is allocated."""
    in_use: bool = False
    """Whether it is its unsharded storage now, and not its shard."""
    prefetched: bool = False
    awaits_forward: bool = False
    """Whether a prefetch in forward would not come too late."""
    awaits_backward: bool = False
    """Whether its unit ran forward and has not begun backward."""
    entered: bool = False
    """Whether its unit has begun backward since it last ran forward."""
    place: int | None = None
    """Among the forwards that have ended in this micro-batch: whose it looks before for what to
    prefetch."""
    runs: int = 0
    """How often forward has made views of it in this micro-batch."""
    splits: int = 0
    """How many of these wait for the gradients of their parts."""
    accumulating: str = ""
    """The sum of its gradients from the runs of its unit so far, which waits for the others."""

    @property
    def numel(self) -> int:
        """Elements of the unsharded flat parameter, with the padding between parameters and without
        that of the last shard."""
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


def placeholders(
    model: ModelSpec, flats: dict[str, FlatParameter], *, rank: int, dtype: str
) -> dict[str, tuple[int, ...]]:
    """By unit: elements of what `rank` makes to hang an unsharded gradient on each original
    parameter, which has another shape or dtype.

    torch makes a gradient like the shard, and then gives it the other one's data
    (_use_unsharded_grad_views).
    """
    whole = {
        p.fqn: p.numel for p in model.parameters if len(p.shape) == 1 and dtype == MASTER_DTYPE
    }
    return {
        flat.fqn: tuple([numel for fqn, numel in flat.held(rank) if whole.get(fqn) != numel])
        for flat in flats.values()
    }


def flat_parameters(
    model: ModelSpec, *, num_shards: int, dtype: str, aligned: bool
) -> dict[str, FlatParameter]:
    """The flat parameters of `model` by unit, the root's first where it has one; `dtype` is that of
    compute."""
    places, unused = {fqn: place for place, fqn in enumerate(model.registered)}, model.unused
    return {
        unit.fqn: _flattened(
            replace(
                unit,
                parameters=tuple(
                    sorted(unit.parameters, key=lambda parameter: places.get(parameter.fqn, 0))
                ),
            ),
            num_shards=num_shards, dtype=dtype, aligned=aligned, used=unit.fqn not in unused,
        )
        for unit in model.units
    }


def _flattened(
    unit: ParamGroup, *, num_shards: int, dtype: str, aligned: bool, used: bool
) -> FlatParameter:
    pieces: list[tuple[str, int]] = []
    total = 0
    multiple = ALIGNMENT_NBYTES // DTYPE_NBYTES[dtype] if aligned else 1
    ends = [
        *((parameter.fqn, parameter.numel, multiple) for parameter in unit.parameters),
        ("", 0, num_shards if aligned else 1),
    ]
    for fqn, numel, to in ends:
        padding = -total % to
        pieces += [("", padding)] if padding else []
        pieces += [(fqn, numel)] if fqn else []
        total += padding + numel
    layout = FlatLayout(numels=tuple([numel for _, numel in pieces]), num_shards=num_shards)
    trained = used and any(parameter.requires_grad for parameter in unit.parameters)
    return FlatParameter(fqn=unit.fqn, pieces=tuple(pieces), layout=layout, trained=trained)


def stepped(
    model: ModelSpec, flats: dict[str, FlatParameter], *, rank: int, original: bool
) -> list[int]:
    """The elements of each parameter that `rank` steps, in the optimizer's order: flat shards, or
    its part of each original one.

    One that forward passes by while others of its flat parameter run is stepped by a gradient of
    zeros.
    """
    trained = [flat for flat in flats.values() if flat.trained]
    if not original:
        return [flat.shard for flat in trained]
    held = dict(item for flat in trained for item in flat.held(rank))
    return [
        held[parameter.fqn]
        for parameter in model.named_parameters
        if parameter.requires_grad and parameter.fqn in held
    ]
