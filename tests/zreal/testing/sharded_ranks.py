"""Users' collectives, optimizers and wrappers on ranks, right ones and ones with a defect."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from zreal import torch_private
from zreal.executor import ring
from zreal.testing import Rank, check_collectives, check_module, check_optimizer
from zsim.testing.sharding import ShardLawError


def reduce_scatter(tensor: Tensor) -> Tensor:
    """gloo's, into a piece."""
    piece = tensor.new_empty(tensor.numel() // dist.get_world_size())
    torch_private.reduce_scatter(piece, tensor, group=dist.group.WORLD)
    return piece


def all_gather(piece: Tensor) -> Tensor:
    """gloo's, into the whole."""
    whole = piece.new_empty(piece.numel() * dist.get_world_size())
    torch_private.all_gather(whole, piece, group=dist.group.WORLD)
    return whole


def reduce_scatter_of_another_rank(tensor: Tensor) -> Tensor:
    """The piece of the next rank."""
    dist.all_reduce(tensor := tensor.clone())
    return tensor.chunk(dist.get_world_size())[dist.get_rank() - 1] if tensor.numel() else tensor


def reduce_scatter_as_a_mean(tensor: Tensor) -> Tensor:
    return reduce_scatter(tensor) // dist.get_world_size()


def reduce_scatter_in_place(tensor: Tensor) -> Tensor:
    """Leaves the sum in its argument."""
    dist.all_reduce(tensor)
    size = tensor.numel() // dist.get_world_size()
    return tensor[dist.get_rank() * size :][:size].clone()


def reduce_scatter_on_one_rank(tensor: Tensor) -> Tensor:
    """Rank 1 alone loses the last element of its piece."""
    piece = reduce_scatter(tensor)
    return piece[:-1] if dist.get_rank() == 1 else piece


def all_gather_backwards(piece: Tensor) -> Tensor:
    return torch.cat(all_gather(piece).chunk(dist.get_world_size())[::-1])


COLLECTIVES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "gloo": (reduce_scatter, all_gather),
    "another rank's piece": (reduce_scatter_of_another_rank, all_gather),
    "a mean": (reduce_scatter_as_a_mean, all_gather),
    "in place": (reduce_scatter_in_place, all_gather),
    "one rank": (reduce_scatter_on_one_rank, all_gather),
    "backwards": (reduce_scatter, all_gather_backwards),
}


def collectives(name: str) -> int:
    """The cases in which the laws hold."""
    return check_collectives(*COLLECTIVES[name])


class Sharded:
    """SGD with momentum, whose states each rank has of its part of the flat parameters."""

    divides, rounds_up, shares = True, True, True

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.world = parameters, dist.get_world_size()
        numel = sum(parameter.numel() for parameter in parameters)
        self.size = -(-numel // self.world) if self.rounds_up else numel // self.world
        self.padding = self.size * self.world - numel
        self.momentum = torch.zeros(self.size)

    def step(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters]
        flat = torch.cat([each.reshape(-1) for each in gradients if each is not None])
        piece = reduce_scatter(nn.functional.pad(flat, (0, self.padding)))
        self.momentum.mul_(0.9).add_(piece / self.world if self.divides else piece)
        update = nn.functional.pad(all_gather(self.momentum), (0, -self.padding))
        if self.shares or dist.get_rank() == 0:
            parts = update.split([parameter.numel() for parameter in self.parameters])
            for parameter, part in zip(self.parameters, parts, strict=True):
                parameter.data.sub_(part.reshape(parameter.shape), alpha=0.1)


class Undivided(Sharded):
    """Takes the sum of gradients for their mean."""

    divides = False


class LosesTheRest(Sharded):
    """Cuts off what does not divide by the ranks."""

    rounds_up = False


class KeptByRank0(Sharded):
    """Rank 0 alone takes the update."""

    shares = False


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def zero_redundancy(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.1)


OPTIMIZERS: dict[str, tuple[Any, Any, bool]] = {
    "sharded": (Sharded, sgd, True),
    "ZeroRedundancyOptimizer": (zero_redundancy, adamw, False),
    "undivided": (Undivided, sgd, True),
    "loses the rest": (LosesTheRest, sgd, True),
    "kept by rank 0": (KeptByRank0, sgd, True),
    "not reduced": (sgd, sgd, True),
}


def optimizer(name: str) -> int:
    """The models that step as in one process."""
    sharded, reference, reduces = OPTIMIZERS[name]
    return check_optimizer(sharded, reference, reduces=reduces)


class Uneven(nn.Module):
    """Layers of which some have fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 1), nn.Linear(1, 7)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def sharded(module: Uneven, rank: Rank) -> nn.Module:
    for layer in module.layers:
        fully_shard(layer, mesh=rank.mesh)
    return fully_shard(module, mesh=rank.mesh)


def halved(module: Uneven, rank: Rank) -> nn.Module:
    """fully_shard that computes in bfloat16."""
    return fully_shard(
        module, mesh=rank.mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    )


def undivided(module: Uneven, rank: Rank) -> nn.Module:
    """fully_shard that sums gradients and does not divide them."""
    wrapped: Any = sharded(module, rank)
    for part in (*wrapped.layers, wrapped):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo cannot scale
    return wrapped


def unsynchronised(module: Uneven, rank: Rank) -> nn.Module:
    """Gradients are never reduced."""
    return module


def left_out(module: Uneven, rank: Rank) -> nn.Module:
    """DDP that ignores a bias, whose gradient stays each rank's own."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["layers.1.bias"])
    return DistributedDataParallel(module)


def other_values(module: Uneven, rank: Rank) -> nn.Module:
    """The wrapper makes parameters anew."""
    module.layers[1].reset_parameters()
    return sharded(module, rank)


class Averaging(nn.Module):
    """A user's own wrapper: hooks average each gradient when it is there."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._average)

    def _average(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


class Quiet(Averaging):
    """The same with a context in which nothing is averaged, and in it a defect of `kind`."""

    def __init__(self, module: nn.Module, kind: str) -> None:
        super().__init__(module)
        self.kind, self.quiet = kind, False
        if kind == "new gradient alone":
            for parameter in module.parameters():
                parameter.register_hook(self._averaged)

    def _averaged(self, gradient: Tensor) -> Tensor:
        if not self.quiet:
            dist.all_reduce(gradient := gradient.clone())
            gradient /= dist.get_world_size()
        return gradient

    def _average(self, parameter: Tensor) -> None:
        if self.quiet and self.kind == "dropped":
            parameter.grad = None
        elif not self.quiet and self.kind != "new gradient alone":
            super()._average(parameter)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which nothing is averaged, as DDP's."""
        self.quiet = True
        yield
        self.quiet = False


WRAPPERS: dict[str, Callable[[Uneven, Rank], nn.Module]] = {
    "fully_shard": sharded,
    "DDP": lambda module, _: DistributedDataParallel(module),
    "FSDP": lambda module, _: FullyShardedDataParallel(
        module, use_orig_params=True, device_id=torch.device("cpu")
    ),
    "own": lambda module, _: Averaging(module),
    "own, no_sync": lambda module, _: Quiet(module, ""),
    "own, dropped": lambda module, _: Quiet(module, "dropped"),
    "own, new gradient alone": lambda module, _: Quiet(module, "new gradient alone"),
    "own, unnamed": lambda module, _: Averaging(module),
    "bfloat16": halved,
    "undivided": undivided,
    "unsynchronised": unsynchronised,
    "a bias left out": left_out,
    "other values": other_values,
}


NAMED = [name for name in WRAPPERS if name.startswith("own") and name != "own, unnamed"]
"""Wrappers of a user who says where the parameters are."""


class Masked(nn.Module):
    """A wrapper whose outputs are masked with -inf, and else far off."""

    def __init__(self, module: nn.Module, off: float) -> None:
        super().__init__()
        self.inner, self.off = module, off

    def forward(self, x: Tensor) -> Tensor:
        output = self.inner(x) + self.off
        return output.masked_fill(torch.arange(output.shape[1]) == 0, -torch.inf)


def masked(off: float) -> int:
    """check_module of outputs of which one column is -inf."""
    torch.manual_seed(0)
    plain = Uneven()
    return check_module(
        Masked(DistributedDataParallel(copy.deepcopy(plain)), off), Masked(plain, 0.0),
        batch=lambda rank, step: torch.randn(4, 3),
        loss=lambda output: output[:, 1:].square().mean(),
        whole=lambda own: {
            f"inner.{name}": value for name, value in own.inner.module.named_parameters()
        },
    )


def vacuous(what: str) -> int:
    """check_module where no wrapper could fail: batches alike on all ranks, or no gradient."""
    plain = Uneven()
    batch = torch.ones(4, 3) if what == "batch" else None
    return check_module(
        copy.deepcopy(plain), plain,
        batch=lambda rank, step: torch.randn(4, 3) if batch is None else batch,
        loss=lambda output: output.mean() * 0.0,
    )


def module(name: str, rank: Rank) -> int:
    """The parameters that train as in one process."""
    torch.manual_seed(0)
    plain = Uneven()
    wrapped = WRAPPERS[name](copy.deepcopy(plain), rank)
    return check_module(
        wrapped, plain, batch=lambda rank, step: torch.randn(4, 3),
        loss=lambda output: output.float().square().mean(),
        **({"whole": lambda own: dict(own.inner.named_parameters())} if name in NAMED else {}),
    )


def errors(kind: str, names: list[str], rank: Rank) -> dict[str, str]:
    """Errors that defects raise on this rank, by name."""
    held: dict[str, Callable[[str], int]] = {
        "collectives": collectives, "optimizer": optimizer,
        "module": lambda name: module(name, rank),
    }
    told = {}
    for name in names:
        try:
            held[kind](name)
        except ShardLawError as error:
            told[name] = str(error)
    return told


def ring_collectives(rank: Rank) -> int:
    """The cases in which zreal's own ring collectives keep the laws."""
    group: Any = dist.group.WORLD

    def scattered(tensor: Tensor) -> Tensor:
        piece = tensor.new_empty(tensor.numel() // rank.world_size)
        ring.reduce_scatter(piece, tensor, group=group)
        return piece

    def gathered(piece: Tensor) -> Tensor:
        whole = piece.new_empty(piece.numel() * rank.world_size)
        ring.all_gather(whole, piece, group=group)
        return whole

    return check_collectives(scattered, gathered, numels=(1, 2, 5))
