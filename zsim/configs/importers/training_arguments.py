"""transformers' TrainingArguments (JSON or YAML, as scripts of trl and others take them).

`fsdp` and `fsdp_config` choose FSDP, `deepspeed` names a ds_config. Neither is DDP, or on one
process a plain module. Source: transformers 5.24, training_args.py; accelerate 1.15,
accelerator.py (multi_device).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.configs.config_keys import AUTO, TRUE, ConfigKeys
from zsim.configs.draft import Draft
from zsim.configs.importer import JSON_OR_YAML, Importer
from zsim.configs.importers import (
    accelerate,
    deepspeed,
    fsdp_plugin,
    training_scripts,
    transformers_modules,
)
from zsim.errors import listed

MAX_NORM = 1.0
AXOLOTL, LLAMA_FACTORY = "base_model", "cutoff_len"
"""Keys by which the configs of these two are known."""
LOADED = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16"}
"""Dtypes of dtype and torch_dtype that are not float32."""
FUSED = ("adamw_torch_fused", "adamw_apex_fused")
OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_apex_fused": "adamw",
    "adamw_hf": "adamw", "adamw_torch_8bit": "adamw8bit",
}
"""The optimizer by its name in `optim`, where the scenario names it otherwise."""
MODELLED = ("adamw", "adamw8bit", "sgd")
LENGTHS = ("max_length", "max_seq_length", "sequence_len", "cutoff_len", "model_max_length",
           "block_size")
"""Keys of scripts over transformers for the tokens of a sequence."""
SHARDINGS = {
    "full_shard": "FULL_SHARD", "shard_grad_op": "SHARD_GRAD_OP", "no_shard": "NO_SHARD",
    "hybrid_shard": "HYBRID_SHARD", "hybrid_shard_zero2": "HYBRID_SHARD_ZERO2",
}
FIND_UNUSED = "strategy.find_unused_parameters"
BATCHES = ("per_device_train_batch_size", "micro_batch_size")
NO_STEP = (
    "accelerator_config", "adam_beta1", "adam_beta2", "adam_eps*",
    "average_tokens_across_devices", "bf16_full_eval", "data_seed", "dataloader_*",
    "ddp_backend", "ddp_broadcast_buffers", "ddp_timeout", "debug", "disable_tqdm", "do_*",
    "eval_*", "evaluation_strategy", "fp16_full_eval", "full_determinism", "greater_is_better",
    "group_by_length", "hub_*", "ignore_data_skip", "include_num_input_tokens_seen",
    "include_tokens_per_second", "label_names", "label_smoothing_factor", "length_column_name",
    "load_best_model_at_end", "local_rank", "log_level*", "log_on_each_node", "logging_*",
    "lr_scheduler*", "max_steps", "metric_for_best_model", "num_epochs", "num_train_epochs",
    "optim_args", "output_dir", "overwrite_output_dir", "per_device_eval_batch_size",
    "prediction_loss_only", "project", "push_to_hub", "remove_unused_columns", "report_to",
    "resume_from_checkpoint", "run_name", "save_*", "seed", "skip_memory_metrics",
    "torch_empty_cache_steps", "use_cache", "use_cpu", "warmup_*",
)
"""Shell-style patterns of arguments that change neither the bytes nor the time of a step."""


def read(config: ConfigKeys, draft: Draft) -> None:
    """Put what TrainingArguments say into the draft; problems, ignored keys and assumptions go to
    the notes."""
    axolotl = AXOLOTL in config
    training_scripts.name_model(config, draft)  # units and bucket sizes go by it
    precision, loaded = _precision(config, draft, axolotl=axolotl)
    key = next((key for key in BATCHES if key in config), BATCHES[0])
    micro, accumulation = config.whole(key), config.whole("gradient_accumulation_steps", 1)
    clip = config.number("max_grad_norm", MAX_NORM)
    zero, options = config.any("deepspeed"), _options(config.any("fsdp"))
    plugin, version = config.any("fsdp_config"), config.whole("fsdp_version", 1 if axolotl
                                                             else 2) or 2
    table = zero if isinstance(zero, dict) else accelerate.named(str(zero), draft) if zero else {}
    _optimizer(config, draft, own="optimizer" not in table, deepspeed=bool(zero))
    _rest(config, draft)
    draft.processes(config.whole("num_processes"), key="num_processes")
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
            fsdp_plugin.read(_plugin(plugin or {}, options, draft, version=version), draft,
                             version=version, policy="TRANSFORMER_BASED_WRAP",
                             replicas=config.whole("dp_replicate_size", 1) or 1)
            draft.put("strategy.dp_shard", config.whole("dp_shard_size"))
            accelerate.sharded_precision(draft, precision)
        else:
            _replicated(config, draft, axolotl=axolotl)
            accelerate.replicated_precision(draft, precision)
        if not _syncs_each(config):
            accelerate.reduce_last(draft)
        if loaded and not ((plugin or options) and precision != "no"):
            draft.tables["precision"] = {"parameters": loaded, "reduce": loaded, "master": False}
            draft.notes.assume(f"parameters and states of the optimizer are {loaded}, as the model "
                               "is loaded; the autocast around it is not modelled")
    transformers_modules.put(draft)
    training_scripts.read(config, draft)
    config.ignore("changes no byte and no time of a step", *NO_STEP, *training_scripts.NO_STEP)
    config.close()


def _syncs_each(config: ConfigKeys) -> bool:
    """True where gradients are reduced after each micro-batch, as `accelerator_config` asks."""
    accelerator = config.table("accelerator_config")
    accumulation = accelerator.table("gradient_accumulation_kwargs")
    each = accumulation.flag("sync_each_batch", False)
    for table in (accumulation, accelerator):
        table.ignore("changes no byte and no time of a step", *table.left)
    return bool(each)


def _replicated(config: ConfigKeys, draft: Draft, *, axolotl: bool) -> None:
    """Put DDP and its options, which a plain module on one process does not read.

    The Trainer has DDP look for unused parameters where no block is checkpointed, axolotl never.
    """
    draft.put("strategy.name", draft.replicated)
    if draft.world == 1:
        config.ignore("one process has no DDP", "ddp_bucket_cap_mb", "ddp_find_unused_parameters")
        return
    draft.put("strategy.bucket_cap_mb", config.number("ddp_bucket_cap_mb"))
    unused = config.flag("ddp_find_unused_parameters")
    if unused is None and draft.get(FIND_UNUSED) is None:
        unused = not axolotl and draft.get("activation_checkpointing.mode") in (None, "none")
        draft.notes.assume(f"{FIND_UNUSED} = {str(unused).lower()}, as "
                           f"{'axolotl' if axolotl else 'the Trainer'} has it by default")
    draft.put(FIND_UNUSED, unused)


def _precision(config: ConfigKeys, draft: Draft, *, axolotl: bool) -> tuple[str, str | None]:
    """The dtype of mixed precision, and the one in which the model is loaded, if not float32.
    axolotl loads it in that of mixed precision, LLaMA-Factory in float32 but for pure_bf16."""
    flags = {key: config.any(key) for key in ("bf16", "bfloat16", "fp16")}
    if AUTO in flags.values():
        draft.notes.assume("bf16 is auto: true, as on GPUs from A100 on")
        flags["bf16"] = True
    bf16, fp16 = (_is_true(flags, *keys) for keys in (("bf16", "bfloat16"), ("fp16",)))
    if bf16 and fp16:
        draft.notes.problem("fp16", "contradictory: expected one of bf16 and fp16, found both")
    precision = "bf16" if bf16 else "fp16" if fp16 else "no"
    dtypes = [LOADED.get(str(config.any(key)).removeprefix("torch.")) for key in ("dtype",
                                                                                 "torch_dtype")]
    loaded = next((dtype for dtype in dtypes if dtype), None)
    if config.flag("pure_bf16", False):
        return "no", "bf16"
    if LLAMA_FACTORY in config:
        return precision, None
    return precision, precision if axolotl and precision != "no" else loaded


def _is_true(flags: Mapping[str, Any], *keys: str) -> bool:
    return any(str(flags[key]).lower() in TRUE for key in keys)


def _options(value: Any) -> list[str]:
    """The words of `fsdp`; of true alone the default, full_shard."""
    if isinstance(value, list):
        value = " ".join(map(str, value))
    options = str(value or "").lower().replace(",", " ").split()
    return ["full_shard" if option == "true" else option for option in options
            if option != "false"]


def _plugin(table: Any, options: list[str], draft: Draft, *, version: int) -> ConfigKeys:
    """The keys of fsdp_config, and what `fsdp` says in words, for those that are not there."""
    if not isinstance(table, dict):
        draft.notes.problem("fsdp_config", "expected a table; put the file's content in its place")
        table = {}
    bare = {str(key).removeprefix("fsdp_"): value for key, value in table.items()}
    first = str(bare.get("version", version)) == "1"
    for option in options:
        if option in SHARDINGS:
            key = "sharding_strategy" if first else "reshard_after_forward"
            bare.setdefault(key, SHARDINGS[option] if first else "grad_op" not in option)
        elif option == "offload":
            bare.setdefault("offload_params", True)
        elif option != "auto_wrap":
            able = listed((*SHARDINGS, "auto_wrap", "offload"), "and")
            draft.notes.problem("fsdp", f"expected some of {able}, found {option[:40]}")
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
    key = "optimizer" if "optimizer" in config else "optim"
    optim = config.text(key, "adamw_torch_fused") or ""
    rate, decay = config.number("learning_rate"), config.number("weight_decay", 0.0)
    name = OPTIMIZERS.get(optim, optim)
    draft.put("optimizer.learning_rate", rate)
    draft.put("optimizer.weight_decay", decay)
    if deepspeed:
        if own and name != "adamw":
            draft.notes.problem(key, f"expected adamw_torch beside deepspeed, found {optim[:40]}, "
                                     f"which is not modelled there; --drop {key} for AdamW")
        return
    if name not in MODELLED:
        draft.notes.problem(key, f"expected torch's AdamW or SGD, or torchao's AdamW of 8 bits, "
                                 f"found {optim[:40]}; --drop {key} for AdamW, of 8 bits with "
                                 "--set optimizer.name=adamw8bit")
    if "optimizer.name" not in draft.answers.settings:
        draft.put("optimizer.name", name)
        draft.put("optimizer.implementation", "fused" if optim in FUSED else "foreach")


def _rest(config: ConfigKeys, draft: Draft) -> None:
    """Put checkpointing, compilation and sequence length."""
    keys = ("gradient_checkpointing", "activation_checkpointing")
    flags = [config.flag(key, False) for key in keys]
    if LLAMA_FACTORY in config and not config.flag("disable_gradient_checkpointing", False):
        draft.notes.assume("every block is checkpointed, LLaMA-Factory's default")
        flags.append(True)
    if any(flags):
        draft.put("activation_checkpointing.mode", "full")
    config.ignore("every block is checkpointed whole, without reentrance",
                  *(f"{key}_kwargs" for key in keys))
    draft.put("execution.compile", config.flag("torch_compile") or None)
    config.ignore("inductor is meant", "torch_compile_backend", "torch_compile_mode")
    if config.flag("tf32", False):
        draft.put("execution.float32_products", "tf32")
    lengths = [config.whole(key) for key in LENGTHS if key in config]
    draft.put("batch.sequence_length", next(iter(lengths), None))


def is_config(config: dict[str, Any]) -> bool:
    """True for a table that looks like TrainingArguments."""
    own = any(key in config for key in ("per_device_train_batch_size", "fsdp_config", AXOLOTL))
    return own and "distributed_type" not in config


IMPORTER = Importer(parsers=JSON_OR_YAML, read=read, is_config=is_config)
