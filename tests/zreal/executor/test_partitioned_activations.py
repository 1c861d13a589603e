"""ZeRO-R's partitioned activations, which texts print as code that cannot run on two ranks.

Saved tensors are cut into a part for each of two gloo ranks in forward, and are whole again in
backward. Ranks of tensor parallelism have the same tensors: each keeps its part, and one all-gather
makes it whole. Data-parallel ranks have tensors of their own: parts go to the others and come back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zreal.processes import launch
from zreal.processes.rank_settings import settle
from zreal.processes.rendezvous import rendezvous
from zsim.ir.sharding import padded_size

RANKS = 2


@dataclass(slots=True)
class Partitioned:
    """Hooks on saved tensors. `alike`: every rank has the same ones."""

    alike: bool
    whole: int = 0
    """Bytes of the tensors, padded."""
    kept: int = 0
    """Bytes that this rank keeps of them, and of others'."""
    sent: int = 0
    """Bytes that this rank has sent, both ways."""

    def pack(self, tensor: Tensor) -> Any:
        """The part that this rank keeps, and the tensor's shape; parameters stay whole, and so do
        the views of them that a linear saves."""
        if isinstance(tensor, nn.Parameter) or tensor._base is not None:
            return tensor
        flat = tensor.new_zeros(padded_size(tensor.numel(), RANKS))
        flat[: tensor.numel()] = tensor.flatten()
        part = flat.view(RANKS, -1)[dist.get_rank()].clone() if self.alike else self._swap(flat)
        self.whole += flat.nbytes
        self.kept += part.nbytes
        return part, tensor.shape

    def unpack(self, packed: Any) -> Tensor:
        """The whole tensor."""
        if isinstance(packed, Tensor):
            return packed
        part, shape = packed
        if self.alike:
            whole = part.new_empty(RANKS * part.numel())
            dist.all_gather_into_tensor(whole, part)
            self.sent += (RANKS - 1) * part.nbytes
        else:
            whole = self._swap(part)
        return whole[: shape.numel()].view(shape)

    def _swap(self, flat: Tensor) -> Tensor:
        """An all-to-all: part i goes to rank i."""
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat)
        self.sent += flat.nbytes * (RANKS - 1) // RANKS
        return received


def partitioned_rank(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int, **_: Any
) -> dict[str, Any]:
    """A backward with partitioned activations and one without, on this rank's batch."""
    settle()
    store = rendezvous(rank=rank, world_size=world_size, port=port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3), nn.GELU())
    torch.manual_seed(1 if arguments["alike"] else 1 + rank)
    batch = torch.randn(3, 5)
    hooks = Partitioned(arguments["alike"])
    with saved_tensors_hooks(hooks.pack, hooks.unpack):
        loss = model(batch).square().sum()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(batch).square().sum().backward()
    pairs = zip(gradients, model.parameters(), strict=True)
    return {
        "equal": all(torch.equal(gradient, whole.grad) for gradient, whole in pairs),
        "batch": batch.tolist(), "whole": hooks.whole, "kept": hooks.kept, "sent": hooks.sent,
    }


def trained(*, alike: bool) -> list[dict[str, Any]]:
    """Each rank's bytes, with gradients equal to the bit and all of it alike in size."""
    ranks = launch.launch(
        f"{__name__}:partitioned_rank", {"alike": alike}, world_size=RANKS, timeout_s=120
    )
    assert all(rank["equal"] for rank in ranks)
    assert (ranks[0].pop("batch") == ranks[1].pop("batch")) is alike
    assert ranks[0] == ranks[1]
    return ranks


@pytest.mark.gloo
def test_ranks_with_the_same_activations_keep_half_of_them_and_gather_once() -> None:
    rank = trained(alike=True)[0]
    assert rank["whole"] > 0
    assert rank["kept"] == rank["whole"] // RANKS
    assert rank["sent"] == rank["whole"] // RANKS


@pytest.mark.gloo
def test_data_parallel_ranks_keep_as_many_bytes_as_without_and_send_parts_twice() -> None:
    """Claimed: partitioned over data-parallel ranks, activations take 1/N. Each keeps parts of all
    others' instead of its own: N parts of 1/N."""
    rank = trained(alike=False)[0]
    assert rank["kept"] == rank["whole"] > 0
    assert rank["sent"] == 2 * rank["whole"] * (RANKS - 1) // RANKS
