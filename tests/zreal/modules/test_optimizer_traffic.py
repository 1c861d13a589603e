"""The bytes that an optimizer's step is said to move, against the operands of the aten calls that
torch makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zreal.modules.optimizers import make_optimizer
from zsim.models.training_options import Optimizer
from zsim.strategies.building.optimizers import kernels

NUMEL = 1000


class Traffic(TorchDispatchMode):
    """The bytes of large tensors that calls read, each once per call, and write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []
        """The bytes of each."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = large(args)
        written = large(result) or large(args[:1])  # an in-place foreach call returns nothing
        if len(read | written) and read:
            self.calls.append(sum(read.values()) + sum(written.values()))
        return result


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
    with Traffic() as traffic:
        optimizer.step()

    planned = kernels((NUMEL,), optimizer=settings, dtype="float32", device="cpu")
    moved = [sum(traffic.calls)] if implementation == "foreach" else traffic.calls
    assert [kernel.nbytes for kernel in planned] == moved
