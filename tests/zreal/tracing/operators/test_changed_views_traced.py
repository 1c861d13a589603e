"""Views changed in place: on fake tensors torch gives them other gradients than on real ones, and
the trace must show the latter."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.cases.sampling import one_in
from tests.zreal.tracing.test_tracing_against_torch import (
    measured_events,
    measured_phases,
    replicated,
    sharded,
    simulated_phases,
    traced,
    traced_events,
)
from tests.zreal.tracing.user_modules import Case
from zreal import torch_private
from zreal.tracing.errors import UntraceableError
from zreal.tracing.trace import trace
from zsim.ir.mesh import Mesh
from zsim.models.training_options import Dtype
from zsim.strategies import ddp, fsdp2

X = (torch.ones(2, 6, 16),)


class Changing(nn.Module):
    """A Linear, whose output of a 3-d input is a view of what addmm makes, and what is done to
    that."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.linear(x), x)


class Stack(nn.Module):
    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Changing(change) for _ in range(3))
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).logsumexp(-1).mean()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def halves(y: Tensor, x: Tensor) -> Tensor:
    y[..., :4].mul_(2.0)
    y[..., 4:].sigmoid_()
    return y + x


def summand(y: Tensor, x: Tensor) -> Tensor:
    y[..., :4] += x[..., 4:8]
    return y.relu()


def heads(y: Tensor, x: Tensor) -> Tensor:
    """Several views one after another, of which the last was made before the change."""
    split = y.unflatten(-1, (2, 8)).transpose(1, 2)
    y.mul_(0.5)
    return (split.sin() + split.cos()).transpose(1, 2).flatten(2) + x


def written(y: Tensor, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    z[..., :8] = y[..., :8]
    z[..., 8:] = x[..., :8]
    return z


def again(y: Tensor, x: Tensor) -> Tensor:
    y[..., :4].mul_(2.0)
    z = y.exp()
    y[..., :4].mul_(2.0)
    return y * 3 + z


def applied(y: Tensor, x: Tensor) -> Tensor:
    y[..., :4].mul_(2.0)
    return Doubled.apply(y)


def hooked(y: Tensor, x: Tensor) -> Tensor:
    y.mul_(2.0)
    y.register_hook(lambda gradient: gradient * 2)
    return y * 3


def alias(y: Tensor, x: Tensor) -> Tensor:
    flat = y.view(-1, 16)
    flat.add_(1.0)
    return flat.view_as(y)


def used(y: Tensor, x: Tensor) -> Tensor:
    y[..., :4].mul_(2.0)
    y.sum()
    return y


CHANGES = {
    "halves": halves, "a summand": summand, "heads": heads, "written": written, "again": again,
    "applied": applied, "hooked": hooked, "an alias": alias, "used, then returned": used,
    "relu_": lambda y, x: functional.relu(y, inplace=True), "dropout_": lambda y,
    x: functional.selu(functional.dropout(y, 0.2, inplace=True)),
}


def case(name: str) -> Case:
    return Case(
        lambda: Stack(CHANGES[name]), "blocks", lambda: (torch.randn(2, 6, 16),), num_units=3
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CHANGES)
def test_every_allocation_and_free_is_that_of_real_tensors_in_order(
    name: str, dtype: Dtype
) -> None:
    changing = case(name)
    assert traced_events(traced(changing, dtype=dtype, casts_input=False)) == measured_events(
        changing, dtype=dtype
    )


@pytest.mark.filterwarnings("ignore:.*returned a view tensor")
@pytest.mark.parametrize(
    ("name", "dtype", "world_size"),
    one_in(3, [
        (name, dtype, world)
        for name in CHANGES
        for dtype, world in (("float32", 2), ("float32", 3), ("bfloat16", 2))
    ]),
)
def test_fully_shard_holds_the_bytes_that_are_traced(
    name: str, dtype: Dtype, world_size: int
) -> None:
    changing = case(name)
    mesh, rank = Mesh(dp_shard=world_size), world_size - 1
    simulated = simulated_phases(
        traced(changing, dtype=dtype), fsdp2.Options(), rank=rank, mesh=mesh
    )
    with torch_private.fake_group(rank=rank, world_size=world_size):
        assert simulated == measured_phases(changing, sharded(changing, dtype, world_size))


@pytest.mark.filterwarnings(
    "ignore:.*broadcast_buffers"
)  # its newer name is not known to older torch
@pytest.mark.parametrize("name", ["halves", "dropout_"])
def test_ddp_holds_the_bytes_that_are_traced(name: str) -> None:
    simulated = simulated_phases(
        traced(case(name), dtype="float32"), ddp.Options(), rank=1, mesh=Mesh(dp_replicate=2)
    )
    with torch_private.fake_group(rank=1, world_size=2):
        assert simulated == measured_phases(case(name), replicated())


# -- what torch itself dies of

UNUSED = {
    "through a view": "y[..., :4].mul_(2.0)", "by an index": "y[..., :4] = 0",
    "and looked at": "y[..., :4].mul_(2.0); y.shape, y.requires_grad",
    "unseen": "y.detach().mul_(2.0)",
}


REAL = """
import os, torch
for change in {changes}:
    if not (child := os.fork()):
        y = torch.nn.Linear(16, 16)(torch.ones(2, 6, 16))
        exec(change)
        y.register_hook(print)
        os._exit(0)
    print(os.WTERMSIG(os.waitpid(child, 0)[1]))
"""


@cache
def signals_of_real_tensors() -> dict[str, int]:
    """Signals, by change, that end a process which then puts a hook on the real view."""
    code = REAL.format(changes=[*UNUSED.values()])
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return dict(zip(UNUSED, map(int, done.stdout.split()), strict=True))


@pytest.mark.parametrize("name", UNUSED)
def test_a_view_that_torch_cannot_put_a_hook_on_is_refused(name: str) -> None:
    def change(y: Tensor, x: Tensor) -> Tensor:
        exec(UNUSED[name])
        return y

    expected = r"^blocks.0: expected a tensor that torch can put a hook on, found a view that nothing has used since its memory was changed"  # noqa: E501
    with pytest.raises(UntraceableError, match=expected):
        trace(lambda: Stack(change), X)
    assert signals_of_real_tensors()[name] == signal.SIGSEGV


def test_so_is_a_hook_of_the_users() -> None:
    def change(y: Tensor, x: Tensor) -> Tensor:
        y[..., :4].mul_(2.0)
        y.register_hook(lambda gradient: gradient)
        return y * 2

    with pytest.raises(
        UntraceableError, match=r"^register_hook: expected a tensor that torch can put a hook on"
    ):
        trace(lambda: Stack(change), X)


def test_one_of_several_views_is_refused_where_torch_refuses_it() -> None:
    def change(y: Tensor, x: Tensor) -> Tensor:
        first, second = y.chunk(2, -1)
        y.mul_(2)
        return torch.cat([first * 1, second], -1)

    with pytest.raises(
        UntraceableError, match=r"^blocks.0: .* found RuntimeError: Output 0 of Split"
    ):
        trace(lambda: Stack(change), X)


def test_functions_apply_as_before_when_the_trace_is_over() -> None:
    before = torch.autograd.Function.__dict__["apply"]
    trace(lambda: Stack(applied), X)
    with pytest.raises(UntraceableError):
        trace(lambda: Stack(lambda y, x: y @ x), X)
    assert torch.autograd.Function.__dict__["apply"] is before


# -- names of torch that may move


def test_a_view_knows_its_base_and_how_often_that_was_changed() -> None:
    tensor = torch.ones(2, 3)
    view = tensor.t()
    tensor.add_(1)
    assert torch_private.base(view) is tensor
    assert (torch_private.version(view), torch_private.version(torch.ones(2))) == (1, 0)


def test_functions_can_go_unwatched() -> None:
    class Refusing(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            raise AssertionError(func)

    tensor = torch.ones(2)
    with Refusing(), torch_private.unwatched_functions():
        assert tensor.shape == (2,)
