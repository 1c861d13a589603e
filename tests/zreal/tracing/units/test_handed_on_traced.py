"""Values that a unit in a block made and the block returns. The hook of the unit or that of the
block comes first in backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zreal.tracing.user_steps import FSDP2, Exact
from zreal.tracing.trace import trace
from zsim.autograd.traced.traced_file import dump
from zsim.autograd.traced.traced_file import parse as parse_model

UNITS = tuple(f"blocks.{index}{inner}" for index in range(4) for inner in (".up", ""))


class Block(nn.Module):
    def __init__(self, returns: str) -> None:
        super().__init__()
        self.down, self.up, self.returns = nn.Linear(16, 24), nn.Linear(24, 16), returns

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.up(functional.gelu(self.down(x)))
        if self.returns == "itself":
            return made
        return made.view(6, 16) if self.returns == "a view" else made + x


class Blocks(nn.Module):
    def __init__(self, returns: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(returns) for _ in range(4))
        self.blocks[2].requires_grad_(False)
        self.head = nn.Linear(16, 9)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x), target)


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 16), torch.randint(9, (6,))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize(
    ("returns", "handed_on"), [("itself", True), ("a view", False), ("a sum", False)]
)
def test_the_units_hook_comes_first_only_on_the_very_tensor_that_it_made(
    returns: str, handed_on: bool, exact: Exact
) -> None:
    """A view is no operator, but a node of autograd: the block's hook is before it. A frozen block
    lets go of its input after the unit."""
    model = trace(lambda: Blocks(returns), inputs(), units=UNITS, sums_in_place=False)
    ends = [
        lowered.returns_inner_output for lowered in model.lowered
        if lowered.fqn.endswith("@2") and lowered.unit != "root"
    ]
    assert ends == [handed_on] * 4
    assert parse_model(dump(model).encode()) == model
    exact(lambda: Blocks(returns), inputs, FSDP2, units=UNITS, order=True)
