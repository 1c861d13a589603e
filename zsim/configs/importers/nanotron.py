"""nanotron's YAML as a scenario: a Llama, data parallel, with ZeRO-1 or without.

Any zero_stage above 0 is ZeRO-1 there. Gradients are added up in fp32 and reduced once a step, and
the loss is made of single calls. Source: nanotron 0.4, config/.
"""

from __future__ import annotations

from typing import Any

from zsim.configs.config_keys import MODEL_PARALLEL, ConfigKeys
from zsim.configs.draft import Draft
from zsim.configs.importer import JSON_OR_YAML, Importer
from zsim.errors import listed

DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16",
          "float32": "fp32", "fp32": "fp32", "float": "fp32"}
DATA = "data, logs and checkpoints are no part of a step"
MIB = 1 << 20


def read(config: ConfigKeys, draft: Draft) -> None:
    """Put what a nanotron config says into the draft; its problems, ignored keys and assumptions go
    to the notes."""
    _parallelism(config.table("parallelism"), draft)
    tokens = config.table("tokens")
    draft.batch(
        micro=tokens.whole("micro_batch_size"),
        accumulation=tokens.whole("batch_accumulation_per_replica"),
    )
    draft.put("batch.sequence_length", tokens.whole("sequence_length"))
    tokens.ignore(DATA, "train_steps", "val_check_interval", "limit_val_batches",
                  "limit_test_batches")
    tokens.close()
    optimizer = config.table("optimizer")
    sharded = bool(optimizer.whole("zero_stage", 0))
    wide = optimizer.flag("accumulate_grad_in_fp32", True)
    _optimizer(optimizer, draft)
    _model(config.table("model"), draft, sharded=sharded, wide=bool(wide))
    config.ignore(DATA, "benchmark_csv_path", "checkpoints", "data", "data_stages", "general",
                  "lighteval", "logging", "profiler", "tokenizer", "s3_upload", "metrics_logging",
                  "kill_switch_path", "experiment_logger", "validation", "wandb")
    config.close()


def _parallelism(table: ConfigKeys, draft: Draft) -> None:
    """Put the ranks, each of which has to hold the whole model."""
    ranks = table.whole("dp", 1)
    for axis in ("tp", "pp"):
        table.only(axis, 1, unmodelled=MODEL_PARALLEL)
    for axis in ("expert_parallel_size", "context_parallel_size"):
        table.only(axis, 1, unmodelled="not modelled")
    table.only("recompute_layer", False, unmodelled="give it as activation_checkpointing.mode")
    table.only("recompute_granularity", "SELECTIVE",
               unmodelled="give it as activation_checkpointing.mode")
    table.ignore("an option of tensor or pipeline parallelism", "tp_mode", "pp_engine",
                 "tp_linear_async_communication", "tp_recompute_allgather",
                 "use_fsdp_or_zero_for_tp")
    table.ignore("changes nothing without experts", "moe_layer_recompute",
                 "expert_tensor_parallel_size", "expert_data_parallel_size",
                 "enabled_moe")
    table.close()
    draft.processes(ranks, key="parallelism.dp")


def _optimizer(table: ConfigKeys, draft: Draft) -> None:
    clip = table.number("clip_grad", 0.0)
    draft.put("optimizer.clip_norm", clip)
    draft.put("optimizer.weight_decay", table.number("weight_decay"))
    factory = table.table("optimizer_factory")
    source = table if "torch_adam_is_fused" in table else factory
    fused = source.flag("torch_adam_is_fused", True)
    name = factory.text("name", "adamW") or "adamW"
    draft.put("optimizer.name", name.lower())
    draft.put("optimizer.implementation", "fused" if fused else "foreach")
    for keys in (table, factory):
        keys.ignore("changes no byte and no time", "adam_beta1", "adam_beta2", "adam_eps",
                    "weight_decay_exclude_named_params", "finetuning_lr")
    schedule = table.table("learning_rate_scheduler")
    draft.put("optimizer.learning_rate", schedule.number("learning_rate"))
    schedule.ignore("a schedule of the learning rate", "lr_decay_starting_step", "lr_decay_steps",
                    "lr_decay_style", "lr_warmup_steps", "lr_warmup_style", "min_decay_lr")
    schedule.close()
    factory.close()
    table.close()


def _model(table: ConfigKeys, draft: Draft, *, sharded: bool, wide: bool) -> None:
    """Put the model's sizes and dtypes, and the strategy in these dtypes."""
    dtype_text = table.text("dtype", "float32") or "float32"
    if dtype_text not in DTYPES:
        draft.notes.problem("model.dtype", f"expected {listed(DTYPES)}, found "
                                           f"{dtype_text[:40]}")
    dtype = DTYPES.get(dtype_text, "fp32")
    draft.put("precision.parameters", dtype)
    draft.put("precision.reduce", "fp32" if wide else dtype)
    bucket = table.number("ddp_bucket_cap_mb", 25)
    if sharded:
        draft.put("strategy.name", "zero1")
        draft.put("strategy.granularity", f"{int((bucket or 25) * MIB)} B")
        draft.notes.assume("zero_stage above 0 is ZeRO-1 in nanotron")
    else:
        draft.put("strategy.name", "ddp")
        draft.put("strategy.bucket_cap_mb", bucket)
        draft.put("strategy.gradient_as_bucket_view", True)
    draft.put("strategy.sync", "last")
    if wide:
        draft.put("execution.accumulation", "fp32")
    draft.put("execution.loss", "composite")
    multiple = table.whole("make_vocab_size_divisible_by", 1) or 1
    _sizes(table.table("model_config"), draft, multiple=multiple)
    table.ignore("initial values change no byte and no time", "init_method")
    table.close()


def _sizes(table: ConfigKeys, draft: Draft, *, multiple: int) -> None:
    """Put the sizes of a Llama, or ask for another model."""
    llama = table.flag("is_llama_config", False)
    qwen = table.flag("is_qwen2_config", False)
    sizes: dict[str, Any] = {
        "num_layers": table.whole("num_hidden_layers"), "hidden_size": table.whole("hidden_size"),
        "num_heads": table.whole("num_attention_heads"),
        "num_kv_heads": table.whole("num_key_value_heads"),
        "feed_forward": table.whole("intermediate_size"), "vocabulary": table.whole("vocab_size"),
        "tied": table.flag("tie_word_embeddings", False), "loss_dtype": "float32",
    }
    vocabulary = sizes["vocabulary"]
    if vocabulary:
        sizes["vocabulary"] = -(-vocabulary // multiple) * multiple
    if qwen:
        sizes["qkv_bias"] = True
    experts = table.any("moe_config")
    if experts and not draft.answers.model:
        draft.notes.problem("model.model_config.moe_config", "expected none, found experts, which "
                                                             "are not modelled")
    elif llama or qwen:
        draft.put_model(
            {"family": "llama", "sizes": {k: v for k, v in sizes.items() if v is not None}},
            "model.model_config",
        )
    table.ignore(
        "changes no byte and no time", "bos_token_id", "eos_token_id", "pad_token_id",
        "hidden_act", "initializer_range", "max_position_embeddings", "pretraining_tp",
        "rms_norm_eps", "rope_scaling", "rope_theta", "rope_interleaved", "use_cache",
        "rope_seq_len_interpolation_factor", "attention_bias", "_attn_implementation",
        "_fused_rms_norm", "_fused_rotary_emb", "_use_doc_masking", "_use_qkv_packed",
        "log_attn_probs", "sliding_window_size", "use_sliding_window", "interleaved_rotary",
        "z_loss_enabled", "z_loss_coefficient", "no_rope_layer", "flex_attention_mask",
        "ring_attn_heads_k_stride",
    )
    other = next((key for key in table.left if key.startswith("is_") and table.any(key)), None)
    if not (llama or qwen) and not draft.answers.model:
        draft.notes.problem(
            f"model.model_config.{other or 'is_llama_config'}",
            f"expected is_llama_config or is_qwen2_config, found {other or 'neither'}; give "
            "--model",
        )
    if not (llama or qwen):
        table.ignore("of a model that --model names", *table.left)
    table.close()


def is_config(config: dict[str, Any]) -> bool:
    """True for a table that looks like nanotron's."""
    return "parallelism" in config and "tokens" in config


IMPORTER = Importer(parsers=JSON_OR_YAML, read=read, is_config=is_config)
