"""Shards of one rank on drives: gradients, float32 copies and states in files, and the buffers in
host memory that they pass through.

torch's optimizer steps the very tensors that lie in files. Between a read and a write their data
are in buffers instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from zreal.executor.host_shards import HostShards
from zreal.executor.swapped_files import SwappedFiles
from zreal.modules.initial_values import DTYPES
from zsim.errors import ProgramError
from zsim.ir.buffers import buffer_of, role_of
from zsim.ir.ops import HostAlloc, Op
from zsim.strategies.building.kernels import MASTER_DTYPE
from zsim.strategies.flat_buffer.host_buffers import (
    BUFFERS_PER_GROUP,
    PARAMETER_BUFFERS,
    SWAP,
)

EXACT = DTYPES[MASTER_DTYPE]


@dataclass(slots=True)
class DriveShards(HostShards):
    """HostShards with states on drives."""

    files: SwappedFiles = field(default_factory=SwappedFiles)
    _sent: int = 0
    """Gradients sent to the host so far."""
    _read: int = 0
    """Groups whose states were read so far."""
    _brought: int = 0
    """Shards of parameters read so far."""
    _stepped: set[str] = field(default_factory=set)
    """Groups that are stepped and not written yet."""
    _slots: dict[str, Tensor] = field(default_factory=dict)
    """Buffers in use, by the names of what is in them."""

    def make_buffers(self, op: Op) -> None:
        """Make the buffers that states pass through."""
        with self.uncounted():
            for event in op.host:
                assert isinstance(event, HostAlloc)
                dtype = EXACT if role_of(event.buffer) == "buffers" else DTYPES[self.dtype]
                self.live[event.buffer] = torch.zeros(
                    event.nbytes // dtype.itemsize, dtype=dtype, pin_memory=self.pins
                )

    def construct(self, op: Op, exact: Tensor, rounded: Tensor, *, trained: bool) -> None:
        """Make a group's files, and its buffers of what goes to the device."""
        HostShards.construct(self, op, exact, rounded, trained=trained)
        unit, files = op.unit, self.files
        with self.uncounted():
            if self.offload.parameters == "nvme":
                files.make(buffer_of(unit, "parameters"), rounded)
            if trained:
                files.make(buffer_of(unit, "gradient"), torch.zeros_like(exact))
                master = files.make(buffer_of(unit, "master"), exact)
                self.optimizer.stepped[unit] = master.detach()

    def gradient(self, unit: str) -> Tensor:
        """The gradient where it is: in a buffer, or in its file."""
        name = buffer_of(unit, "gradient")
        return self._slots.get(name, self.files.live[name])

    def take_gradient(self, unit: str, gradient: Tensor) -> None:
        """Copy a gradient from the device into the next buffer."""
        slot = self._slot("buffers", self._sent % self.offload.buffer_count, gradient.numel())
        self._sent += 1
        self._slots[buffer_of(unit, "gradient")] = slot
        HostShards.take_gradient(self, unit, gradient)

    def _slot(self, role: str, number: int, numel: int) -> Tensor:
        """The first `numel` elements of a buffer."""
        pool = self.live[buffer_of(SWAP, role)]
        count = self.offload.buffer_count if role == "buffers" else PARAMETER_BUFFERS
        return pool.narrow(0, number * (pool.numel() // count), numel)

    def move(self, op: Op) -> None:
        """Carry out a read or a write; ProgramError where it is of other bytes than the Program's.
        """
        (kernel,) = op.kernels or (None,)
        if kernel is None:
            return
        if self.pins:  # copies of the device come first
            torch.cuda.current_stream().synchronize()
        with self.uncounted():
            if kernel.operator == "write":
                moved = self._write(op.unit)
            elif op.unit in self.optimizer.stepped and self._is_stepping(op):
                moved = self._read_states(op.unit)
            else:
                moved = self._read_parameters(op.unit)
        if moved != kernel.nbytes:
            raise ProgramError(
                where=f"op {op.index}: {kernel.operator} {op.unit}",
                expected=f"{kernel.nbytes:,} B", found=f"{moved:,} B",
            )

    def _is_stepping(self, op: Op) -> bool:
        """True for a read of states, which are wider than parameters."""
        numel = self.optimizer.stepped[op.unit].numel()
        return op.kernels[0].nbytes > numel * EXACT.itemsize

    def _read_states(self, unit: str) -> int:
        """Bring gradient, copy and states into the buffers of a group in flight."""
        first = self._read % self.offload.groups_in_flight * BUFFERS_PER_GROUP
        self._read += 1
        moved = 0
        gradient = self.files.live[buffer_of(unit, "gradient")]
        for number, tensor in enumerate([gradient, *self._tensors(unit)]):
            slot = self._slot("buffers", first + number, tensor.numel())
            moved += _copied(slot, tensor)
            if tensor is gradient:
                self._slots[buffer_of(unit, "gradient")] = slot
            else:
                tensor.data = slot
        return moved

    def _tensors(self, unit: str) -> list[Tensor]:
        """The float32 copy, and the states of its size."""
        stepped = self.optimizer.stepped[unit]
        torch_optimizer = self.optimizer.torch_optimizer
        states = {} if torch_optimizer is None else torch_optimizer.state.get(stepped, {})
        return [
            stepped, *(each for each in states.values()
                       if isinstance(each, Tensor) and each.shape == stepped.shape and each.dim()),
        ]

    def _read_parameters(self, unit: str) -> int:
        """Bring a shard of parameters into the next buffer of those."""
        name = buffer_of(unit, "parameters")
        file = self.files.live[name]
        number = self._brought % PARAMETER_BUFFERS
        self._slots[name] = self._slot("parameters", number, file.numel())
        self._brought += 1
        return _copied(self._slots[name], file)

    def parameters(self, unit: str) -> Tensor:
        """The shard in the dtype of compute where it is: in a buffer, or in its file."""
        name = buffer_of(unit, "parameters")
        if self.offload.parameters == "nvme":
            return self._slots.get(name, self.files.live[name])
        return HostShards.parameters(self, unit)

    def crossed(self, unit: str) -> None:
        """A shard of parameters is on the device, and its buffer free."""
        self._slots.pop(buffer_of(unit, "parameters"), None)

    def step(self, unit: str) -> None:
        """Step one group in its buffers."""
        name = buffer_of(unit, "parameters")
        if self.offload.parameters == "nvme":
            numel = self.optimizer.stepped[unit].numel()
            self._slots[name] = self._slot("parameters", self._brought % PARAMETER_BUFFERS, numel)
            self._brought += 1
        HostShards.step(self, unit)
        stepped, returned = self.optimizer.stepped[unit], self.parameters(unit)
        if returned.dtype == stepped.dtype:  # no cast has copied it
            with self.uncounted():
                returned.copy_(stepped)
        self._stepped.add(unit)

    def _write(self, unit: str) -> int:
        """Write a gradient that has come, or what is stepped, from buffers to files."""
        gradient, rounded = buffer_of(unit, "gradient"), buffer_of(unit, "parameters")
        if unit not in self._stepped:
            return _copied(self.files.live[gradient], self._slots.pop(gradient))
        self._stepped.remove(unit)
        del self._slots[gradient]
        moved = 0
        for number, tensor in enumerate(self._tensors(unit)):
            name = buffer_of(unit, f"state.{number}" if number else "master")
            if name not in self.files.live:
                self.files.make(name, torch.zeros_like(tensor))
            moved += _copied(self.files.live[name], tensor)
            tensor.data = self.files.live[name]
        if self.offload.parameters == "nvme":
            moved += _copied(self.files.live[rounded], self._slots.pop(rounded))
        return moved

    def nbytes(self) -> int:
        """Bytes in host memory: all buffers, and the step counters."""
        counters = [tensor for tensor in self.optimizer.states() if not tensor.dim()]
        tensors = [*self.live.values(), *counters]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _copied(target: Tensor, source: Tensor) -> int:
    """The bytes of a copy, once it is made."""
    target.copy_(source)
    return target.numel() * target.element_size()
