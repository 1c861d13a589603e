"""Views changed in place: autograd allocates for them in backward what fake tensors do not show, so
that they are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zreal.tracing.test_tracing_against_torch import measured_events, traced, traced_events
from tests.zreal.tracing.user_modules import Case
from zreal import torch_private
from zreal.tracing.errors import UntraceableError
from zreal.tracing.trace import trace


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


def halves(y: Tensor, x: Tensor) -> Tensor:
    y[..., :4].mul_(2.0)
    y[..., 4:].sigmoid_()
    return y + x


def heads(y: Tensor, x: Tensor) -> Tensor:
    """Several views one after another, of which the last was made before the change."""
    split = y.unflatten(-1, (2, 8)).transpose(1, 2)
    y.mul_(0.5)
    return split.sin().transpose(1, 2).flatten(2) + x


def returned(y: Tensor, x: Tensor) -> Tensor:
    """A view on which fully_shard's hook would end torch by a segmentation fault."""
    y.detach().mul_(2.0)
    return y


def written(y: Tensor, x: Tensor) -> Tensor:
    """Reads the base, which no view leads to."""
    z = torch.zeros_like(x)
    z[..., :8] = y[..., :8]
    z[..., 8:] = x[..., :8]
    return z


def data() -> tuple[Tensor, ...]:
    return (torch.randn(2, 6, 16),)


@pytest.mark.parametrize("change", [
    halves, heads, returned, lambda y, x: functional.relu(y, inplace=True),
    lambda y, x: functional.selu(functional.dropout(y, 0.2, inplace=True)),
])
def test_a_view_whose_memory_was_changed_is_refused_with_what_to_do(
    change: Callable[[Tensor, Tensor], Tensor]
) -> None:
    with pytest.raises(UntraceableError, match=r"^(aten::\w+(\.\w+)?|blocks\.0): expected views "
                                               r"whose memory stays.*; make the change out of"):
        trace(lambda: Stack(change), data())


def test_what_was_changed_through_a_view_is_traced() -> None:
    changing = Case(lambda: Stack(written), "blocks", data, num_units=3)
    assert traced_events(traced(changing, dtype="float32", casts_input=False)) == measured_events(
        changing, dtype="float32"
    )


# -- names of torch that may move


def test_a_view_knows_how_often_its_base_was_changed() -> None:
    tensor = torch.ones(2, 3)
    view = tensor.t()
    tensor.add_(1)
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
