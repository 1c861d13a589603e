"""Checkpoints that a scenario's strategy does not have, or that its cluster has no files for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zsim.errors import listed
from zsim.models.saving import OF_DEEPSPEED, Checkpoint
from zsim.strategies import STRATEGIES

BY_DEFAULT = Checkpoint()

def problems(parts: Any) -> Iterator[str]:
    """Refusals of the checkpoints of a Scenario, or of the parts of one, one line each."""
    checkpoint, strategy = parts.checkpoint, STRATEGIES[parts.strategy]
    if not strategy.saves:
        modelled = [name for name, other in STRATEGIES.items() if other.saves]
        yield (
            f"checkpoint: expected strategy {listed(modelled)}, found {parts.strategy}, whose "
            f"state dicts are not modelled"
        )
    if checkpoint.format in OF_DEEPSPEED and strategy.saves == "parameters":
        yield (
            f"checkpoint.format: expected sharded or consolidated with {parts.strategy}, found "
            f"{checkpoint.format}, which is of flat buffers of ZeRO"
        )
    if checkpoint.format not in OF_DEEPSPEED and strategy.saves == "engine":
        yield (
            f"checkpoint.format: expected deepspeed or universal with {parts.strategy}, found "
            f"{checkpoint.format}; " + (
                "save_16bit_model writes weights beside these, with deepspeed3: "
                "checkpoint.gather_16bit_weights = true"
                if checkpoint.format == "consolidated" else "DeepSpeed writes no other"
            )
        )
    if parts.offload.uses_drives and (reason := _unread(checkpoint, strategy.saves)):
        yield (
            f"checkpoint.format: expected no states on drives with {checkpoint.format}, found "
            f'some: {reason}; take offload.optimizer = "cpu"'
        )
    if checkpoint.gather_16bit_weights:
        yield from _weights_problems(parts)
    if checkpoint.format == "universal":
        yield from _universal_problems(parts)
    else:
        for key in ("extract_workers", "merge_workers"):
            if getattr(checkpoint, key) != getattr(BY_DEFAULT, key):
                yield (
                    f'checkpoint.{key}: expected only with format = "universal", whose conversion '
                    f'has such processes, found with "{checkpoint.format}"'
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


def _unread(checkpoint: Checkpoint, saves: str) -> str:
    """The reason for which states on drives are refused; "" for none."""
    if checkpoint.format == "universal":
        return "ds_to_universal fails, as it looks for them in files that have none"
    if checkpoint.format == "deepspeed":
        return "" if saves == "engine" else "their files are those of deepspeed3"
    return "reads of drives before its writes are not modelled"


def _weights_problems(parts: Any) -> Iterator[str]:
    """Refusals of weights that save_16bit_model gathers by other paths, or does not gather."""
    where, strategy = "checkpoint.gather_16bit_weights: expected", STRATEGIES[parts.strategy]
    if strategy.saves != "engine" or strategy.formula.stage != "zero3":
        yield f"{where} only with deepspeed3, which gathers them, found with {parts.strategy}"
        return
    if parts.offload.parameters == "nvme":
        yield f"{where} no parameters on drives, whose reads are not modelled, found some"
    if parts.options.zero_quantized_weights or parts.options.zero_hpz_partition_size > 1:
        yield f"{where} gathers of whole shards, found zero_quantized_weights or hpZ"


def _universal_problems(parts: Any) -> Iterator[str]:
    """Refusals of what ds_to_universal of DeepSpeed 0.19.8 cannot read, or a load leaves out."""
    model, where = parts.model, "checkpoint.format: expected"
    if parts.optimizer.name != "adamw":
        yield (
            f"{where} adamw with universal, found {parts.optimizer.name}; ds_to_universal needs "
            "the moments exp_avg and exp_avg_sq"
        )
    if frozen := sum(1 for each in model.parameters if each.fqn not in model.trained):
        yield (
            f"{where} no frozen parameters with universal, found {frozen:,}, which DeepSpeed does "
            "not load from it"
        )
    if STRATEGIES[parts.strategy].reorders(parts.options):
        yield (
            f"{where} round_robin_gradients = false with universal, found true: DeepSpeed writes "
            "parameters to files of others then"
        )
