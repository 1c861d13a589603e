"""Inputs of checkpoints in host memory, copied beside compute, as torchtune's hook and DeepSpeed's
cpu_checkpointing do.

The inputs of the last few checkpoints stay on the device while they are copied, and serve backward
from there. Others are fetched while the checkpoint after theirs is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from zsim.autograd.host_copies import KEPT


class Copied(Protocol):
    """A tensor in host memory."""

    def back(self, *, non_blocking: bool) -> Tensor:
        """The tensor on its device again."""
        ...


@dataclass(slots=True, eq=False)
class _Input:
    """One tensor: on the device as long as it is kept, or again once it is fetched; `copied` and
    `fetched` are the events behind its copies on a GPU."""

    tensor: Tensor | None
    copy: Copied | None
    copied: Any = None
    fetched: Any = None


@dataclass(slots=True)
class InputsBeside:
    """The inputs of the checkpoints of one forward; `copy` begins a copy to the host."""

    copy: Callable[[Tensor], Copied]
    pinned: bool
    _kept: list[_Input] = field(default_factory=list)
    _away: list[_Input] = field(default_factory=list)
    _stream: Any = None

    def pack(self, tensor: Tensor) -> _Input:
        """Begin to copy an input, and let go of the one that was packed `KEPT` before it."""
        if tensor.is_cuda:
            self._beside(tensor).wait_stream(torch.cuda.current_stream())
        packed = _Input(tensor.detach(), None)
        with self._on_stream(tensor):
            packed.copy = self.copy(tensor)
            packed.copied = _event(tensor)
        self._kept.append(packed)
        if len(self._kept) > KEPT:
            gone = self._kept.pop(0)
            _await(gone.copied)
            gone.tensor = None
            self._away.append(gone)
        return packed

    def unpack(self, packed: Tensor | _Input) -> Tensor:
        """The input on the device. The one before it is fetched from now on."""
        if isinstance(packed, Tensor):
            return packed
        if self._kept and self._kept[-1] is packed:
            self._kept.pop()
            _await(packed.copied)
        _await(packed.fetched)
        tensor, packed.tensor, packed.copy = packed.tensor, None, None
        assert tensor is not None, "recomputation goes from the last checkpoint to the first"
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream())
        if self._away and not self._kept:
            self._fetch(self._away.pop(), tensor)
        return tensor

    def _fetch(self, packed: _Input, beside: Tensor) -> None:
        assert packed.copy is not None
        if beside.is_cuda:
            self._beside(beside).wait_stream(torch.cuda.current_stream())
        with self._on_stream(beside):
            packed.tensor = packed.copy.back(non_blocking=self.pinned)
            packed.fetched = _event(beside)

    def _beside(self, tensor: Tensor) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        return self._stream

    def _on_stream(self, tensor: Tensor) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._beside(tensor)) if tensor.is_cuda else nullcontext()


def _event(tensor: Tensor) -> Any:
    return torch.cuda.current_stream().record_event() if tensor.is_cuda else None


def _await(event: Any) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
