"""The device mesh: ranks in row-major order over named axes, and the groups that share all
coordinates but one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

AXES: tuple[str, ...] = ("dp_replicate", "dp_shard")
RESERVED_AXES: tuple[str, ...] = (
    "tp", "pp", "cp", "ep", "sp", "tensor_parallel", "pipeline_parallel", "context_parallel",
    "expert_parallel", "sequence_parallel", "loss_parallel",
)


def part_of(axis: str, size: int) -> str:
    """The name of the groups of `size` neighbours on an axis.

    >>> part_of("dp_shard", 4), axis_of("dp_shard:4"), axis_of("dp_shard")
    ('dp_shard:4', 'dp_shard', 'dp_shard')
    """
    return f"{axis}:{size}"


def every(axis: str, step: int) -> str:
    """The name of the groups of every `step`-th rank on an axis.

    >>> every("dp_shard", 4), axis_of("dp_shard/4")
    ('dp_shard/4', 'dp_shard')
    """
    return f"{axis}/{step}"


def axis_of(group: str) -> str:
    """The axis that a group, or a part of it, lies on; "world" for all ranks together."""
    return group.partition(":")[0].partition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Sizes of the axes; the last axis varies fastest, as in torch's `init_device_mesh`. A 1-D mesh
    has dp_replicate 1.

    Groups are named: an axis ("dp_shard"), a part of it, or "world" for all ranks together. Parts
    are n neighbours ("axis:n") or every n-th rank ("axis/n"). Methods that take a group raise
    KeyError for a name that is none of these.
    """

    dp_replicate: int = 1
    dp_shard: int = 1

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes in the order of `AXES`."""
        return (self.dp_replicate, self.dp_shard)

    def size(self, name: str) -> int:
        """The number of ranks in one group called `name`."""
        axis = axis_of(name)
        if axis != "world" and axis not in AXES:
            raise KeyError(name)
        whole = self.world_size if axis == "world" else int(getattr(self, axis))
        if name == axis:
            return whole
        part = name[len(axis) + 1 :]
        if not (part.isdecimal() and int(part) and whole % int(part) == 0):
            raise KeyError(name)
        return int(part) if name[len(axis)] == ":" else whole // int(part)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """(dp_replicate, dp_shard) of `rank`."""
        return divmod(rank, self.dp_shard)

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks of `rank`'s group called `name`, in group order."""
        size, stride = self.size(name), self._stride(name)
        return _ranks(rank - rank // stride % size * stride, size, stride)

    def position(self, name: str, rank: int) -> int:
        """The position of `rank` in its group called `name`, from 0."""
        return rank // self._stride(name) % self.size(name)

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """All groups called `name`, ordered by their first rank."""
        size, stride = self.size(name), self._stride(name)
        whole = size * stride
        return tuple(
            _ranks(first, size, stride)
            for start in range(0, self.world_size, whole)
            for first in range(start, start + stride)
        )

    def _stride(self, name: str) -> int:
        """Distance between neighbours, in ranks. The last axis varies fastest, and so does
        "world"."""
        step = int(name.partition("/")[2] or 1)
        return step * (self.dp_shard if name.startswith("dp_replicate") else 1)

    def __str__(self) -> str:
        sizes = [f"{axis}={size}" for axis, size in zip(AXES, self.shape, strict=True) if size > 1]
        if not sizes:
            return "mesh of one rank"
        return f"mesh {' × '.join(sizes)} ({prod(self.shape)} ranks)"


@lru_cache(maxsize=8192)
def _ranks(first: int, size: int, stride: int) -> tuple[int, ...]:
    """One tuple for all members of a group: large meshes have as many members as ranks."""
    return tuple(range(first, first + size * stride, stride))
