"""A step of ZeRO whose float32 copies, gradients and optimizer states are on drives.

As `zsim.strategies.flat_buffer.offloaded_step`, and besides:

- A gradient goes on from host memory to the drives, beside backward. Its pinned buffer is free for
  another one then.
- The host reads a group's gradient, copy and states, steps the group, and writes copy and states.
  So an element is 16 bytes read and 16 written in a step, with AdamW.
- With `pipeline_read` the next group is read meanwhile, with `pipeline_write` the last one is
  written meanwhile. Each group in flight takes four buffers.
- Shards of parameters on drives are read in front of their copy to the device, through two buffers,
  and written with the states.

It is ZeRO-Infinity's (arXiv 2104.07857, §5.1 and §6.2) on one drive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from zsim.ir.ops import Kernel
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building.kernels import MASTER_DTYPE
from zsim.strategies.building.optimizers import state_names
from zsim.strategies.flat_buffer.groups import FlatGroup
from zsim.strategies.flat_buffer.host_buffers import PARAMETER_BUFFERS
from zsim.strategies.flat_buffer.offloaded_step import OffloadedStep


@dataclass(slots=True)
class SwappingStep(OffloadedStep):
    """OffloadedStep with states on drives."""

    _written: list[int] = field(default_factory=list)
    """Writes of gradients, each from the buffer of the one `buffer_count` before it."""
    _stored: list[int] = field(default_factory=list)
    """Writes of groups that are stepped."""
    _read: dict[str, int] = field(default_factory=dict)
    """Reads of states, by group."""

    def complete(self, group: FlatGroup) -> None:
        """Copy the gradient to the host once its buffer is free, and write it from there."""
        count = self.model.offload.buffer_count
        busy = self._written[-count] if len(self._written) >= count else None
        self._send_gradient(group, waits=[] if busy is None else [busy])
        self._written.append(self._write(group, 4, waits=self._sent[-1:]))
        self._sent = [self._written[-1]]  # one stream: the last covers all

    def _write(self, group: FlatGroup, per_element: int, *, waits: Sequence[int]) -> int:
        """Write so many bytes an element of a group's shard."""
        return self.step.issue(
            "copy", group.fqn, stream="drive_write", waits=waits, micro_batch=self.micro_batch,
            kernels=_drive("write", per_element * group.layout.shard_numel),
        )

    def _read_states(self, group: FlatGroup, *, first: bool) -> None:
        """Read a group's gradient, copy and states, once buffers are free; the first step finds no
        states."""
        in_flight = self.model.offload.groups_in_flight
        states = 0 if first else len(state_names(self.model.training.optimizer))
        used = len(self._read) - in_flight
        free = self._stored[used : used + 1] if used >= 0 else []
        self._read[group.fqn] = self.step.issue(
            "copy", group.fqn, stream="drive_read", waits=(*self._sent, *free),
            kernels=_drive("read", 4 * (2 + states) * group.layout.shard_numel),
        )

    def optimizer(self, *, first: bool) -> int:
        """Read, step and write group by group, with reads ahead and writes behind or without."""
        model, offload = self.model, self.model.offload
        states = len(state_names(model.training.optimizer))
        narrow = DTYPE_NBYTES[model.dtype] if offload.parameters == "nvme" else 0
        self.step.begin("optimizer")
        stepped = -1
        for index, group in enumerate(model.trained):
            ahead = model.trained[index : index + 1 + offload.pipeline_read]
            for other in [other for other in ahead if other.fqn not in self._read]:
                self._read_states(other, first=first)
            behind = self._stored[-1:] if not offload.pipeline_write else []
            waits = [self._read[group.fqn], *behind]
            stepped = self._step_group(group, waits=waits, first=first)
            stored = self._write(group, 4 * (1 + states) + narrow, waits=[stepped])
            self._stored.append(stored)
        return stepped

    def _fetch(self, group: FlatGroup, waits: Sequence[int]) -> Sequence[int]:
        """Read a shard of parameters from the drives, once a buffer is free."""
        if self.model.offload.parameters != "nvme":
            return waits
        used = len(self._onloaded) - PARAMETER_BUFFERS
        free = self._onloaded[used : used + 1] if used >= 0 else []
        nbytes = group.layout.shard_numel * DTYPE_NBYTES[self.model.dtype]
        read = self.step.issue(
            "copy", group.fqn, stream="drive_read", waits=(*waits, *free),
            micro_batch=self.micro_batch, kernels=_drive("read", nbytes),
        )
        return [read]


def _drive(operator: str, nbytes: int) -> tuple[Kernel, ...]:
    return (Kernel(operator, 0, nbytes, MASTER_DTYPE, location="drive"),) if nbytes else ()
