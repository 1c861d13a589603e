"""DriveLayout: what DeepSpeed keeps on drives at stage 3, and the buffers that it passes through.

A sub-group of at least 1 MiB in float32, or of a larger request, is in files; a smaller one stays
in host memory. Files have its master copy, gradients and states. A gradient goes to a file in whole
multiples of 1 KiB. The rest, and one that is smaller than a request, waits on the device in
float32. Buffers are page-locked, and CUDA knows nothing of that. Source:
deepspeed/runtime/swap_tensor/optimizer_utils.py, async_swapper.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from zsim.ir.ops import Kernel
from zsim.models.training_options import BLOCK_NBYTES, Offload, Optimizer
from zsim.strategies.building.kernels import MASTER_DTYPE
from zsim.strategies.building.optimizers import state_names
from zsim.strategies.deepspeed_engine.partition import MASTER_NBYTES

SWAP = "swap"
"""Unit of what goes to drives and comes from there, and the name of its buffers."""
SECTOR = 512 // MASTER_NBYTES
"""Elements of which an address has a multiple that a file is read to, past the system's cache."""
KIB = 1024
ALIGNED = KIB // MASTER_NBYTES
"""Elements that each file has a multiple of, with one thread a handle."""


def aligned(numel: int) -> int:
    """Elements of a file that holds `numel`."""
    return -(-numel // ALIGNED) * ALIGNED


def whole_kib(nbytes: int) -> int:
    """Bytes of a file that holds `nbytes`."""
    return -(-nbytes // KIB) * KIB


def drive(operator: str, numel: int) -> tuple[Kernel, ...]:
    """The work to "read" or "write" so many float32 elements; none for nothing."""
    return moved(operator, numel * MASTER_NBYTES)


def moved(operator: str, nbytes: int) -> tuple[Kernel, ...]:
    """The work to "read" or "write" so many bytes; none for nothing."""
    return (Kernel(operator, 0, nbytes, MASTER_DTYPE, location="drive"),) if nbytes else ()


@dataclass(frozen=True, slots=True)
class DriveLayout:
    """The float32 elements of each of a rank's sub-groups, and the table `offload`."""

    sizes: tuple[int, ...]
    offload: Offload

    @property
    def least_nbytes(self) -> int:
        """Bytes of the smallest tensor that goes to a file."""
        return max(BLOCK_NBYTES, self.offload.block_size or 0)

    def is_file(self, numel: int) -> bool:
        """True for a tensor of `numel` float32 elements that goes to a file."""
        return numel * MASTER_NBYTES >= self.least_nbytes

    @property
    def swapped(self) -> tuple[int, ...]:
        """The numbers of sub-groups on drives; none of them where the optimizer's place is not
        there."""
        if self.offload.optimizer != "nvme":
            return ()
        return tuple(number for number, size in enumerate(self.sizes) if self.is_file(size))

    @property
    def buffer_numel(self) -> int:
        """Elements of each buffer."""
        return aligned(max(self.sizes, default=0)) if self.offload.optimizer == "nvme" else 0

    @property
    def pinned_nbytes(self) -> int:
        """Bytes of all page-locked buffers."""
        return self.offload.buffer_count * self.buffer_numel * MASTER_NBYTES

    def least_buffers(self, optimizer: Optimizer) -> int:
        """The buffers that a step needs: gradient, copy and states of each sub-group in flight."""
        in_flight = min(self.offload.groups_in_flight, len(self.swapped))
        return in_flight * (2 + len(state_names(optimizer)))

    def nbytes(self, optimizer: Optimizer) -> int:
        """Bytes of a rank's files, with a gradient as large as its sub-group."""
        each = 2 + len(state_names(optimizer))
        return each * MASTER_NBYTES * sum(aligned(self.sizes[number]) for number in self.swapped)

    def piece(self, numel: int) -> int:
        """The elements of a gradient of `numel` that go to a file."""
        return numel // ALIGNED * ALIGNED if self.is_file(numel) else 0

    def flushes(self, buckets: Iterable[Sequence[int]]) -> Iterator[tuple[int, ...]]:
        """The elements that each of the `buckets` of gradients has DeepSpeed write; last what it
        writes before it reads states. The host waits between several.

        Gradients fill one buffer, which is written when the next one has no room there. Once all
        have been filled the host waits until all are written.
        """
        free, filled = self.offload.buffer_count, 0
        for numels in buckets:
            written = [0]
            for numel in filter(None, map(self.piece, numels)):
                if filled and filled + numel <= self.buffer_numel:
                    filled += numel
                    continue
                written[-1] += filled
                if filled and not free:
                    written.append(0)
                    free = self.offload.buffer_count
                free, filled = free - 1, numel
            yield tuple(written)
        yield filled, 0
