"""Collectives of a rank under test: said before they are entered, counted, and held to those of the
other ranks.

gloo reduces int64 numbers of one rank with float32 numbers of another to wrong ones on both, and
says nothing. torch's own check (TORCH_DISTRIBUTED_DEBUG=DETAIL) ends DistributedDataParallel by a
segmentation fault in torch 2.13. So the first rank that enters a collective notes in the store what
it is, and a rank that would enter another one raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zreal import torch_private
from zreal.testing.names import group_name, nth_group
from zreal.testing.on_rank.message_checks import ANY, RECEIVE, SEND, Channel, MessageChecks
from zsim.errors import RankError


class C10dOp(NamedTuple):
    """A c10d operator: the collective's name, and the positions of its payload and its root."""

    name: str
    payload: int | None = None
    root: int | None = None
    is_even: bool = True
    """Every rank has as many elements."""


OPS = {
    "allreduce_": C10dOp("all_reduce", 0),
    "allreduce_coalesced_": C10dOp("all_reduce", 0),
    "allgather_": C10dOp("all_gather", 0),
    "_allgather_base_": C10dOp("all_gather", 0),
    "allgather_coalesced_": C10dOp("all_gather", 0),
    "allgather_into_tensor_coalesced_": C10dOp("all_gather", 0),
    "reduce_scatter_": C10dOp("reduce_scatter", 1),
    "_reduce_scatter_base_": C10dOp("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": C10dOp("reduce_scatter", 1),
    "broadcast_": C10dOp("broadcast", 0, 2),
    "reduce_": C10dOp("reduce", 0, 3),
    "gather_": C10dOp("gather", 1, 3),
    "scatter_": C10dOp("scatter", 0, 3),
    "alltoall_": C10dOp("all_to_all", 1, is_even=False),
    "alltoall_base_": C10dOp("all_to_all", 1, is_even=False),
    "barrier": C10dOp("barrier"),
    "monitored_barrier_": C10dOp("monitored_barrier"),
}
"""Collectives by the name of their c10d operator."""
MESSAGES = {
    "send": C10dOp(SEND, 0, 2),
    "recv_": C10dOp(RECEIVE, 0, 2),
    "recv_any_source_": C10dOp(RECEIVE, 0),
}
"""Operators between two ranks, by name; the root is the other one. Their last argument is a tag."""


class CollectiveMismatchError(RankError):
    """A rank that would enter another collective than the rank that came to it first."""


class CollectiveChecks:
    """Every collective of this rank, of whatever part of torch."""

    def __init__(
        self, store: dist.Store, *, rank: int, world_size: int, progress: Callable[[str], None]
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Collectives that this rank has entered, by the name of their group."""
        self.messages = MessageChecks(store, rank=rank, progress=progress)
        self._store, self._rank, self._progress = store, rank, progress
        self._world = list(range(world_size))

    def told(self) -> dict[str, dict[str, int]]:
        """Counts for the controller, of collectives and of messages."""
        return {"counts": dict(self.counts), "messages": dict(self.messages.counts)}

    def active(self) -> AbstractContextManager[None]:
        """Context manager in which c10d's operators are seen."""
        names = [f"c10d::{name}" for name in OPS | MESSAGES]
        return torch_private.c10d_calls(names, self._seen)

    def enter(self, name: str, content: str, *, ranks: Sequence[int], nth: int = 1) -> int:
        """Say and count a collective; returns its number in the group of these `ranks`.

        CollectiveMismatchError where the first rank at this number enters another one, by name or
        `content` or group. Its group is the `nth` of these ranks.
        """
        __tracebackhide__ = True
        group = group_name(ranks, world_size=len(self._world))
        number = self.counts[group]
        self.counts[group] += 1
        mine = f"{name} #{number}{content} over {nth_group(nth, group)}"
        self._progress(mine)
        key = f"collective/{group}/{number}"
        noted = self._store.compare_set(key, "", f"{self._rank} {mine}").decode()
        first, _, other = noted.partition(" ")
        if mine != other:
            raise CollectiveMismatchError(
                where="collectives", expected=f"{other}, as on rank {first}",
                found=f"{mine} on rank {self._rank}",
                remedy="look for a condition on the rank, or on data that differs between ranks",
            )
        return number

    def _seen(self, name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        __tracebackhide__ = True
        short = name.removeprefix("c10d::")
        group = torch_private.process_group(arguments)
        ranks = self._world if group is None else dist.get_process_group_ranks(group)
        if len(ranks) == 1:
            return call()
        op = OPS.get(short) or MESSAGES[short]
        content = "" if op.payload is None else _content(arguments[op.payload], op)
        root = "" if op.root is None else str(ranks[arguments[op.root]])
        nth = 1 if group is None else torch_private.number_of_group(group)
        if short in MESSAGES:
            over = nth_group(nth, group_name(ranks, world_size=len(self._world)))
            self.messages.enter(op.name, self._channel(op, root, over, arguments), content)
        else:
            reduction = torch_private.reduction(arguments)
            content += f", {reduction}" * bool(reduction) + f", root {root}" * bool(root)
            self.enter(op.name, content, ranks=ranks, nth=nth)
        return call()

    def _channel(self, op: C10dOp, peer: str, over: str, arguments: tuple[Any, ...]) -> Channel:
        """The channel of a send or receive. NCCL looks at no tag."""
        own, other = f"rank {self._rank}", f"rank {peer}" if peer else ANY
        tag = 0 if arguments[0][0].is_cuda else arguments[-1]
        return Channel(own, other, over, tag) if op.name == SEND else Channel(other, own, over, tag)


def _content(payload: Any, op: C10dOp) -> str:
    """Elements and dtypes of a payload, as text: ` of 4 float32`."""
    dtypes: Counter[str] = Counter()
    for tensor in _tensors(payload):
        dtypes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    parts = [f"{numel} {dtype}" if op.is_even else dtype for dtype, numel in dtypes.items()]
    return f" of {', '.join(parts)}" if parts else ""


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of a payload: one, a list, or a list of lists."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for item in value:
            yield from _tensors(item)
