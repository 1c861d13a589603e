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
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from zreal.modules import checkpointing
from zreal.modules.host.host_inputs import InputsBeside
from zsim.ir.host_ledger import SAVED
from zsim.models.training_options import SavedTensorsHook


@dataclass(slots=True, eq=False, weakref_slot=True)
class HostCopy:
    """A tensor of a device in host memory."""

    copy: Tensor
    device: torch.device

    def back(self, *, non_blocking: bool) -> Tensor:
        """The tensor on its device again."""
        if self.device.type == "cpu":
            return self.copy.clone()
        return self.copy.to(self.device, non_blocking=non_blocking)


@dataclass(slots=True, kw_only=True)
class HostSaving:
    """Tensors of `model` that a `hook` saves in host memory, and the bytes of them: now, and at
    most since the last step."""

    model: nn.Module
    hook: SavedTensorsHook | None
    uncounted: Callable[[], AbstractContextManager[None]]
    """Around what is allocated here: on a CPU the meter takes it for the device's."""
    nbytes: int = 0
    peak_nbytes: int = 0
    _given: set[int] = field(default_factory=set)
    """Storages of the inputs of the forward that runs."""

    def around_forward(self, inputs: Iterable[Tensor]) -> AbstractContextManager[object]:
        """Context in which autograd saves in host memory, but for `inputs`; nothing where saved
        tensors stay on the device."""
        if self.hook is None:
            return nullcontext()
        self._given = {_address(tensor) for tensor in inputs}
        if self.hook.tensors == "checkpoint_inputs":
            beside = InputsBeside(self._copied, pinned=self.hook.pinned)
            return checkpointing.saving_inputs(
                lambda: saved_tensors_hooks(partial(self._pack, beside.pack), beside.unpack)
            )
        unpack = partial(_unpack, non_blocking=self.hook.pinned)
        return saved_tensors_hooks(partial(self._pack, self._copied), unpack)

    def held(self) -> Mapping[str, int]:
        """The most bytes at once since the last time, by their kind; nothing where there are none.
        """
        peak, self.peak_nbytes = self.peak_nbytes, self.nbytes
        return {SAVED: peak} if peak else {}

    def _pack(self, pack: Callable[[Tensor], object], tensor: Tensor) -> object:
        """The result of `pack`, or the tensor itself where it lives anyway or has no elements.

        torch up to 2.12 saves one without elements beside the inputs of each checkpoint."""
        if not tensor.numel():
            return tensor
        live = (*self.model.parameters(), *self.model.buffers())
        kept = self._given | {_address(other) for other in live} - {0}
        return tensor if _address(tensor) in kept else pack(tensor)

    def _copied(self, tensor: Tensor) -> HostCopy:
        """A copy in host memory; of a GPU's tensor, where that is pinned, it is only begun."""
        assert self.hook is not None
        pinned = self.hook.pinned and tensor.device.type == "cuda"
        with self.uncounted():
            copy = torch.empty(
                tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=pinned
            )
            copy.copy_(tensor, non_blocking=pinned)
        made, nbytes = HostCopy(copy, tensor.device), copy.numel() * copy.element_size()
        self._change(nbytes)
        weakref.finalize(made, self._change, -nbytes).atexit = False
        return made

    def _change(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)


def _unpack(packed: Tensor | HostCopy, *, non_blocking: bool) -> Tensor:
    return packed.back(non_blocking=non_blocking) if isinstance(packed, HostCopy) else packed


def _address(tensor: Tensor) -> int:
    """The address of a tensor's storage; 0 for one without memory."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()
