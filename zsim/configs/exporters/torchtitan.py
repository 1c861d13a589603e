"""A scenario as torchtitan's TOML, as its releases 0.1 and 0.2 read it."""

from __future__ import annotations

from math import inf
from typing import Any

from zsim.configs.exported import Exported, Said, require_strategy
from zsim.models.families.aliases import LLAMAS
from zsim.scenario.scenario import Scenario
from zsim.scenario.tables import in_line
from zsim.strategies import STRATEGIES

RESHARDS = {"auto": "default", True: "always", False: "never"}


def write(scenario: Scenario) -> Exported:
    """The TOML; ScenarioError for a strategy that torchtitan does not have."""
    require_strategy(scenario, "torchtitan")
    keys = Said(scenario)
    tables = {
        "model": _model(scenario, keys), "training": _training(scenario, keys),
        "parallelism": _parallelism(scenario, keys),
        "activation_checkpoint": _checkpointing(scenario, keys),
        "optimizer": {
            "name": {"adamw": "AdamW", "sgd": "SGD"}[scenario.optimizer.name],
            "lr": scenario.optimizer.learning_rate,
            "weight_decay": scenario.optimizer.weight_decay,
            "implementation": scenario.optimizer.implementation,
        },
        "compile": {
            "enable": bool(scenario.execution.compile),
            **({"components": ["model"]} if scenario.execution.compile == "blocks" else {}),
        },
    }
    keys.say("optimizer", "execution.compile")
    if STRATEGIES[scenario.strategy].library == "fully_shard":
        keys.say_ends_apart("torchtitan")
    if scenario.optimizer.name == "sgd":
        keys.but("optimizer.name", "torchtitan has Adam and AdamW")
    lines = []
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {in_line(value)}" for key, value in table.items())]
    text = "\n".join(lines[1:]) + "\n"
    return Exported(kind="torchtitan", files={"": text}, unsaid=keys.unsaid())


def _model(scenario: Scenario, keys: Said) -> dict[str, Any]:
    """The name and flavor of a Llama 3; others are not torchtitan's."""
    preset = scenario.tables["model"].get("preset", "")
    for (generation, size), name in LLAMAS.items():
        if name == preset and generation == "3":
            keys.say("model.preset", "model.loss_dtype")
            if scenario.tables["model"].get("loss_dtype") != "float32":
                keys.but("model.loss_dtype", "torchtitan casts logits to float32")
            return {"name": "llama3", "flavor": f"{size}B"}
    return {"name": "llama3", "flavor": "debugmodel"}


def _training(scenario: Scenario, keys: Said) -> dict[str, Any]:
    batch, precision = scenario.batch, scenario.precision
    sharded = STRATEGIES[scenario.strategy].library == "fully_shard"
    keys.say("batch.micro_batch", "batch.accumulation", "batch.sequence_length",
             "optimizer.clip_norm", "precision.master")
    keys.say(*(("precision.parameters", "precision.reduce") if sharded
               else ("precision.autocast",)))
    compute = precision.parameters
    if not sharded:
        compute = "float32" if precision.autocast == "none" else precision.autocast
    if not scenario.optimizer.clip_norm:
        keys.but("optimizer.clip_norm", "torchtitan computes a norm at each step; inf clips none")
    table = {
        "local_batch_size": batch.micro_batch,
        "global_batch_size": batch.micro_batch * batch.accumulation * scenario.world_size,
        "seq_len": batch.sequence_length, "max_norm": scenario.optimizer.clip_norm or inf,
        "dtype": precision.stepped, "mixed_precision_param": compute,
        "mixed_precision_reduce": precision.reduce if sharded else "float32",
    }
    if STRATEGIES[scenario.strategy].offloads(scenario.options):
        table["enable_cpu_offload"] = True
    keys.say("strategy.offload")
    return table


def _parallelism(scenario: Scenario, keys: Said) -> dict[str, Any]:
    mesh = scenario.mesh
    table: dict[str, Any] = {
        "data_parallel_replicate_degree": mesh.dp_replicate,
        "data_parallel_shard_degree": mesh.dp_shard,
    }
    keys.say("strategy.name", "strategy.dp_replicate", "strategy.dp_shard")
    sharded = STRATEGIES[scenario.strategy].library == "fully_shard"
    if sharded and scenario.options.reshard_after_forward in RESHARDS:
        table["fsdp_reshard_after_forward"] = RESHARDS[scenario.options.reshard_after_forward]
        keys.say("strategy.reshard_after_forward")
    return table


def _checkpointing(scenario: Scenario, keys: Said) -> dict[str, Any]:
    checkpointing = scenario.checkpointing
    keys.say("activation_checkpointing")
    if checkpointing.mode == "none":
        return {"mode": "none"}
    if checkpointing.mode == "full" and checkpointing.every == 1:
        return {"mode": "full"}
    if checkpointing.mode == "full":
        return {"mode": "selective", "selective_ac_option": str(checkpointing.every)}
    policy = (set(checkpointing.save), checkpointing.save_every, checkpointing.every)
    if policy != ({"linear", "attention"}, 2, 1):
        keys.but("activation_checkpointing", "torchtitan keeps attention and every second product")
    return {"mode": "selective", "selective_ac_option": "op"}
