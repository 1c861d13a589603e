"""DeepSpeed's ds_config.json as a scenario.

Keys, their meaning and defaults are those of DeepSpeed 0.19 (runtime/zero/config.py and others).
Where transformers' trainer fills in "auto", its own rule gives sizes of buckets from the model. Any
other "auto" is asked.
"""

from __future__ import annotations

from typing import Any

from zsim.configs.config_keys import AUTO, ConfigKeys
from zsim.configs.draft import Draft
from zsim.configs.importer import JSON_OR_YAML, Importer
from zsim.configs.importers import transformers_modules
from zsim.configs.importers.deepspeed_zero import (
    DROPPED,
    UNMODELLED,
    UNSAID,
    read_requests,
    read_zero,
)

CLIP_NORM = 1.0
"""Norm to which DeepSpeed clips by default since 0.19.3."""
DTYPES = {
    "fp32": "fp32", "float32": "fp32", "torch.float32": "fp32", "bf16": "bf16",
    "bfloat16": "bf16", "bfp16": "bf16", "torch.bfloat16": "bf16", "fp16": "fp16",
    "float16": "fp16", "half": "fp16", "torch.float16": "fp16",
}
"""Dtypes as DeepSpeed spells them, and as scenarios do."""
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "torchadam": "adamw",
              "sgd": "sgd"}


def read(config: ConfigKeys, draft: Draft) -> None:
    """Put what a ds_config says into the draft; its problems, ignored keys and assumptions go to
    the notes."""
    _batch(config, draft)
    offloads = read_zero(config.table("zero_optimization"), draft)
    _precision(config, draft)
    _optimizer(config, draft, offloads=offloads)
    _compile(config, draft)
    read_requests(config, draft)
    _ignored(config)
    config.close()


def _alone(config: ConfigKeys, draft: Draft) -> None:
    """Put a ds_config that no other config has in it, and so no trainer."""
    read(config, draft)
    transformers_modules.tell(draft)


def _batch(config: ConfigKeys, draft: Draft) -> None:
    draft.batch(
        micro=config.whole("train_micro_batch_size_per_gpu"),
        accumulation=config.whole("gradient_accumulation_steps"),
        total=config.whole("train_batch_size"), total_key="train_batch_size",
    )
    draft.ask("batch.micro_batch", 'train_micro_batch_size_per_gpu is "auto", or not there')


def _precision(config: ConfigKeys, draft: Draft) -> None:
    """Put the dtypes. Of reductions it is the model's, unless the config says another."""
    older = config.table("bfloat16")
    tables = {"bf16": config.table("bf16"), "fp16": config.table("fp16")}
    chosen = [name for name, table in tables.items()
              if not table.is_auto("enabled") and table.flag("enabled", False)]
    chosen += ["bf16"] if older.flag("enabled", False) else []
    if len(chosen) > 1:
        draft.notes.problem("fp16.enabled", "contradictory: expected one of bf16 and fp16, found "
                                            "both enabled")
    auto = [name for name, table in tables.items() if table.is_auto("enabled")]
    if auto and not chosen:
        draft.ask("precision.parameters", f'{" and ".join(auto)}: enabled is "auto"')
        dtype = draft.get("precision.parameters")
    else:
        dtype = chosen[0] if chosen else "fp32"
    draft.put("precision.parameters", dtype)
    for table in (*tables.values(), older):
        table.any("enabled")
        if draft.get("strategy.name") in ("deepspeed1", "deepspeed2"):
            draft.put("strategy.check_grad_overflow", table.flag("check_grad_overflow"))
        table.ignore("an option of stages 1 and 2", "check_grad_overflow")
        for key in ("immediate_grad_update", "bf16_master_weights_and_grads",
                    "bf16_optimizer_states", "fp16_master_weights_and_grads"):
            table.only(key, False, unmodelled="not modelled")
        table.ignore(
            "scales of the loss change no byte and no time", "loss_scale", "loss_scale_window",
            "initial_scale_power", "hysteresis", "consecutive_hysteresis", "min_loss_scale",
            "auto_cast", "check_overflow",
        )
        table.close()
    _reduction(config, draft, dtype)


def _reduction(config: ConfigKeys, draft: Draft, dtype: str | None) -> None:
    word = config.word("communication_data_type", DTYPES)
    draft.put("precision.reduce", DTYPES[word] if word else dtype)
    types = config.table("data_types")
    wide = types.word("grad_accum_dtype", DTYPES)
    if wide and dtype and DTYPES[wide] != dtype:
        draft.notes.problem(
            "data_types.grad_accum_dtype", f"expected {dtype}, the model's dtype, found {wide}; "
                                           "gradients of another dtype are not modelled"
        )
    types.close()
    autocast = config.table("torch_autocast")
    autocast.only(
        "enabled", False, unmodelled=f"DeepSpeed's autocast is not modelled, bf16 is; {DROPPED}"
    )
    autocast.ignore("an option of torch_autocast", "dtype", "lower_precision_safe_modules")
    autocast.close()
    amp = config.table("amp")
    amp.only("enabled", False, unmodelled=f"apex is not modelled; {DROPPED}")
    amp.ignore("an option of apex", "opt_level")


def _optimizer(config: ConfigKeys, draft: Draft, *, offloads: bool) -> None:
    table = config.table("optimizer")
    kind = table.text("type")
    parameters = table.table("params")
    own = config.flag("zero_force_ds_cpu_optimizer", True)
    config.ignore("a permission, no setting of the step", "zero_allow_untested_optimizer")
    if kind is None:
        draft.notes.assume("optimizer: adamw, as the config names none")
    name = OPTIMIZERS.get((kind or "adamw").lower().replace("_", ""), kind)
    draft.put("optimizer.name", name)
    fused = name == "adamw" and not parameters.flag("torch_adam", False)
    draft.put("optimizer.implementation", "fused" if fused else "foreach")
    if offloads and own and name == "adamw":
        draft.put("offload.adam", "deepspeed")
    for key, put in (("lr", "learning_rate"), ("weight_decay", "weight_decay"),
                     ("momentum", "momentum")):
        draft.put(f"optimizer.{put}", parameters.number(key))
    parameters.ignore("changes no byte and no time", "betas", "eps", "adam_w_mode",
                      "bias_correction", "amsgrad", "legacy_fusion")
    parameters.close()
    table.ignore("changes no byte and no time", "legacy_fusion")
    table.close()
    if config.is_auto("gradient_clipping"):
        config.any("gradient_clipping")
        draft.ask("optimizer.clip_norm", 'gradient_clipping is "auto"')
        return
    if "gradient_clipping" not in config:
        draft.notes.assume(f"optimizer.clip_norm = {CLIP_NORM}, DeepSpeed's default since 0.19.3")
    draft.put("optimizer.clip_norm", config.number("gradient_clipping", CLIP_NORM))


def _ignored(config: ConfigKeys) -> None:
    """Leave out what has no part in a step."""
    config.ignore(
        UNSAID, "steps_per_print", "wall_clock_breakdown", "dump_state", "checkpoint",
        "tensorboard", "wandb", "csv_monitor", "comet", "comms_logger", "flops_profiler",
        "memory_breakdown", "log_level", "load_universal_checkpoint", "monitor_config",
        "gradient_noise_scale",
    )
    config.ignore("a schedule of the learning rate", "scheduler")
    config.ignore("acts in models that call deepspeed.checkpointing, as none here does",
                  "activation_checkpointing")
    config.ignore("data is no part of a step", "dataloader_drop_last", "data_efficiency",
                  "curriculum_learning", "seed")
    config.ignore("inference, tuning and elasticity", "autotuning", "elasticity",
                  "hybrid_engine", "nebula", "zero_force_ds_cpu_initialization")
    for key, default in (
        ("prescale_gradients", False), ("gradient_predivide_factor", 1.0),
        ("sparse_gradients", False), ("disable_allgather", False), ("fp32_allreduce", False),
        ("gradient_allreduce_op", "mean"), ("managed_gradient_accumulation", True),
        ("seq_parallel_communication_data_type", "fp32"), ("disable_python_gc", False),
    ):
        config.only(key, default, unmodelled=UNMODELLED)
    for key in ("pipeline", "tensor_parallel", "sequence_parallel_size", "expert_parallel",
                "compression_training", "sparse_attention", "progressive_layer_drop", "eigenvalue",
                "quantize_training", "msamp"):
        config.only(key, None, unmodelled=UNMODELLED)


def _compile(config: ConfigKeys, draft: Draft) -> None:
    """Put torch.compile, where the config has it as older releases had; newer ones have
    DeepCompile there."""
    if "compile" not in config:
        return
    table = config.table("compile")
    if any(key in table for key in ("disable", "backend", "enabled")):
        draft.put("execution.compile", not table.flag("disable", False) or None)
    table.ignore("inductor is meant", "backend", "enabled", "kwargs")
    table.only("deepcompile", False, unmodelled="not modelled")
    table.close()


def is_config(config: dict[str, Any]) -> bool:
    """True for a table that looks like a ds_config."""
    sure = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size",
            "gradient_clipping", "zero_allow_untested_optimizer"}
    batches = [value for key, value in config.items() if key in sure]
    return bool(batches) or AUTO in (config.get("gradient_accumulation_steps"),)


IMPORTER = Importer(parsers=JSON_OR_YAML, read=_alone, is_config=is_config)
