"""Checkpoints that a scenario's strategy does not have, or that its cluster has no files for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zsim.errors import listed
from zsim.strategies import STRATEGIES


def problems(parts: Any) -> Iterator[str]:
    """Refusals of the checkpoints of a Scenario, or of the parts of one, one line each."""
    checkpoint, strategy = parts.checkpoint, STRATEGIES[parts.strategy]
    if not strategy.saves:
        modelled = [name for name, other in STRATEGIES.items() if other.saves]
        yield (
            f"checkpoint: expected strategy {listed(modelled)}, found {parts.strategy}, whose "
            f"state dicts are not modelled"
        )
    if checkpoint.format == "deepspeed" and strategy.saves == "parameters":
        yield (
            f"checkpoint.format: expected sharded or consolidated with {parts.strategy}, found "
            "deepspeed, whose files hold flat buffers of ZeRO"
        )
    if checkpoint.format != "deepspeed" and strategy.saves == "engine":
        yield (
            f"checkpoint.format: expected deepspeed with {parts.strategy}, found "
            f"{checkpoint.format}; DeepSpeed writes no other"
        )
    if checkpoint.asynchronous and checkpoint.format != "sharded":
        yield (
            'checkpoint.asynchronous: expected only with format = "sharded", which torch DCP '
            f'writes so, found with "{checkpoint.format}"'
        )
    if parts.optimizer.name == "adamw8bit":
        yield "checkpoint: expected adamw or sgd, whose states are whole tensors, found adamw8bit"
    if parts.cluster.file_system is None:
        yield (
            "cluster: expected a table file_system with bandwidth, of all ranks, and "
            f"rank_bandwidth, found none in {parts.cluster.name}; name a cluster.file that has it"
        )
