"""Collectives in the order in which torch issues them, recorded at the dispatcher.

Every c10d operator passes the dispatcher, while FSDP2 calls around functions of torch.distributed.
The payload is the output of an all-gather, the input of a reduce-scatter or all-to-all, and the
tensors of an all-reduce or broadcast. The recorder must not know strategies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from zreal import torch_private
from zreal.meters.mesh_groups import MeshGroup
from zsim.errors import ZsimError, listed
from zsim.ir.run import CollectiveRecord
from zsim.runs.launch.planned_collectives import collective_text

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
    "c10d::alltoall_base_": ("all_to_all", 1),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
}
"""Dispatcher name to the op of a Program, and the position of the payload argument."""

C10D_OPS = tuple(name for name in _OPS if name.startswith("c10d::"))
"""Operators that every collective comes to; functional ones call them."""

_ROOT_ARGUMENT = 2
"""Position of the argument of a broadcast that is the root's rank in the group."""

SETTLE_S = 0.003
"""Pause after a gloo collective, in seconds: gloo's worker thread holds the tensors a moment longer
than the caller. With the pause, frees follow the host's issue order, as on a CUDA stream. Time is
never measured on such steps."""

_UNRECORDED = frozenset(
    {
        "c10d::barrier",
        "c10d::monitored_barrier_",
        "_c10d_functional::wait_tensor",
        "_c10d_functional::_wrap_tensor_autograd",
    }
)


class CollectiveRecorder(TorchDispatchMode):
    """Records every collective while active. Groups not in `groups` are called "world".

    `groups` are mesh groups by c10d group name. Each collective is announced to `progress` before
    torch issues it, so that a report can name the one in which a rank hangs.
    """

    def __init__(
        self,
        groups: Mapping[str, MeshGroup],
        *,
        world_size: int,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self.records: list[CollectiveRecord] = []
        self.group_ranks: dict[str, tuple[int, ...]] = {}
        """Global ranks of each group with a collective, by the group's name."""
        self._groups = groups
        self._progress = progress
        self._issued = 0
        self._settle_s = SETTLE_S if dist.is_initialized() and dist.get_backend() == "gloo" else 0.0
        self._world = MeshGroup("world", world_size, tuple(range(world_size)))

    def settle(self) -> None:
        """Wait until gloo's threads have dropped their tensors. Bytes counted afterwards are held
        by the strategy."""
        time.sleep(10 * self._settle_s)

    def take(self) -> tuple[CollectiveRecord, ...]:
        """The collectives recorded since the last call."""
        records, self.records = tuple(self.records), []
        return records

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(torch_private.is_dtensor_type(kind) for kind in types):
            return NotImplemented
        name = func.name()
        if name.startswith(("c10d::", "_c10d_functional::")) and name not in _UNRECORDED:
            self._record(name, (*args, *(kwargs or {}).values()))
            result = func(*args, **(kwargs or {}))
            if self._settle_s:
                _wait_for_work(result)
                time.sleep(self._settle_s)
            return result
        return func(*args, **(kwargs or {}))

    def _record(self, name: str, arguments: tuple[Any, ...]) -> None:
        record = self.described(name, arguments)
        if record is None:
            return
        self._progress(
            collective_text(f"{record.op} #{self._issued}", record.nbytes, record.group)
        )
        self._issued += 1
        self.records.append(record)

    def described(self, name: str, arguments: tuple[Any, ...]) -> CollectiveRecord | None:
        """The record of a c10d operator; None where its group is one rank, or it
        has no bytes."""
        if name not in _OPS:
            raise ZsimError(
                where="collective recorder",
                expected=listed(_OPS),
                found=name,
                remedy="zsim does not model this operator",
            )
        op, payload = _OPS[name]
        group = self._group(arguments)
        nbytes = _nbytes(arguments[payload])
        if group.size == 1 or not nbytes:  # torch calls c10d even where nothing is communicated
            return None
        root = int(arguments[_ROOT_ARGUMENT]) if op == "broadcast" else 0
        self.group_ranks.setdefault(group.name, group.ranks)
        return CollectiveRecord(
            op=op, nbytes=nbytes, group=group.axis, group_size=group.size, root=root
        )

    def _group(self, arguments: tuple[Any, ...]) -> MeshGroup:
        """A known group, a part of one, or the world. fully_shard makes parts of groups for an
        integer reshard_after_forward."""
        group = torch_private.process_group(arguments)
        if group is None:
            return self._world
        if group.group_name in self._groups:
            return self._groups[group.group_name]
        ranks = tuple(dist.get_process_group_ranks(group))
        same = [known for known in self._groups.values() if known.ranks == ranks]
        if same:  # DeepSpeed has a group of its own over the same ranks
            return same[0]
        larger = (known for known in self._groups.values() if set(ranks) < set(known.ranks))
        whole = next(larger, self._world)
        return MeshGroup(whole.axis, len(ranks), ranks, is_part=len(ranks) < whole.size)


def _wait_for_work(result: Any) -> None:
    """Wait until a collective has ended on this rank. Another rank may enter it much later, and
    gloo holds the tensors until then."""
    for work in torch_private.works(result):
        work.wait()


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_nbytes(item) for item in value)
