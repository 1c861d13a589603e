"""FlatPartition: all trained parameters in one flat buffer, cut into a part for each rank.

It is padded at its end to a multiple of two elements a rank. A rank owns the elements of its part,
and keeps whole gradients of the parameters that reach into it. Source:
deepspeed/runtime/zero/stage_1_and_2.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zsim.ir.buffers import bucket_of
from zsim.models.spec import Parameter
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building.kernels import MASTER_DTYPE
from zsim.strategies.deepspeed_engine.layout import SCALED_DTYPE, EngineLayout
from zsim.strategies.deepspeed_engine.options import ReplicaOptions

ALIGNMENT = 2
"""Elements that each rank's part is a multiple of."""
MASTER_NBYTES = DTYPE_NBYTES[MASTER_DTYPE]


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part: the whole elements of the parameters that reach into it, the elements that
    lie in it of each, and padding behind them."""

    touched: tuple[Parameter, ...]
    pieces: tuple[int, ...]
    padding: int

    @property
    def touched_numel(self) -> int:
        """Elements of all parameters that reach into the part."""
        return sum([parameter.numel for parameter in self.touched])


@dataclass(frozen=True, kw_only=True)
class FlatPartition(EngineLayout):
    """The trained parameters of a training, laid out for `num_ranks` ranks."""

    options: ReplicaOptions

    @property
    def searches_infinities(self) -> bool:
        """True where gradients are searched for infinities before a step: those of fp16 always."""
        if self.dtype == SCALED_DTYPE:
            return True
        return self.dtype != MASTER_DTYPE and self.options.check_grad_overflow

    @cached_property
    def laid_out(self) -> tuple[Parameter, ...]:
        """The trained parameters in the order of the flat buffer."""
        if not self.options.round_robin_gradients:
            return self.parameters
        ranks = self.num_ranks
        return tuple([p for rank in range(ranks) for p in self.parameters[rank::ranks]])

    @cached_property
    def numel(self) -> int:
        """Elements of the flat buffer without padding."""
        return sum([parameter.numel for parameter in self.parameters])

    @property
    def part_numel(self) -> int:
        """Elements of each rank's part, padding included."""
        return -(-self.numel // (ALIGNMENT * self.num_ranks)) * ALIGNMENT

    @property
    def padded_numel(self) -> int:
        """Elements of the flat buffer."""
        return self.part_numel * self.num_ranks

    @cached_property
    def slices(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """The owners of each parameter, with the elements that each owns, in order."""
        part, begin = self.part_numel, 0
        owners: dict[str, tuple[tuple[int, int], ...]] = {}
        for parameter in self.laid_out:
            end = begin + parameter.numel
            owners[parameter.fqn] = tuple(
                (rank, min(end, (rank + 1) * part) - max(begin, rank * part))
                for rank in range(begin // part, -(-end // part))
            )
            begin = end
        return owners

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """The share of each rank."""
        touched: list[list[Parameter]] = [[] for _ in range(self.num_ranks)]
        pieces: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for parameter in self.laid_out:
            for rank, numel in self.slices[parameter.fqn]:
                touched[rank].append(parameter)
                pieces[rank].append(numel)
        return tuple(
            Share(tuple(whole), tuple(numels), self.part_numel - sum(numels))
            for whole, numels in zip(touched, pieces, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are averaged together.

    `in_buffer`: they lie in the bucket's buffer; False for a single one that is larger than it.
    `reductions`: the slices by owner in each of its all-reduces, in elements.
    """

    number: int
    parameters: tuple[Parameter, ...]
    in_buffer: bool
    reductions: tuple[tuple[int, ...], ...]

    @property
    def name(self) -> str:
        """The unit of its ops."""
        return bucket_of(self.number)

    @property
    def numel(self) -> int:
        """Elements of its gradients."""
        return sum([parameter.numel for parameter in self.parameters])


def buckets(
    order: Sequence[Parameter], *, most: int, flat: FlatPartition | None = None
) -> tuple[Bucket, ...]:
    """The buckets of gradients that come in this `order`; one closes before a gradient that would
    make it larger than `most` elements. Slices are those of the owners in `flat`, if there is one.
    """
    groups, filled = list[list[Parameter]](), most + 1
    for parameter in order:
        if filled + parameter.numel > most:
            groups.append([])
            filled = 0
        groups[-1].append(parameter)
        filled += parameter.numel
    return tuple(
        Bucket(
            number, tuple(group), group[0].numel <= most,
            ((sum(parameter.numel for parameter in group),),)
            if flat is None or not flat.options.reduce_scatter
            else _reductions(flat, group, most=most),
        )
        for number, group in enumerate(groups)
    )


def _reductions(
    flat: FlatPartition, group: Sequence[Parameter], *, most: int
) -> tuple[tuple[int, ...], ...]:
    """All-reduces of a bucket. Slices of neighbours with one owner are joined, and an all-reduce
    ends with the slice that makes it larger than `most` elements."""
    owned = list[list[int]]()
    for parameter in group:
        for rank, numel in flat.slices[parameter.fqn]:
            if owned and owned[-1][0] == rank:
                owned[-1][1] += numel
            else:
                owned.append([rank, numel])
    reductions, filled = [list[int]()], 0
    for _, numel in owned:
        if filled > most:
            reductions.append([])
            filled = 0
        reductions[-1].append(numel)
        filled += numel
    return tuple(map(tuple, reductions))
