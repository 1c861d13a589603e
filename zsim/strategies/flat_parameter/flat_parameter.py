"""FlatParameter: the parameters of a unit as one, cut into equal shards.

Parameters are concatenated as the modules register them; the last shard is padded. With
use_orig_params each begins at a multiple of 16 bytes of the dtype of compute, and the whole divides
by the shards. Source: torch/distributed/fsdp/_flat_param.py,
FlatParamHandle._init_flat_param_and_metadata, _get_shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zsim.ir.buffers import NOTHING, Buffer
from zsim.ir.sharding import FlatLayout
from zsim.models.spec import ModelSpec, ParamGroup
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building.kernels import MASTER_DTYPE

ALIGNMENT_NBYTES = 16
"""Alignment of parameters in the flat one with use_orig_params (_get_aligned_numel)."""


@dataclass(slots=True, kw_only=True, eq=False)
class FlatParameter:
    """The flat parameter of a unit on one rank, and where a step is with it. `pieces` are (fqn,
    elements); padding has no name."""

    fqn: str
    pieces: tuple[tuple[str, int], ...]
    layout: FlatLayout
    trained: bool = True
    """True where a gradient arises: a parameter is trained, and forward runs the unit."""
    unsharded: bool = False
    """The unsharded storage is allocated."""
    in_use: bool = False
    """The parameter is its unsharded storage now, and not its shard."""
    prefetched: bool = False
    awaits_forward: bool = False
    """A prefetch in forward would still be in time."""
    awaits_backward: bool = False
    """The unit ran forward and has not begun backward."""
    entered: bool = False
    """The unit has begun backward since it last ran forward."""
    post_forward_index: int | None = None
    """Index among the forwards that have ended in this micro-batch: the one before is prefetched.
    """
    runs: int = 0
    """Number of views that forward has made in this micro-batch."""
    splits: int = 0
    """Number of views that wait for the gradients of their parts."""
    accumulating: Buffer = NOTHING
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
        """Parameters in the shard of `rank`, and their elements there."""
        for piece in self.layout.pieces(rank):
            if self.pieces[piece.parameter][0]:
                yield self.pieces[piece.parameter][0], piece.interval.numel


def placeholders(
    model: ModelSpec, flats: dict[str, FlatParameter], *, rank: int, dtype: str
) -> dict[str, tuple[int, ...]]:
    """Elements of the placeholders that `rank` makes for unsharded gradients of another shape or
    dtype; by unit.

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
    indices, unused = {fqn: index for index, fqn in enumerate(model.registered)}, model.unused
    return {
        unit.fqn: _flattened(
            replace(
                unit,
                parameters=tuple(
                    sorted(unit.parameters, key=lambda parameter: indices.get(parameter.fqn, 0))
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

    One that forward skips while others of its flat parameter run is stepped by a gradient of
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
