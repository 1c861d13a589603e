"""`check_module`: a wrapped module on real ranks trains as the plain one does on all batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils._pytree import tree_leaves

from zreal.testing.sharded.breaches import (
    Breach,
    Group,
    apart,
    differs,
    require,
    shape_text,
)
from zsim.errors import ArgumentError

__tracebackhide__ = True  # reports of pytest end at the user's own line
ROUNDED_OTHERWISE = 1e-3
"""Share of its way that a parameter may be apart: sums have another order, steps are rounded."""
OUTPUTS = 1e-5
"""Share of the largest output that outputs may be apart, where kernels add in another order."""

MICRO_BATCHES = 3
"""Micro-batches of a step, of which the last one reduces gradients."""

NoSync = Callable[[nn.Module], AbstractContextManager[Any]]
Whole = Callable[[nn.Module], dict[str, Tensor]]
Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def whole_parameters(module: nn.Module) -> dict[str, Tensor]:
    """All parameters of a module of fully_shard, FSDP or DDP, whole, by the names that the plain
    module has; all ranks call this."""
    options = StateDictOptions(full_state_dict=True)
    values = cast("dict[str, Tensor]", get_model_state_dict(module, options=options))
    return {name: value.clone() for name, value in values.items()}


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum: it has states, and a small gradient takes no large step, as Adam's does.
    """
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def without_sync(module: nn.Module) -> NoSync | None:
    """The context in which a backward of `module` reduces nothing, as DDP, FSDP and fully_shard
    have it; None for another wrapper."""
    if callable(getattr(module, "no_sync", None)):
        return lambda wrapped: cast(Any, wrapped).no_sync()
    return _no_gradient_sync if hasattr(module, "set_requires_gradient_sync") else None


@contextmanager
def _no_gradient_sync(module: Any) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def check_module(
    wrapped: nn.Module,
    plain: nn.Module,
    *,
    batch: Callable[[int, int], Any],
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Optimizers = momentum,
    steps: int = 3,
    whole: Whole = whole_parameters,
    no_sync: NoSync | None = None,
    tolerance: float = ROUNDED_OTHERWISE,
    outputs: float = OUTPUTS,
    group: Group = None,
) -> int:
    """The number of parameters in which `wrapped`, on real ranks, trains as `plain` does in one
    process; ShardLawError on all ranks, of the smallest parameter that does not.

    `plain` has the values that `wrapped` had when it was wrapped; both are trained. `batch(rank,
    step)` gives a rank's inputs, one tensor or a tuple; the kit seeds what it draws. `loss` makes a
    number of the output, which else is one. `whole` gives the whole parameters of a wrapper of your
    own, and `no_sync` the context in which it reduces no gradients. Where there is one, as of DDP,
    FSDP and fully_shard, a step of three micro-batches is checked too, of which the last reduces.
    Buffers are not compared, since each rank has its own.

    ArgumentError for batches that are the same on all ranks, and for a loss that moves nothing: no
    wrapper could fail them.
    """
    training = _Training(
        wrapped, plain, batch, loss or (lambda output: output), whole, tolerance, outputs, group
    )
    # parameters are asked for before a forward, after which a wrapper may show unsharded ones
    first, further = (
        tuple([make(list(each.parameters())) for each in (wrapped, plain)])
        for make in (lambda own: torch.optim.SGD(own, lr=0.1), optimizer)
    )
    training.require_same_start()
    training.require_own_batches()
    training.train(first, 1, "gradients_are_the_mean_of_ranks")
    if quiet := no_sync or without_sync(wrapped):
        training.train(first, 1, "micro_batches_without_sync_add_up", no_sync=quiet)
    training.train(further, steps, "steps_are_those_of_one_process")
    return len(training.start)


class _Training:
    """Both modules, their inputs, and the laws that are asked of them in turn."""

    def __init__(
        self, wrapped: nn.Module, plain: nn.Module, batch: Callable[[int, int], Any],
        loss: Callable[[Any], Tensor], whole: Whole, tolerance: float, outputs: float,
        group: Group,
    ) -> None:
        self.wrapped, self.plain, self.batch, self.loss = wrapped, plain, batch, loss
        self.whole, self.tolerance, self.outputs, self.group = whole, tolerance, outputs, group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.start = {name: value.detach().clone() for name, value in plain.named_parameters()}
        self.step = 0

    def inputs(self, rank: int) -> tuple[Any, ...]:
        """The batch of a rank at this step, the same on whichever rank it is drawn."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.step * self.world + rank)
            batch = self.batch(rank, self.step)
        return batch if isinstance(batch, tuple) else (batch,)

    def require_same_start(self) -> None:
        """Every parameter is there, whole, on every rank, with the plain module's values."""
        values = self.whole(self.wrapped)
        others = self._others(values, self.start)
        require("parameters_start_as_the_modules", others, group=self.group)

    def require_own_batches(self) -> None:
        """ArgumentError where ranks have equal batches: gradients need no reduction then."""
        first, *others = [_tensors(self.inputs(rank)) for rank in range(self.world)]
        if others and all(
            len(first) == len(other) and all(map(torch.equal, first, other)) for other in others
        ):
            raise ArgumentError(
                where="batch", expected="another batch on each rank",
                found="the same on all, whose gradients need no reduction",
                remedy="make it of `rank`, or draw it: the kit seeds each rank otherwise",
            )

    def train(
        self, optimizers: tuple[torch.optim.Optimizer, ...], steps: int, law: str, *,
        no_sync: NoSync | None = None,
    ) -> None:
        """Train both, and require `law` of the whole parameters after each step; with `no_sync` a
        step has several micro-batches."""
        before = {name: each.detach().clone() for name, each in self.plain.named_parameters()}
        for number in range(1, steps + 1):
            for _ in range(MICRO_BATCHES - 1) if no_sync else ():
                assert no_sync is not None
                with no_sync(self.wrapped):
                    self._backward()
            self._backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if all(map(torch.equal, before.values(), self.plain.parameters())):
                raise ArgumentError(
                    where="loss", expected="a loss that moves a parameter",
                    found="one whose gradients are all zero",
                )
            when = f"after {number} step{'s' * (number > 1)}"
            values = self.whole(self.wrapped)
            require("ranks_hold_the_same", self._other_than_rank_0(values, when), group=self.group)
            require(law, self._off_the_way(values, before, when), group=self.group)

    def _backward(self) -> None:
        """A micro-batch of both, whose outputs must be alike."""
        output = self.wrapped(*self.inputs(self.rank))
        for rank in range(self.world):
            expected = self.plain(*self.inputs(rank))
            if rank == self.rank:
                far = _far(_tensors(output), _tensors(expected), self.outputs)
            (self.loss(expected) / self.world).backward()
        require("outputs_are_the_modules", far, group=self.group)
        self.loss(output).backward()
        self.step += 1

    def _others(
        self, values: dict[str, Tensor], expected: dict[str, Tensor]
    ) -> Iterator[Breach]:
        for name, value in expected.items():
            how = differs(values[name], value, name="it") if name in values else "it is missing"
            if how:
                yield _breach(name, value, how)

    def _other_than_rank_0(self, values: dict[str, Tensor], when: str) -> Iterator[Breach]:
        for name in self.start:
            first = values[name].clone()
            dist.broadcast(first, group=self.group, group_src=0)
            how = differs(values[name], first, name="it")
            if how:
                yield _breach(name, first, f"{how} as on rank 0, {when}")

    def _off_the_way(
        self, values: dict[str, Tensor], before: dict[str, Tensor], when: str
    ) -> Iterator[Breach]:
        for name, parameter in self.plain.named_parameters():
            share = apart(values[name], parameter.detach(), start=before[name])
            if not share <= self.tolerance:
                how = f"{share:.2g} of its way apart {when}, at most {self.tolerance:g} allowed"
                yield _breach(name, parameter, how)


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _far(outputs: list[Tensor], expected: list[Tensor], tolerance: float) -> list[Breach]:
    """The outputs that are another number or another shape, or too far from the plain module's."""
    if len(outputs) != len(expected):
        return [Breach(0, "the output", f"{len(outputs)} tensors, expected {len(expected)}")]
    breaches = []
    for index, (output, other) in enumerate(zip(outputs, expected, strict=True)):
        output, other = output.detach().double(), other.detach().double()
        how = differs(output, other, name="it")
        if output.shape == other.shape and how:
            share = apart(output, other, start=torch.zeros_like(other))
            how = "" if share <= tolerance else f"{how}; {share:.2g} of the largest"
        if how:
            label = f"output {index} of shape {shape_text(other)}"
            breaches.append(Breach(other.numel(), label, how))
    return breaches


def _breach(name: str, value: Tensor, how: str) -> Breach:
    return Breach(value.numel(), f"{name} of shape {shape_text(value)}", how)
