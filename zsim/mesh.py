"""The device mesh: ranks in row-major order over named axes, and the groups that share all coordinates but one."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

AXES: tuple[str, ...] = ("dp_replicate", "dp_shard")
RESERVED_AXES: tuple[str, ...] = ("tp", "pp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Sizes of the axes; the last axis varies fastest, as in torch's `init_device_mesh`. A 1-D mesh has dp_replicate 1.

    The axis name "world" stands for all ranks together (DDP over every rank).
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

    def size(self, axis: str) -> int:
        """The number of ranks in one group of `axis`."""
        return self.world_size if axis == "world" else int(getattr(self, axis))

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """(dp_replicate, dp_shard) of `rank`."""
        return divmod(rank, self.dp_shard)

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks of `rank`'s group along `axis`, in group order."""
        if axis == "world":
            return tuple(range(self.world_size))
        replicate, shard = divmod(rank, self.dp_shard)
        if axis == "dp_shard":
            return tuple(range(replicate * self.dp_shard, (replicate + 1) * self.dp_shard))
        if axis == "dp_replicate":
            return tuple(range(shard, self.world_size, self.dp_shard))
        raise KeyError(axis)

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups of `axis`, ordered by their first rank."""
        return tuple(dict.fromkeys(self.group(axis, rank) for rank in range(self.world_size)))

    def __str__(self) -> str:
        sizes = [f"{axis}={size}" for axis, size in zip(AXES, self.shape, strict=True) if size > 1]
        return f"mesh {' × '.join(sizes) or 'of one rank'} ({prod(self.shape)} ranks)"
