"""A scenario as DeepSpeed's ds_config.json.

zero1 to zero3 become DeepSpeed's stages, whose buckets and order are DeepSpeed's own.
"""

from __future__ import annotations

import json
from typing import Any

from zsim.configs.exported import Exported, Said, require_strategy
from zsim.models.training_options import DTYPE_NAMES
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES
from zsim.strategies.deepspeed_engine.options import as_config

OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD"}


def write(scenario: Scenario) -> Exported:
    """The ds_config; ScenarioError for a strategy that DeepSpeed does not have."""
    require_strategy(scenario, "deepspeed", "a ds_config")
    keys, strategy = Said(scenario), STRATEGIES[scenario.strategy]
    own = strategy.library == "deepspeed"
    batch, optimizer = scenario.batch, scenario.optimizer
    config: dict[str, Any] = {
        "train_batch_size": batch.micro_batch * batch.accumulation * scenario.world_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch,
        "gradient_accumulation_steps": batch.accumulation,
        "gradient_clipping": optimizer.clip_norm,
    }
    keys.say("batch.micro_batch", "batch.accumulation", "optimizer.clip_norm", "strategy.name")
    zero: dict[str, Any] = {"stage": strategy.formula.number}
    if own:
        options = as_config(scenario.options, scenario.model)
        check = options.pop("check_grad_overflow", True)
        zero |= options
        keys.say("strategy")
        if scenario.tables["strategy"].get("trace"):
            keys.but("strategy.trace", "the order of blocks is the model's own")
    else:
        check = True
        keys.but("strategy", f"{scenario.strategy} becomes DeepSpeed's stage {zero['stage']}, "
                             "whose buckets and order are its own")
    config["zero_optimization"] = zero
    _precision(scenario, config, keys, check=check)
    _optimizer(scenario, config, keys)
    _offload(scenario, zero, keys, config)
    if scenario.checkpoint.gather_16bit_weights:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    if scenario.execution.compile:
        keys.but("execution.compile", "call engine.compile(), which no key of DeepSpeed does")
    text = json.dumps(config, indent=2) + "\n"
    return Exported(kind="deepspeed", files={"": text}, unsaid=keys.unsaid())


def _precision(scenario: Scenario, config: dict[str, Any], keys: Said, *, check: bool) -> None:
    precision = scenario.precision
    dtype = DTYPE_NAMES[precision.parameters]
    if dtype in ("bf16", "fp16"):
        config[dtype] = {"enabled": True}
        if dtype == "bf16" and not check:
            config[dtype]["check_grad_overflow"] = False
    if precision.reduce != precision.parameters:
        config["communication_data_type"] = DTYPE_NAMES[precision.reduce]
    keys.say("precision.parameters", "precision.reduce", "precision.master")


def _optimizer(scenario: Scenario, config: dict[str, Any], keys: Said) -> None:
    optimizer = scenario.optimizer
    parameters: dict[str, Any] = {
        "lr": optimizer.learning_rate, "weight_decay": optimizer.weight_decay
    }
    if optimizer.name == "sgd":
        parameters["momentum"] = optimizer.momentum
    elif optimizer.implementation != "fused":
        parameters["torch_adam"] = True
    config["optimizer"] = {"type": OPTIMIZERS[optimizer.name], "params": parameters}
    keys.say("optimizer")
    if optimizer.implementation == "for-loop" or (
        optimizer.name == "sgd" and optimizer.implementation == "fused"
    ):
        keys.but("optimizer.implementation", "DeepSpeed takes torch's foreach")


def _offload(
    scenario: Scenario, zero: dict[str, Any], keys: Said, config: dict[str, Any]
) -> None:
    offload = scenario.offload
    for key, device in (("offload_optimizer", offload.optimizer),
                        ("offload_param", offload.parameters)):
        if device:
            zero[key] = {"device": device, "pin_memory": offload.pin_memory}
            if device == "nvme":
                zero[key]["nvme_path"] = "/local_nvme"
    if offload.parameters == "nvme":
        zero["offload_param"] |= {
            "max_in_cpu": offload.max_in_cpu, "buffer_count": offload.parameter_buffer_count,
            "buffer_size": offload.parameter_buffer_size,
        }
    if offload.optimizer == "nvme":
        zero["offload_optimizer"] |= {
            "buffer_count": offload.buffer_count, "pipeline_read": offload.pipeline_read,
            "pipeline_write": offload.pipeline_write,
        }
        requests = {"block_size": offload.block_size, "queue_depth": offload.queue_depth}
        if offload.drive_queue_nbytes:
            config["aio"] = {key: size for key, size in requests.items() if size}
    if offload.optimizer and offload.adam == "torch":
        config["zero_force_ds_cpu_optimizer"] = False
    keys.say(*(f"offload.{key}" for key in (
        "optimizer", "parameters", "pin_memory", "adam", "buffer_count", "pipeline_read",
        "pipeline_write", "block_size", "queue_depth", "max_in_cpu", "parameter_buffer_count",
        "parameter_buffer_size",
    )))
