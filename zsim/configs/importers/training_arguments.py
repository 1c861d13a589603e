"""transformers' TrainingArguments (JSON or YAML, as scripts of trl and others take them).

`fsdp` and `fsdp_config` choose FSDP, `deepspeed` names a ds_config, neither is DDP. Source:
transformers 5.24, training_args.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.configs.config_keys import AUTO, ConfigKeys
from zsim.configs.draft import Draft
from zsim.configs.importers import accelerate, deepspeed, fsdp_plugin

MAX_NORM = 1.0
FUSED = ("adamw_torch_fused", "adamw_apex_fused")
OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_apex_fused": "adamw",
    "adamw_hf": "adamw", "adamw_torch_8bit": "adamw8bit",
}
"""The optimizer by its name in `optim`, where the scenario names it otherwise."""
LENGTHS = ("max_length", "max_seq_length", "sequence_len", "cutoff_len", "model_max_length",
           "block_size")
"""Keys of scripts over transformers for the tokens of a sequence."""
SHARDINGS = {
    "full_shard": "FULL_SHARD", "shard_grad_op": "SHARD_GRAD_OP", "no_shard": "NO_SHARD",
    "hybrid_shard": "HYBRID_SHARD", "hybrid_shard_zero2": "HYBRID_SHARD_ZERO2",
}
BATCHES = ("per_device_train_batch_size", "micro_batch_size")
GENERATION = ("num_generations", "max_completion_length")
NO_STEP = (
    "output_dir", "overwrite_output_dir", "num_train_epochs", "num_epochs", "max_steps",
    "lr_scheduler_type", "lr_scheduler_kwargs", "lr_scheduler", "warmup_steps", "warmup_ratio",
    "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "label_smoothing_factor",
    "average_tokens_across_devices", "bf16_full_eval", "fp16_full_eval", "use_cache",
    "torch_empty_cache_steps", "logging_strategy", "logging_steps", "logging_dir",
    "logging_first_step", "log_on_each_node", "logging_nan_inf_filter",
    "include_num_input_tokens_seen", "include_tokens_per_second", "log_level",
    "log_level_replica", "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id",
    "eval_strategy", "evaluation_strategy", "do_eval", "do_train", "do_predict", "eval_steps",
    "eval_delay", "per_device_eval_batch_size", "prediction_loss_only", "eval_on_start",
    "save_only_model", "save_strategy", "save_steps", "save_on_each_node", "save_total_limit",
    "save_safetensors", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id",
    "hub_strategy", "hub_always_push", "hub_revision", "load_best_model_at_end",
    "metric_for_best_model", "greater_is_better", "ignore_data_skip", "seed", "data_seed",
    "full_determinism", "accelerator_config", "dataloader_drop_last", "dataloader_num_workers",
    "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
    "remove_unused_columns", "label_names", "group_by_length", "length_column_name",
    "ddp_broadcast_buffers", "ddp_backend", "ddp_timeout", "debug", "skip_memory_metrics",
    "resume_from_checkpoint", "local_rank", "use_cpu", "model_name_or_path", "model_revision",
    "torch_dtype", "dtype", "trust_remote_code", "dataset_name", "dataset_config",
    "dataset_configs", "dataset_mixer", "dataset_mixture", "packing_strategy",
    "attn_implementation", "dataset_splits", "dataset_train_split",
    "dataset_test_split", "dataset_kwargs", "dataset_num_proc", "preprocessing_num_workers",
    "chat_template", "loss_type", "max_prompt_length", "log_evals", "seed_worker",
    "eos_token", "pad_token", "packing", "dataset_text_field", "completion_only_loss",
    "assistant_only_loss", "precompute_ref_log_probs", "use_flash_attention_2", "rope_scaling",
    "dataset", "dataset_dir", "eval_dataset", "template", "max_samples", "val_size",
    "overwrite_cache", "plot_loss", "include_mfu", "mask_history", "flash_attn", "attn",
    "log_completions", "tokenized_path", "enable_thinking",
)
"""Arguments that change neither the bytes nor the time of a step."""


def read(config: ConfigKeys, draft: Draft) -> None:
    """Put what TrainingArguments say into the draft; problems, ignored keys and assumptions go to
    the notes."""
    bf16, fp16 = config.flag("bf16", False), config.flag("fp16", False)
    if bf16 and fp16:
        draft.notes.problem("fp16", "contradictory: expected one of bf16 and fp16, found both")
    precision = "bf16" if bf16 else "fp16" if fp16 else "no"
    key = next((key for key in BATCHES if key in config), BATCHES[0])
    micro, accumulation = config.whole(key), config.whole("gradient_accumulation_steps", 1)
    clip = config.number("max_grad_norm", MAX_NORM)
    zero, options = config.any("deepspeed"), _options(config.any("fsdp"))
    plugin = config.any("fsdp_config")
    table = zero if isinstance(zero, dict) else accelerate.named(str(zero), draft) if zero else {}
    _optimizer(config, draft, own="optimizer" not in table, deepspeed=bool(zero))
    if zero:
        filled = _filled(table, {
            "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation,
            "gradient_clipping": clip,
        }, precision)
        deepspeed.read(ConfigKeys(filled, draft.notes, "deepspeed."), draft)
    else:
        draft.batch(micro=micro, accumulation=accumulation)
        draft.put("optimizer.clip_norm", clip)
        if plugin or options:
            fsdp_plugin.read(_plugin(plugin or {}, options, draft), draft, version=2,
                             policy="TRANSFORMER_BASED_WRAP")
            accelerate.sharded_precision(draft, precision)
        else:
            draft.put("strategy.name", "ddp")
            draft.put("strategy.bucket_cap_mb", config.number("ddp_bucket_cap_mb"))
            draft.put("strategy.find_unused_parameters",
                      config.flag("ddp_find_unused_parameters"))
            accelerate.replicated_precision(draft, precision)
    _rest(config, draft)
    config.ignore("it changes no byte and no time of a step", *NO_STEP)
    config.close()


def _options(said: Any) -> list[str]:
    """The words of `fsdp`; of true alone the default, full_shard."""
    if isinstance(said, list):
        said = " ".join(map(str, said))
    options = str(said or "").lower().replace(",", " ").split()
    return ["full_shard" if option == "true" else option for option in options
            if option != "false"]


def _plugin(table: Any, options: list[str], draft: Draft) -> ConfigKeys:
    """The keys of fsdp_config, and what `fsdp` says in words, for those that are not there."""
    if not isinstance(table, dict):
        draft.notes.problem("fsdp_config", "expected a table; put the file's content in its place")
        table = {}
    bare = {str(key).removeprefix("fsdp_"): value for key, value in table.items()}
    first = str(bare.get("version", 2)) == "1"
    for option in options:
        if option in SHARDINGS:
            key = "sharding_strategy" if first else "reshard_after_forward"
            bare.setdefault(key, SHARDINGS[option] if first else "grad_op" not in option)
        elif option == "offload":
            bare.setdefault("offload_params", True)
        elif option != "auto_wrap":
            draft.notes.problem(
                "fsdp", f"expected some of {', '.join(SHARDINGS)}, auto_wrap, offload, found "
                        f"{option[:40]}"
            )
    if first:
        bare.setdefault("use_orig_params", True)
    return ConfigKeys(bare, draft.notes, "fsdp_config.")


def _filled(table: Mapping[str, Any], values: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """A ds_config with the trainer's values where it has "auto"."""
    filled = dict(table)
    for key, value in values.items():
        if filled.get(key) == AUTO and value is not None:
            filled[key] = value
    for dtype in ("bf16", "fp16"):
        inner = filled.get(dtype)
        if isinstance(inner, dict) and inner.get("enabled") == AUTO:
            filled[dtype] = {**inner, "enabled": precision == dtype}
    return filled


def _optimizer(config: ConfigKeys, draft: Draft, *, own: bool, deepspeed: bool) -> None:
    """Put the optimizer of `optim`, unless a ds_config names its `own`. With DeepSpeed any but
    AdamW is refused, whose states its stages would divide otherwise."""
    said = config.text("optim", config.text("optimizer", "adamw_torch_fused")) or ""
    rate, decay = config.number("learning_rate"), config.number("weight_decay", 0.0)
    name = OPTIMIZERS.get(said, said)
    if deepspeed:
        if own and name != "adamw":
            draft.notes.problem("optim", f"expected adamw_torch beside deepspeed, found "
                                         f"{said[:40]}; it is not modelled there")
        return
    draft.put("optimizer.name", name)
    draft.put("optimizer.implementation", "fused" if said in FUSED else "foreach")
    draft.put("optimizer.learning_rate", rate)
    draft.put("optimizer.weight_decay", decay)


def _rest(config: ConfigKeys, draft: Draft) -> None:
    """Put checkpointing, compilation and sequence length; refuse what is not modelled."""
    keys = ("gradient_checkpointing", "activation_checkpointing")
    asked = [config.flag(key, False) for key in keys]
    if any(asked):
        draft.put("activation_checkpointing.mode", "full")
    config.ignore("every block is checkpointed whole, without reentrance",
                  *(f"{key}_kwargs" for key in keys))
    draft.put("execution.compile", config.flag("torch_compile") or None)
    config.ignore("inductor is meant", "torch_compile_backend", "torch_compile_mode")
    if config.flag("tf32", False):
        draft.put("execution.float32_products", "tf32")
    lengths = [config.whole(key) for key in LENGTHS if key in config]
    draft.put("batch.sequence_length", next(iter(lengths), None))
    for key in ("use_liger_kernel", "use_liger", "enable_liger_kernel", "use_peft",
                "load_in_4bit", "load_in_8bit", "auto_find_batch_size", "neftune_noise_alpha",
                "parallelism_config", "pure_bf16"):
        config.only(key, False, unmodelled="zsim does not model it; --drop leaves it out")
    config.only("finetuning_type", "full", unmodelled="adapters are frozen in a scenario; --drop "
                                                      "leaves it out")
    if config.text("stage", "sft") not in ("sft", "pt"):
        draft.notes.problem("stage", "expected sft or pt, found another; training by preferences "
                                     "has a second model, which is not modelled")
    generation = [key for key in config.left if "vllm" in key or key in GENERATION]
    if generation:
        draft.notes.problem(generation[0], "expected none, found some; reinforcement learning "
                                           "generates text, which is not modelled")
        config.ignore("an option of generation", *generation)
    draft.processes(config.whole("num_processes"), key="num_processes")
    config.only("beta", None, unmodelled="training by preferences has a second model, which is "
                                         "not modelled; --drop leaves it out")
    config.ignore("an option of what is off", "liger_kernel_config", "ddp_static_graph",
                  "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")


def is_config(config: dict[str, Any]) -> bool:
    """True for a table that looks like TrainingArguments."""
    own = "per_device_train_batch_size" in config or "fsdp_config" in config
    return own and "distributed_type" not in config
