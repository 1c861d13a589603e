"""Saved tensors in host memory, for real: a hook packs what autograd saves in forward there.

torch.autograd.graph.save_on_cpu copies every saved tensor, parameters too. This hook leaves what
lives anyway on the device: parameters, also those that FSDP has gathered, buffers, inputs. On a CPU
the host's tensors are apart from the device's by their role alone, so that unpacking copies there
too, which save_on_cpu does not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from zsim.ir.host_ledger import SAVED
from zsim.models.training_options import SavedTensors


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Packed:
    """A tensor in host memory."""

    copy: Tensor


@dataclass(slots=True, kw_only=True)
class HostSaving:
    """Tensors of `model` that are saved in host memory, and the bytes of them: now, and at most
    since the last step."""

    model: nn.Module
    memory: SavedTensors
    uncounted: Callable[[], AbstractContextManager[None]]
    """Around what is allocated here: on a CPU the meter takes it for the device's."""
    nbytes: int = 0
    peak_nbytes: int = 0
    num_packed: int = 0

    def around_forward(self, inputs: Iterable[Tensor]) -> AbstractContextManager[object]:
        """Context in which autograd saves in host memory, but for `inputs`; nothing where saved
        tensors stay on the device."""
        if not self.memory:
            return nullcontext()
        given = {_address(tensor) for tensor in inputs}
        return saved_tensors_hooks(lambda tensor: self._pack(tensor, given), self._unpack)

    def held(self) -> Mapping[str, int]:
        """The most bytes at once since the last time, by their kind; nothing where there are none.
        """
        peak, self.peak_nbytes = self.peak_nbytes, self.nbytes
        return {SAVED: peak} if peak else {}

    def _pack(self, tensor: Tensor, given: set[int]) -> Tensor | tuple[torch.device, _Packed]:
        if _address(tensor) in given or _address(tensor) in self._lives_anyway():
            return tensor
        with self.uncounted():
            pinned = self.memory == "pinned" and tensor.device.type == "cuda"
            copy = torch.empty(
                tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=pinned
            )
            copy.copy_(tensor, non_blocking=pinned)
        packed, nbytes = _Packed(copy), copy.numel() * copy.element_size()
        self.num_packed += 1
        self._change(nbytes)
        weakref.finalize(packed, self._change, -nbytes).atexit = False
        return tensor.device, packed

    def _unpack(self, packed: Tensor | tuple[torch.device, _Packed]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, own = packed
        if device.type == "cpu":
            return own.copy.clone()
        return own.copy.to(device, non_blocking=self.memory == "pinned")

    def _change(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

    def _lives_anyway(self) -> set[int]:
        """Addresses of the storages of parameters, as they are now, and of buffers."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        return {_address(tensor) for tensor in tensors} - {0}


def _address(tensor: Tensor) -> int:
    """The address of a tensor's storage; 0 for one without memory."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()
