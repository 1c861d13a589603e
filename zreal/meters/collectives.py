"""The collectives that torch really issues, seen at the dispatcher, in order: op, payload bytes,
and the group's name.

Patching `torch.distributed` functions misses what FSDP2 calls; every c10d op passes the dispatcher.
Payloads: the output of an all-gather, the input of a reduce-scatter, the tensors of an all-reduce
or broadcast.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from zreal import torch_private
from zsim.errors import ZsimError
from zsim.ir.run import CollectiveRecord

_OPS: dict[str, tuple[str, int]] = {
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
}
"""Dispatcher name to our word, and which argument is the payload."""

_ROOT = 2
"""Which argument of a broadcast is its root's place in the group."""

SETTLE_S = 0.003
"""After a collective gloo's worker thread holds its tensors a moment longer than the caller. It is
waited for, so that bytes follow the host's order, as they do where a stream orders the frees. No
time is measured on such runs."""

_SILENT = frozenset(
    {
        "c10d::barrier",
        "c10d::monitored_barrier_",
        "_c10d_functional::wait_tensor",
        "_c10d_functional::_wrap_tensor_autograd",
    }
)


@dataclass(frozen=True, slots=True)
class GroupName:
    """A process group as a mesh axis. `ranks` are its global ranks in group order; with them a part
    of it can be recognised."""

    axis: str
    size: int
    ranks: tuple[int, ...] = ()
    part: bool = False

    @property
    def name(self) -> str:
        """As the mesh names it: an axis, or a part of one as "axis:size"."""
        return f"{self.axis}:{self.size}" if self.part else self.axis


class CollectiveRecorder(TorchDispatchMode):
    """Records every collective while active. `groups` maps c10d group names to mesh axes; others
    are called "world".

    `progress` is told of each collective before it is issued, so that a rank that hangs in one can
    be named with it.
    """

    def __init__(
        self,
        groups: Mapping[str, GroupName],
        *,
        world_size: int,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self.records: list[CollectiveRecord] = []
        self.group_ranks: dict[str, tuple[int, ...]] = {}
        """By name: the ranks of each group that a collective ran over."""
        self._groups = groups
        self._progress = progress
        self._issued = 0
        self._settle_s = SETTLE_S if dist.is_initialized() and dist.get_backend() == "gloo" else 0.0
        self._world = GroupName("world", world_size, tuple(range(world_size)))

    def settle(self) -> None:
        """Wait until gloo's threads have let go of what they were given, as a GPU's stream would
        have long before the optimizer.

        Where nothing is in flight any more, what is still counted afterwards is held by somebody
        else.
        """
        time.sleep(10 * self._settle_s)

    def take(self) -> tuple[CollectiveRecord, ...]:
        """What was recorded since the last call."""
        records, self.records = tuple(self.records), []
        return records

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(torch_private.is_dtensor_type(kind) for kind in types):
            return NotImplemented
        name = func.name()
        if name.startswith(("c10d::", "_c10d_functional::")) and name not in _SILENT:
            self._record(name, (*args, *(kwargs or {}).values()))
            result = func(*args, **(kwargs or {}))
            if self._settle_s:
                _finish(result)
                time.sleep(self._settle_s)
            return result
        return func(*args, **(kwargs or {}))

    def _record(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name not in _OPS:
            raise ZsimError(
                where="collective recorder",
                expected=f"one of {', '.join(_OPS)}",
                found=name,
                remedy="this operator is not modelled",
            )
        op, place = _OPS[name]
        group = self._group(arguments)
        if group.size == 1:  # torch calls c10d all the same, which communicates nothing
            return
        nbytes, root = _nbytes(arguments[place]), int(arguments[_ROOT]) if op == "broadcast" else 0
        self.group_ranks.setdefault(group.name, group.ranks)
        self._progress(f"{op} #{self._issued} of {nbytes:,} B over {group.axis}")
        self._issued += 1
        self.records.append(
            CollectiveRecord(
                op=op, nbytes=nbytes, group=group.axis, group_size=group.size, root=root
            )
        )

    def _group(self, arguments: tuple[Any, ...]) -> GroupName:
        """A known group, a part of one (which fully_shard makes for an int reshard_after_forward),
        or the world."""
        group = torch_private.process_group(arguments)
        if group is None:
            return self._world
        if group.group_name in self._groups:
            return self._groups[group.group_name]
        ranks = tuple(dist.get_process_group_ranks(group))
        wholes = (known for known in self._groups.values() if set(ranks) < set(known.ranks))
        whole = next(wholes, self._world)
        return GroupName(whole.axis, len(ranks), ranks, part=len(ranks) < whole.size)


def _finish(result: Any) -> None:
    """Wait for what a collective returned to end on this rank: another may enter it much later, and
    only then can gloo let go of it."""
    for part in result if isinstance(result, tuple) else (result,):
        if isinstance(part, torch.ScriptObject):
            dist.Work.unbox(part).wait()


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_nbytes(item) for item in value)
