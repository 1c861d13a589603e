"""A scenario as accelerate's YAML: ranks, sharding and mixed precision.

Batch, optimizer and clipping are the script's.
"""

from __future__ import annotations

from typing import Any

from zsim.configs.exported import Exported, Said, require_strategy
from zsim.models.training_options import DTYPE_NAMES
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES

SHARDINGS = {
    ("full", False): "FULL_SHARD", ("grad_op", False): "SHARD_GRAD_OP",
    ("full", True): "HYBRID_SHARD", ("grad_op", True): "HYBRID_SHARD_ZERO2",
}
PREFETCHES = {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST", "none": "NO_PREFETCH"}


def write(scenario: Scenario) -> Exported:
    """The YAML; ScenarioError for a strategy that accelerate starts by another file."""
    require_strategy(scenario, "accelerate")
    keys, strategy = Said(scenario), STRATEGIES[scenario.strategy]
    shards = strategy.formula.stage != "ddp"
    keys.say("strategy.name", "cluster.nodes", "cluster.ranks")
    nodes = -(-scenario.world_size // scenario.cluster.devices_per_node)
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if shards else "MULTI_GPU" if scenario.world_size > 1 else "NO",
        "mixed_precision": _precision(scenario, keys),
        "num_machines": nodes, "machine_rank": 0, "num_processes": scenario.world_size,
        "main_training_function": "main",
    }
    if shards:
        config["fsdp_config"] = _plugin(scenario, keys)
    keys.say("strategy.sync")
    if scenario.batch.accumulation > 1 < scenario.world_size and scenario.sync != "last":
        keys.but("strategy.sync", "accelerate reduces after the last micro-batch")
    if strategy.asks_replicas:
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": scenario.mesh.dp_replicate,
            "parallelism_config_dp_shard_size": scenario.mesh.dp_shard,
        }
        keys.say("strategy.dp_replicate", "strategy.dp_shard")
    if not shards or scenario.mesh.dp_shard == scenario.world_size:
        keys.say("strategy.dp_shard", "strategy.dp_replicate")
    return Exported(kind="accelerate", files={"": yaml_text(config)}, unsaid=keys.unsaid())


def _precision(scenario: Scenario, keys: Said) -> str:
    precision = scenario.precision
    if STRATEGIES[scenario.strategy].formula.stage == "ddp":
        keys.say("precision.autocast")
        name = DTYPE_NAMES[precision.autocast]
    else:
        name = DTYPE_NAMES[precision.parameters]
        keys.say("precision.parameters")
        if precision.reduce == precision.parameters:
            keys.say("precision.reduce")
        else:
            keys.but("precision.reduce", f"accelerate reduces in {name} too")
    return name if name in ("bf16", "fp16") else "no"


def _plugin(scenario: Scenario, keys: Said) -> dict[str, Any]:
    """The options of FSDP 1 or 2, with units and checkpointing."""
    options, first = scenario.options, STRATEGIES[scenario.strategy].library == "fsdp1"
    plugin: dict[str, Any] = {"fsdp_version": 1 if first else 2}
    if first:
        hybrid = scenario.mesh.dp_replicate > 1
        plugin |= {
            "fsdp_sharding_strategy": SHARDINGS[options.sharding, hybrid],
            "fsdp_backward_prefetch": PREFETCHES[options.backward_prefetch],
            "fsdp_forward_prefetch": options.forward_prefetch,
            "fsdp_use_orig_params": options.use_orig_params,
        }
        keys.say("strategy.sharding", "strategy.backward_prefetch", "strategy.forward_prefetch",
                 "strategy.use_orig_params")
        if hybrid and scenario.mesh.dp_shard == scenario.cluster.devices_per_node:
            keys.say("strategy.dp_shard", "strategy.dp_replicate")
        if not options.limit_all_gathers:
            keys.but("strategy.limit_all_gathers", "accelerate limits them")
    else:
        plugin |= {
            "fsdp_reshard_after_forward": options.reshard_after_forward is not False,
            "fsdp_offload_params": options.offload,
        }
        keys.say("strategy.offload")
        if options.reshard_after_forward in ("auto", False):
            keys.say("strategy.reshard_after_forward")
        else:
            keys.but("strategy.reshard_after_forward", "accelerate keeps the root's parameters")
    whole = scenario.wrapping.every == "all"
    plugin["fsdp_auto_wrap_policy"] = "NO_WRAP" if whole else "TRANSFORMER_BASED_WRAP"
    if scenario.wrapping.every in (1, "all") and not scenario.wrapping.nested:
        keys.say("wrapping.every", "wrapping.nested")
    if first and scenario.wrapping.ends == "apart":
        keys.but("wrapping.ends", "FSDP1 has embedding, last norm and head in the root's unit")
    elif first:
        keys.say("wrapping.ends")
    else:
        keys.say_ends_apart("accelerate")
    if scenario.checkpointing.mode == "full" and scenario.checkpointing.every == 1:
        plugin["fsdp_activation_checkpointing"] = True
        keys.say("activation_checkpointing")
    return plugin


def yaml_text(table: dict[str, Any], indent: str = "") -> str:
    """YAML of nested tables of numbers, flags and plain words."""
    lines = []
    for key, value in table.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{key}:\n{yaml_text(value, indent + '  ')}")
        else:
            plain = str(value).lower() if isinstance(value, bool) else str(value)
            quoted = f"'{plain}'" if plain.lower() == "no" else plain
            lines.append(f"{indent}{key}: {quoted}\n")
    return "".join(lines)
