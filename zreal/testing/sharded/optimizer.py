"""`check_optimizer`: a sharded optimizer on real ranks steps as one process does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zreal.testing.sharded.breaches import (
    Breach,
    Group,
    apart,
    differs,
    require,
    shape_text,
)
from zsim.errors import ArgumentError
from zsim.io.arguments import described

__tracebackhide__ = True  # reports of pytest end at the user's own line
Shapes = Sequence[tuple[int, ...]]
MODELS: Sequence[Shapes] = (
    ((1,),), ((2,),), ((3,), (1,)), ((5, 3), (5,), (2, 5)), ((7, 11), (7,), (13, 7), (13,)),
)
"""Shapes of the parameters of models by default: fewer elements than ranks, primes, uneven ones."""
SUMMED_OTHERWISE = 1e-5
"""Share of its way that a parameter may be apart, since float32 gradients are summed in another
order and divided at another place."""


class Stepping(Protocol):
    """An optimizer: torch's, or one that steps alike."""

    def step(self) -> object:
        """One step with the gradients that parameters have."""
        ...


def check_optimizer(
    sharded: Callable[[list[nn.Parameter]], Stepping],
    reference: Callable[[list[nn.Parameter]], Stepping],
    *,
    reduces: bool = True,
    models: Sequence[Shapes] = MODELS,
    steps: int = 3,
    tolerance: float = SUMMED_OTHERWISE,
    device: torch.device | str = "cpu",
    group: Group = None,
) -> int:
    """The number of models that `sharded` steps as `reference` does on one process with the mean
    gradient; ShardLawError on all ranks at the smallest model of which it does not.

    Both are made of a list of parameters. With `reduces` each rank sets its own gradients and
    `sharded` takes their mean; without, gradients are the mean already, as DDP leaves them.
    """
    for name, made in (("sharded", sharded), ("reference", reference)):
        if isinstance(made, torch.optim.Optimizer) or not callable(made):
            raise ArgumentError(
                where=f"check_optimizer: {name}",
                expected="a function that makes an optimizer of a list of parameters",
                found=described(made), remedy="as lambda parameters: AdamW(parameters, lr=0.1)",
            )
    for shapes in models:
        _require(sharded, reference, shapes, reduces, steps, tolerance, device, group)
    return len(models)


def _require(
    sharded: Callable[[list[nn.Parameter]], Stepping],
    reference: Callable[[list[nn.Parameter]], Stepping], shapes: Shapes, reduces: bool,
    steps: int, tolerance: float, device: torch.device | str, group: Group,
) -> None:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    start = [_values(shape, 1 + i).to(device) / 8 for i, shape in enumerate(shapes)]
    own, whole = ([nn.Parameter(value.clone()) for value in start] for _ in range(2))
    ours, theirs = sharded(own), reference(whole)
    for step in range(1, steps + 1):
        for i, (mine, other) in enumerate(zip(own, whole, strict=True)):
            of_ranks = [
                _values(mine.shape, 5 * step + 11 * each + i).to(device) for each in range(world)
            ]
            other.grad = torch.stack(of_ranks).sum(0) / world
            mine.grad = of_ranks[rank].clone() if reduces else other.grad.clone()
        ours.step()
        theirs.step()
        when = f"after {step} step{'s' * (step > 1)}"
        require("ranks_hold_the_same", _other_than_rank_0(own, when, group), group=group)
        pairs = list(zip(start, own, whole, strict=True))
        require(
            "steps_are_those_of_one_process", _off_the_way(pairs, tolerance, when), group=group
        )


def _values(shape: tuple[int, ...], seed: int) -> Tensor:
    """Whole numbers from -8 to 8, none of them 0, that differ by element and seed."""
    index = torch.arange(torch.Size(shape).numel())
    sign = 1 - 2 * ((index + seed) % 2)
    return ((5 * index + 3 * seed) % 8 + 1).mul(sign).float().reshape(shape)


def _other_than_rank_0(
    parameters: list[nn.Parameter], when: str, group: Group
) -> Iterator[Breach]:
    for i, parameter in enumerate(parameters):
        first = parameter.detach().clone()
        dist.broadcast(first, group=group, group_src=0)
        how = differs(parameter.detach(), first, name="it")
        if how:
            yield _breach(parameter, i, f"{how} as on rank 0, {when}")


def _off_the_way(
    pairs: list[tuple[Tensor, nn.Parameter, nn.Parameter]], tolerance: float, when: str
) -> Iterator[Breach]:
    for i, (start, mine, other) in enumerate(pairs):
        share = apart(mine.detach(), other.detach(), start=start)
        if not share <= tolerance:
            how = f"{share:.2g} of its way apart {when}, at most {tolerance:g} allowed"
            yield _breach(mine, i, how)


def _breach(parameter: nn.Parameter, index: int, how: str) -> Breach:
    label = f"parameter {index} of shape {shape_text(parameter)}"
    return Breach(parameter.numel(), label, how)
