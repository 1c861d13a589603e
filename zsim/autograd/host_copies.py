"""Saved tensors in host memory: what a hook around forward packs there, and backward unpacks.

Each tensor that autograd saves is copied by itself, twice where two nodes save it. The copy is as
large as the tensor, even where that is a view. Parameters, buffers and the model's inputs live
anyway, so the hook leaves them on the device. In backward a node unpacks all that it saved before
it computes, and lets it go when it returns. Recomputation saves on the device. torch: the pair
given to torch.autograd.graph.saved_tensors_hooks, as save_on_cpu's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from zsim.autograd.aten.call import Call
from zsim.autograd.checkpoint_regions import Region
from zsim.autograd.lowering.lowered import HostCopies
from zsim.autograd.values import Values
from zsim.ir.ops import PAGEABLE, Free, HostAlloc, Kernel
from zsim.models.training_options import SavedTensors


@dataclass(slots=True)
class SavedOnHost:
    """The hook around the forward of `values`; `memory` is that of its copies on the host."""

    values: Values
    memory: SavedTensors
    _kernels: list[Kernel] = field(default_factory=list)
    _events: list[HostAlloc | Free] = field(default_factory=list)

    def take(self) -> HostCopies:
        """The copies since the last time."""
        taken = HostCopies(kernels=tuple(self._kernels), host=tuple(self._events))
        self._kernels, self._events = [], []
        return taken

    def _pack(self, name: str, nbytes: int) -> None:
        """Copy a value of `nbytes` to host memory, as `name`."""
        pinned = self.memory == "pinned"
        self._events.append(HostAlloc(name, "activations", nbytes, pinned))
        self._cross("to_host", nbytes)

    def _unpack(self, name: str, source: str, nbytes: int) -> None:
        """Copy what was packed of `source` to the device, and free it on the host."""
        values = self.values
        values.nbytes[name] = nbytes
        if values.wants(source):
            values.needs_gradient.add(name)
        values.storages.allocate(name, nbytes)
        self._events.append(Free(name))
        self._cross("to_device", nbytes)

    def _cross(self, direction: str, nbytes: int) -> None:
        operator = direction if self.memory == "pinned" else f"{direction}{PAGEABLE}"
        if nbytes:
            self._kernels.append(Kernel(operator, 0, nbytes, "uint8", location="link"))

    def pack_call(self, call: Call) -> None:
        """Pack what autograd saves of a call that has just run."""
        for name, nbytes in self._copies(call).values():
            self._pack(name, nbytes)

    def unpacked(self, call: Call) -> Call:
        """`call` with names of what is unpacked for its backward."""
        copies = self._copies(call)
        for source, (name, nbytes) in copies.items():
            self._unpack(name, source, nbytes)
        names = {source: name for source, (name, _) in copies.items()}
        return replace(
            call,
            saves=tuple([names.get(value, value) for value in call.saves]),
            weights=tuple([names.get(value, value) for value in call.weights]),
            keeps=tuple([(names[name], nbytes) for name, nbytes in call.keeps]),
        )

    def _copies(self, call: Call) -> dict[str, tuple[str, int]]:
        """Names and bytes of the copies of what autograd saves of `call`, by value."""
        nbytes = self.values.nbytes
        saved = [(name, nbytes[name]) for name in self.values.saved(call) if name in nbytes]
        return {
            value: (f"{call.output}.saved{i}", size)
            for i, (value, size) in enumerate([*saved, *call.keeps])
        }

    def pack_inputs(self, region: Region) -> None:
        """Pack what a checkpoint saves: the inputs of a `region` that were computed."""
        for source, name in region.packed.items():
            if source in self.values.nbytes:
                self._pack(name, self.values.nbytes[source])

    def unpack_inputs(self, region: Region) -> list[str]:
        """Unpack these for the recomputation; returns their names on the device."""
        made = {s: name for s, name in region.packed.items() if s in self.values.nbytes}
        for source, name in made.items():
            self._unpack(name, source, self.values.nbytes[source])
        return list(made.values())
