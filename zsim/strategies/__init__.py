"""The strategies by name: each a pure function from a Training, a mesh and its options to a
Program.

To add one, add a file and a line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from zsim.ir.mesh import Mesh
from zsim.loaded import Loaded
from zsim.models import wrapping
from zsim.models.called_modules import by_module
from zsim.models.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.models.spec import ModelSpec
from zsim.models.training_options import Batch, Optimizer, Precision
from zsim.models.wrapping import Wrapping
from zsim.strategies.strategy import Formula, OptionValue, Strategy

__all__ = [
    "ALONE", "LADDER", "STAGES", "STRATEGIES", "Formula", "OptionValue", "Strategy", "ladder",
    "problems", "wrapped",
]


STRATEGIES: Mapping[str, Strategy] = Loaded({
    name: f"{__name__}.{name}:STRATEGY" for name in (
        "single", "ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp", "fsdp1", "zero_redundancy",
        "deepspeed1", "deepspeed2", "deepspeed3",
    )
})
LADDER = ("ddp", "zero1", "zero2", "hsdp", "fsdp2", "zero3")
"""The strategies that `zsim fit` compares with a scenario's own, from what shards least."""
ALONE = "single"
"""The one that it compares on one rank, where those of the ladder have nothing to shard."""
STAGES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
"""The strategies that a report compares by what they hold: the stages of ZeRO."""


def ladder(own: str, *, num_ranks: int) -> tuple[str, ...]:
    """The strategies to compare with a scenario's `own` on so many ranks, from what shards least.
    """
    return LADDER if num_ranks > 1 else tuple(dict.fromkeys((ALONE, own)))


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
    if precision is not None:
        refusals += strategy.precision_problems(precision)
    if batch is not None and batch.forwards > 1 and not strategy.sums_losses:
        refusals.append(
            f"batch.forwards: expected 1 with {name}, whose engine runs backward after each "
            f"forward, found {batch.forwards}"
        )
    return tuple(refusals)


def wrapped(name: str, model: ModelSpec, policy: Wrapping, options: Any = None) -> ModelSpec:
    """`model` with the units that `policy` makes under the strategy `name` with its `options`.

    Units lie inside blocks only where the strategy has units at all. Where its runtime hooks every
    module, each that owns parameters is one.
    """
    strategy = STRATEGIES[name]
    nests = strategy.nests
    if nests == "modules":
        return by_module(model, leaf_blocks=strategy.leaf_blocks(options, model))
    if nests == "nothing":
        policy = replace(policy, nested=())
    return wrapping.wrapped(model, policy, in_parts=nests != "buffers")
