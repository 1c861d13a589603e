"""The strategies by name: each a pure function from a Training, a mesh and its options to a
Program.

To add one, add a file and a line.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from zsim.ir.mesh import Mesh
from zsim.models import wrapping
from zsim.models.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.models.spec import ModelSpec
from zsim.models.training_options import Batch, Optimizer, Precision
from zsim.models.wrapping import Wrapping
from zsim.strategies import ddp, fsdp1, fsdp2, hsdp, zero1, zero2, zero3, zero_redundancy
from zsim.strategies.strategy import Formula, OptionValue, Strategy

__all__ = ["LADDER", "STRATEGIES", "Formula", "OptionValue", "Strategy", "problems", "wrapped"]

STRATEGIES: dict[str, Strategy] = {
    "ddp": ddp.STRATEGY,
    "zero1": zero1.STRATEGY,
    "zero2": zero2.STRATEGY,
    "zero3": zero3.STRATEGY,
    "fsdp2": fsdp2.STRATEGY,
    "hsdp": hsdp.STRATEGY,
    "fsdp1": fsdp1.STRATEGY,
    "zero_redundancy": zero_redundancy.STRATEGY,
}
LADDER = ("ddp", "zero1", "zero2", "hsdp", "fsdp2", "zero3")
"""The strategies that `zsim fit` compares with a scenario's own, from what shards least."""


def problems(
    name: str,
    options: Any,
    *,
    mesh: Mesh | None = None,
    optimizer: Optimizer | None = None,
    model: ModelSpec | None = None,
    checkpointing: Checkpointing = NO_CHECKPOINTING,
    precision: Precision | None = None,
    batch: Batch | None = None,
    sync: Literal["every", "last"] = "every",
) -> tuple[str, ...]:
    """Refusals of the strategy `name` with `options`, one line each, the scenario's key first.

    A scenario without any is planned without an error. Parts that are None are not checked: `mesh`
    goes with `optimizer`, and `model` with all that follows it.
    """
    strategy = STRATEGIES[name]
    refusals: list[str] = []
    if mesh is not None and optimizer is not None:
        refusals += strategy.problems(options, mesh, optimizer)
    if model is not None:
        casts = precision is not None and precision.reduce != precision.parameters
        waits = batch is not None and batch.accumulation > 1 and sync == "last"
        refusals += strategy.model_problems(options, model, casts and waits, checkpointing)
    return tuple(refusals)


def wrapped(name: str, model: ModelSpec, policy: Wrapping) -> ModelSpec:
    """`model` with the units that `policy` makes under the strategy `name`: units inside blocks
    only where the strategy has units at all."""
    nests = STRATEGIES[name].nests
    if nests == "nothing":
        policy = replace(policy, nested=())
    return wrapping.wrapped(model, policy, in_parts=nests != "buffers")
