"""The device mesh: ranks in row-major order over named axes, and the groups that share all coordinates but one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

AXES: tuple[str, ...] = ("dp_replicate", "dp_shard")
RESERVED_AXES: tuple[str, ...] = ("tp", "pp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Sizes of the axes; the last axis varies fastest, as in torch's `init_device_mesh`. A 1-D mesh has dp_replicate 1.

    Groups are named: an axis ("dp_shard"), a part "axis:n" of it with n neighbours, or "world" for all ranks together.
    Methods that take a group raise KeyError for a name that is none of these.
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
        axis, colon, part = name.partition(":")
        if axis != "world" and axis not in AXES:
            raise KeyError(name)
        whole = self.world_size if axis == "world" else int(getattr(self, axis))
        if colon and not (part.isdecimal() and int(part) and whole % int(part) == 0):
            raise KeyError(name)
        return int(part) if colon else whole

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """(dp_replicate, dp_shard) of `rank`."""
        return divmod(rank, self.dp_shard)

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks of `rank`'s group called `name`, in group order."""
        size, stride = self.size(name), self.dp_shard if name.startswith("dp_replicate") else 1
        return _ranks(rank - self.place(name, rank) * stride, size, stride)

    def place(self, name: str, rank: int) -> int:
        """The place of `rank` in its group called `name`, from 0."""
        replicate, shard = self.coordinate(rank)
        along = {"world": rank, "dp_shard": shard, "dp_replicate": replicate}[name.partition(":")[0]]
        return along % self.size(name)

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """All groups called `name`, ordered by their first rank."""
        found: list[tuple[int, ...]] = []
        covered: set[int] = set()
        for rank in range(self.world_size):
            if rank not in covered:
                found.append(self.group(name, rank))
                covered.update(found[-1])
        return tuple(found)

    def __str__(self) -> str:
        sizes = [f"{axis}={size}" for axis, size in zip(AXES, self.shape, strict=True) if size > 1]
        return f"mesh {' × '.join(sizes) or 'of one rank'} ({prod(self.shape)} ranks)"


@lru_cache(maxsize=8192)
def _ranks(first: int, size: int, stride: int) -> tuple[int, ...]:
    """One tuple for all members of a group: large meshes have as many members as ranks."""
    return tuple(range(first, first + size * stride, stride))
