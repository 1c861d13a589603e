"""The bytes that an optimizer's step is said to move, against the operands of the aten calls that
torch makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.watched_calls import WatchedCalls
from zreal.modules.optimizers import make_optimizer
from zsim.models.training_options import Optimizer
from zsim.strategies.building.optimizers import kernels

NUMEL = 1000


def large(value: Any) -> dict[int, int]:
    if isinstance(value, torch.Tensor):
        return {value.data_ptr(): value.nbytes} if value.numel() == NUMEL else {}
    by_address: dict[int, int] = {}
    for item in value if isinstance(value, (list, tuple)) else ():
        by_address |= large(item)
    return by_address


@pytest.mark.parametrize("implementation", ["foreach", "for-loop"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("name", "momentum"), [("adamw", 0.0), ("sgd", 0.0), ("sgd", 0.9)])
def test_a_step_moves_what_its_calls_read_and_write(
    name: str, momentum: float, decay: float, implementation: str
) -> None:
    settings = Optimizer(
        name=name, implementation=implementation, momentum=momentum, weight_decay=decay
    )  # type: ignore[arg-type]
    parameter = torch.nn.Parameter(torch.ones(NUMEL))
    parameter.grad = torch.ones(NUMEL)
    optimizer = make_optimizer(settings, [parameter])
    optimizer.step()
    calls: list[int] = []

    def see(_func: Any, args: Any, _kwargs: Any, result: Any) -> None:
        """Bytes of large tensors that a call reads, each once, and writes."""
        read = large(args)
        written = large(result) or large(args[:1])  # an in-place foreach call returns nothing
        if read:
            calls.append(sum(read.values()) + sum(written.values()))

    with WatchedCalls(see):
        optimizer.step()

    planned = kernels((NUMEL,), optimizer=settings, dtype="float32", device="cpu")
    moved = [sum(calls)] if implementation == "foreach" else calls
    assert [kernel.nbytes for kernel in planned] == moved
