"""Saved tensors in host memory: what a hook around forward packs there, and backward unpacks.

torch: the pair of functions given to torch.autograd.graph.saved_tensors_hooks.

- `SavedOnHost`, as save_on_cpu: each tensor that autograd saves is copied by itself, twice where
  two nodes save it. In backward a node unpacks all that it saved before it computes, and lets it go
  when it returns. Parameters, buffers and the model's inputs live anyway and stay on the device.
- `InputsOnHost`, as torchtune's hook and DeepSpeed's cpu_checkpointing: the inputs of checkpointed
  regions alone, on a stream of their own. The last ones stay on the device besides; each
  recomputation has the inputs of the next one fetched.

A copy is as large as the tensor, even where that is a view. Recomputation saves on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from zsim.autograd.aten.call import Call
from zsim.autograd.checkpoint_regions import Region
from zsim.autograd.lowered import HostCopies
from zsim.autograd.values import Values
from zsim.ir.buffers import Buffer, form_of
from zsim.ir.ops import PAGEABLE, Alloc, Free, HostAlloc, Kernel, MemoryEvent

KEPT = 2
"""Regions whose inputs stay on the device while they are copied: DeepSpeed 0.19 waits for the
third copy from the end, torchtune for the sixth."""


@dataclass(slots=True)
class Crossings:
    """Copies of `values` over the link, until they are taken."""

    values: Values
    pinned: bool
    kernels: list[Kernel] = field(default_factory=list)
    host: list[HostAlloc | Free] = field(default_factory=list)

    def pack(self, name: str, nbytes: int) -> None:
        """Copy a value of `nbytes` to host memory, as `name`."""
        self.host.append(HostAlloc(Buffer(name), "activations", nbytes, self.pinned))
        self._cross("to_host", nbytes)

    def unpack(self, name: str, source: str, nbytes: int) -> None:
        """Copy what was packed of `source` to the device, and free it on the host."""
        self.values.know_again(name, source, nbytes)
        self.values.storages.allocate(name, nbytes)
        self.host.append(Free(Buffer(name)))
        self._cross("to_device", nbytes)

    def _cross(self, direction: str, nbytes: int) -> None:
        operator = direction if self.pinned else f"{direction}{PAGEABLE}"
        if nbytes:
            self.kernels.append(Kernel(operator, 0, nbytes, "uint8", location="link"))

    def inputs(self, region: Region) -> dict[str, tuple[str, int]]:
        """Names and bytes of the copies of a region's inputs that were computed, by value."""
        nbytes = self.values.nbytes
        return {
            value: (name, nbytes[value]) for value, name in region.packed.items() if value in nbytes
        }


@dataclass(slots=True)
class SavedOnHost:
    """The hook that takes all there."""

    crossings: Crossings

    def take(self) -> HostCopies:
        """The copies since the last time."""
        made = self.crossings
        taken = HostCopies(kernels=tuple(made.kernels), host=tuple(made.host))
        made.kernels, made.host = [], []
        return taken

    def pack_call(self, call: Call) -> None:
        """Pack what autograd saves of a call that has just run."""
        for name, nbytes in self._copies(call).values():
            self.crossings.pack(name, nbytes)

    def unpacked(self, call: Call) -> Call:
        """`call` with names of what is unpacked for its backward."""
        copies = self._copies(call)
        for source, (name, nbytes) in copies.items():
            self.crossings.unpack(name, source, nbytes)
        names = {source: name for source, (name, _) in copies.items()}
        return replace(
            call,
            saves=tuple([names.get(value, value) for value in call.saves]),
            weights=tuple([names.get(value, value) for value in call.weights]),
            keeps=tuple([(names[name], nbytes) for name, nbytes in call.keeps]),
        )

    def _copies(self, call: Call) -> dict[str, tuple[str, int]]:
        """Names and bytes of the copies of what autograd saves of `call`, by value."""
        values, nbytes = self.crossings.values, self.crossings.values.nbytes
        saved = [(name, nbytes[name]) for name in values.saved(call) if name in nbytes]
        return {
            value: (form_of(call.output, "saved", i), size)
            for i, (value, size) in enumerate([*saved, *call.keeps])
        }

    def pack_inputs(self, region: Region) -> None:
        """Pack what a checkpoint saves."""
        for name, nbytes in self.crossings.inputs(region).values():
            self.crossings.pack(name, nbytes)

    def unpack_inputs(self, region: Region) -> list[str]:
        """Unpack these for the recomputation; returns their names on the device."""
        copies = self.crossings.inputs(region)
        for source, (name, nbytes) in copies.items():
            self.crossings.unpack(name, source, nbytes)
        return [name for name, _ in copies.values()]


@dataclass(slots=True)
class InputsOnHost:
    """The hook that takes inputs of checkpointed regions there, beside compute."""

    crossings: Crossings
    _kept: list[Region] = field(default_factory=list)
    """Regions whose inputs are on the device, too."""
    _away: list[Region] = field(default_factory=list)
    """Regions whose inputs are in host memory alone."""
    _awaits: bool = False
    """True where compute waits for a copy that was begun earlier."""
    _fetched: list[MemoryEvent] = field(default_factory=list)

    def take(self) -> HostCopies:
        """The copies since the last time."""
        made = self.crossings
        taken = HostCopies(
            kernels=tuple(made.kernels), host=tuple(made.host), memory=tuple(self._fetched),
            beside=True, awaits=self._awaits,
        )
        made.kernels, made.host, self._fetched, self._awaits = [], [], [], False
        return taken

    def pack_inputs(self, region: Region) -> None:
        """Begin the copies, and let those go from the device that were begun `KEPT` regions ago."""
        copies = self.crossings.inputs(region)
        if not copies:  # of the model's own input
            return
        for source, (name, nbytes) in copies.items():
            self.crossings.values.storages.hold(source)
            self.crossings.pack(name, nbytes)
        self._kept.append(region)
        if len(self._kept) > KEPT:
            self._awaits = True
            self._away.append(self._kept.pop(0))
            for source in self.crossings.inputs(self._away[-1]):
                self.crossings.values.storages.release(source)

    def unpack_inputs(self, region: Region) -> list[str]:
        """The names of the inputs for the recomputation, which are on the device or have been
        fetched; begin to fetch those of the region before."""
        values, copies = self.crossings.values, self.crossings.inputs(region)
        if not copies:
            return []
        self._awaits = True
        if self._kept and self._kept[-1] is region:
            self._kept.pop()
            for source, (name, nbytes) in copies.items():
                values.know_again(name, source, nbytes)
                values.storages.view(name, source)
                values.storages.release(source)
                self.crossings.host.append(Free(Buffer(name)))
        if self._away and not self._kept:
            self._fetch(self._away.pop())
        return [name for name, _ in copies.values()]

    def _fetch(self, region: Region) -> None:
        events = self.crossings.values.storages.events
        start = len(events)
        for source, (name, nbytes) in self.crossings.inputs(region).items():
            self.crossings.unpack(name, source, nbytes)
        self._fetched += [event for event in events[start:] if isinstance(event, Alloc)]
        del events[start:]
