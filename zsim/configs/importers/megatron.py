"""Megatron-LM's arguments as a scenario: of a shell script, or a YAML or JSON table of them.

With use_distributed_optimizer they are ZeRO-1, else DDP, both with gradients in float32 unless they
are reduced in bf16. Of a model there is a GPT or a Llama. Source: Megatron-LM's
training/arguments.py and core/distributed/distributed_data_parallel.py.
"""

from __future__ import annotations

from typing import Any

from zsim.configs.config_keys import MODEL_PARALLEL, ConfigKeys
from zsim.configs.draft import Draft
from zsim.configs.importer import Importer
from zsim.configs.scripts.argument_text import (
    SCRIPT,
    UNDECIDED,
    json_arguments,
    shell_config,
    yaml_arguments,
)

MIB = 1 << 20
BUCKET = 40_000_000
"""Elements of a gradient bucket that is reduced within backward."""
EACH = 1_000_000
"""Elements of such a bucket for each data-parallel rank, where that is more."""
PADDING = 128
"""Multiple to which the vocabulary is padded."""
GPT2_VOCABULARY, VOCABULARY = 50_257, "model.sizes.vocabulary"
OTHER_MODELS = ("bert", "ict", "mamba", "mimo", "retro", "t5", "vision_classify",
                "vision_dino", "vision_inpaint", "vlm")
"""Megatron's scripts, by their names after pretrain_, of models whose arguments mean others."""
NO_STEP = (
    "*_dir", "*_file", "*_interval", "*_iter", "*_iters", "*_path", "*_samples", "*_seed",
    "adam_*", "align_param*", "allow_run_as_root", "apply_layernorm_1p", "apply_query_key*",
    "async_save", "attention_backend", "attention_softmax_in_fp32", "auto_detect_ckpt*", "bert_*",
    "bias_*", "bind_to",
    "calculate_per_token_loss", "check_*", "ckpt_*", "cuda_graph*", "data_*", "dataloader_*",
    "decoder_*", "decoupled_*", "defer_embedding*", "deterministic_mode", "dist_ckpt*",
    "distributed_*", "empty_unused_memory*", "enable_experimental", "enable_one_logger",
    "encoder_*", "end_weight_decay", "eod_mask_loss", "eval*", "exit_*", "finetune", "fp8_amax*",
    "fp8_interval", "fp8_margin", "hysteresis", "init_method*", "initial_loss_scale",
    "layernorm_epsilon", "load", "local_rank", "log_*", "loss_scale*", "lr_*", "manual_gc*",
    "masked_softmax_fusion", "master_addr", "master_port", "max_position_embeddings",
    "min_loss_scale", "min_lr", "mock_data", "nccl_*", "no_async_tensor*", "no_bias_*",
    "no_create_attention*", "no_gradient*", "no_load_*", "no_masked*", "no_mmap*",
    "no_overlap_p2p*", "no_persist*", "no_position_embedding", "no_python", "no_rope_fusion",
    "no_save_*", "node_rank", "norm_epsilon",
    "num_dataset*", "num_workers", "one_logger*", "optimizer_*_state*", "overlap_p2p*",
    "override_*", "packed*", "per_split*", "position_embedding_type", "profile*", "rampup_*",
    "rdzv*", "reset_*", "rotary_*", "save", "seed", "sequence_parallel", "sgd_momentum", "split",
    "start_weight_decay", "straggler*", "te_rng*", "tee", "tensorboard_*", "tiktoken*",
    "timing_*", "tokenizer_*", "tp_comm*", "train_*", "transformer_impl", "use_checkpoint*",
    "use_contiguous*", "use_cpu_initialization", "use_dist_ckpt", "use_flash_attn*",
    "use_legacy_models", "use_mcore_models", "use_persistent*", "use_pytorch_profiler",
    "use_rope_scaling", "use_rotary*", "vocab_extra_ids", "wandb*", "weight_decay_incr*",
)
"""Shell-style patterns of arguments that change no step, or only with an argument that is read."""


def read(config: ConfigKeys, draft: Draft) -> None:
    """Put what Megatron's arguments say into the draft; problems, ignored keys and assumptions go
    to the notes."""
    if undecided := config.any(UNDECIDED):
        draft.notes.assume(f"arguments of both branches of {'; '.join(undecided)[:200]}, which "
                           "nothing here decides; --set NAME=… gives a variable a value")
    _parallelism(config, draft)
    _batch(config, draft)
    wide = _precision(config, draft)
    _strategy(config, draft, wide=wide)
    _optimizer(config, draft)
    _recomputation(config, draft)
    _model(config, draft)
    config.ignore("changes no byte and no time of a step", *NO_STEP)
    config.close()


def _parallelism(config: ConfigKeys, draft: Draft) -> None:
    """Put the ranks, each of which has to hold the whole model."""
    for key in ("tensor_model_parallel_size", "model_parallel_size",
                "pipeline_model_parallel_size"):
        config.only(key, 1, unmodelled=MODEL_PARALLEL)
    for key in ("context_parallel_size", "expert_model_parallel_size", "num_experts",
                "expert_tensor_parallel_size", "num_distributed_optimizer_instances"):
        config.only(key, 1, unmodelled="not modelled")
    for key in ("moe_grouped_gemm", "multi_latent_attention", "mtp_num_layers"):
        config.only(key, None, unmodelled="not modelled")
    config.ignore("an option of pipeline parallelism",
                  "num_layers_per_virtual_pipeline_stage", "no_pipeline_parallel",
                  "num_virtual_stages_per_pipeline_rank")
    config.ignore("an option of experts", "*moe_*")
    config.only("deepspeed", False, unmodelled="the strategy is in its ds_config.json, which "
                                               "zsim import reads; --drop leaves it out")
    config.ignore("an option of DeepSpeed", "deepspeed_*", "zero_stage")
    each, nodes = (
        next(filter(None, map(config.whole_or_open, keys)), None)
        for keys in (("nproc_per_node", "gpus_per_node", "num_gpus"), ("nnodes", "num_nodes"))
    )
    if each:
        draft.processes(each * (nodes or 1), key="nproc_per_node", machines=nodes or 1)


def _batch(config: ConfigKeys, draft: Draft) -> None:
    total = config.whole("global_batch_size")
    draft.batch(
        micro=config.whole("micro_batch_size", config.whole("batch_size")),
        accumulation=None if total else 1, total=total, total_key="global_batch_size",
    )
    draft.put("batch.sequence_length", config.whole("seq_length"))


def _precision(config: ConfigKeys, draft: Draft) -> bool:
    """Put the dtypes; returns whether gradients are added up and reduced in float32."""
    bf16, fp16 = config.flag("bf16", False), config.flag("fp16", False)
    if bf16 and fp16:
        draft.notes.problem("fp16", "contradictory: expected one of bf16 and fp16, found both")
    dtype = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    accumulates = config.flag("accumulate_allreduce_grads_in_fp32", bf16)
    narrow = config.flag("grad_reduce_in_bf16", False)
    draft.put("precision.parameters", dtype)
    wide = bool(accumulates and not narrow) or dtype == "fp32"
    draft.put("precision.reduce", "fp32" if wide else dtype)
    if wide and dtype != "fp32":
        draft.put("execution.accumulation", "fp32")
    fp8 = config.any("fp8_format", config.any("fp8"))
    recipe = str(config.any("fp8_recipe", "delayed"))
    if fp8:
        draft.put("execution.float8", "mx" if recipe == "mxfp8" else recipe)
    if config.flag("fp8_param_gather", False):
        draft.notes.assume("parameters are gathered in two bytes, where fp8_param_gather moves one")
    config.only("fp4_format", None, unmodelled="not modelled")
    config.only("use_precision_aware_optimizer", False, unmodelled="not modelled")
    return wide


def _strategy(config: ConfigKeys, draft: Draft, *, wide: bool) -> None:
    sharded = config.flag("use_distributed_optimizer", False)
    overlaps = config.flag("overlap_grad_reduce", False)
    bucket = config.whole("ddp_bucket_size")
    config.ignore("parameters are gathered after the step here", "overlap_param_gather",
                  "overlap_param_gather_with_optimizer_step")
    config.only("use_megatron_fsdp", False, unmodelled="use_torch_fsdp2 is modelled")
    config.only("use_custom_fsdp", False, unmodelled="use_torch_fsdp2 is modelled")
    config.ignore("of Megatron's own FSDP", "data_parallel_sharding_strategy",
                  "torch_fsdp2_reshard_after_forward", "ddp_average_in_collective",
                  "ddp_num_buckets", "ddp_pad_buckets_for_high_nccl_busbw", "ddp_impl")
    nbytes = 4 if wide else 2
    world = draft.world or 1
    elements = bucket or (max(BUCKET, EACH * world) if overlaps else 10**12)
    if config.flag("use_torch_fsdp2", False):
        draft.put("strategy.name", "fsdp2")
        return
    draft.put("strategy.sync", "last")
    if sharded:
        draft.put("strategy.name", "zero1")
        draft.put("strategy.granularity", f"{elements * nbytes} B")
    else:
        draft.put("strategy.name", "ddp")
        draft.put("strategy.bucket_cap_mb", min(elements * nbytes / MIB, 1e7))
        draft.put("strategy.gradient_as_bucket_view", True)
    if config.flag("optimizer_cpu_offload", False):
        draft.put("offload.optimizer", "cpu")
    config.only("optimizer_offload_fraction", 1.0, unmodelled="not modelled")
    config.ignore("an option of offload", "overlap_cpu_optimizer_d2h_h2d", "use_torch_optimizer_*",
                  "pin_cpu_grads", "pin_cpu_params")


def _optimizer(config: ConfigKeys, draft: Draft) -> None:
    name = config.text("optimizer", "adam") or "adam"
    draft.put("optimizer.name", {"adam": "adamw"}.get(name, name))
    draft.put("optimizer.implementation", "fused")
    draft.put("optimizer.learning_rate", config.number("lr"))
    draft.put("optimizer.weight_decay", config.number("weight_decay", 0.01))
    draft.put("optimizer.clip_norm", config.number("clip_grad", 1.0))


def _recomputation(config: ConfigKeys, draft: Draft) -> None:
    """Put activation checkpointing: whole layers, or attention alone."""
    granularity = config.any("recompute_granularity")
    if config.flag("recompute_activations", False):
        granularity = "selective"
    if config.flag("checkpoint_activations", False):  # its older name
        granularity = "full"
    method = config.any("recompute_method", config.any("checkpoint_method", "uniform"))
    layers = config.whole("recompute_num_layers", config.whole("checkpoint_num_layers", 1))
    modules = config.any("recompute_modules")
    config.ignore("an option of tensor parallelism", "distribute_saved_activations")
    if granularity == "full" and method == "uniform" and layers == 1:
        draft.put("activation_checkpointing.mode", "full")
    elif granularity == "full":
        draft.notes.problem("recompute_num_layers", f"expected 1, found {layers} of method "
                                                    f"{method}, which is not modelled")
    elif granularity == "selective":
        if modules not in (None, "core_attn", ["core_attn"]):
            draft.notes.problem("recompute_modules", "expected core_attn, found others, which are "
                                                     "not modelled")
        draft.put("activation_checkpointing", {"mode": "selective", "recompute": ["attention"]})


def _model(config: ConfigKeys, draft: Draft) -> None:
    """Put the sizes of a GPT or a Llama."""
    gated, rms = config.flag("swiglu", False), config.any("normalization") == "RMSNorm"
    rotary = config.any("position_embedding_type") == "rope" or config.flag(
        "use_rotary_position_embeddings", False
    )
    no_bias = config.flag("disable_bias_linear", False)
    qkv_bias = config.flag("add_qkv_bias", False)
    fuses = config.flag("cross_entropy_loss_fusion", False)
    config.ignore("the form of the fused loss", "cross_entropy_fusion_impl")
    backend = str(config.any("attention_backend", "auto"))
    local = config.any("transformer_impl") == "local"
    flash = config.flag("use_flash_attn", False)
    explicit = backend in ("local", "unfused") or (local and not flash)
    width, hidden = config.whole("hidden_size"), config.whole("ffn_hidden_size")
    sizes: dict[str, Any] = {
        "num_layers": config.whole("num_layers"), "hidden_size": width,
        "num_heads": config.whole("num_attention_heads"), "feed_forward": hidden,
        "tied": not config.flag("untie_embeddings_and_output_weights", False),
        "attention": "explicit" if explicit else "sdpa", "loss_dtype": "float32",
        "vocabulary": _vocabulary(config, draft),
    }
    shared = config.flag("group_query_attention", False)
    groups, head = config.whole("num_query_groups"), config.whole("kv_channels")
    dropouts = {
        "attention_dropout": config.number("attention_dropout", 0.1),
        "residual_dropout": config.number("hidden_dropout", 0.1),
    }
    positions = config.whole("max_position_embeddings",
                             config.whole("max_absolute_position_embeddings"))
    if gated and rotary:
        sizes |= {"num_kv_heads": groups if shared else None, "head_dim": head,
                  "qkv_bias": bool(qkv_bias or not no_bias),
                  "output_bias": not no_bias, "mlp_bias": not no_bias}
        if hidden is None and width:
            sizes["feed_forward"] = int(4 * width * 2 / 3) // 64 * 64
        if not rms:
            draft.notes.assume("norms are RMSNorms, as every Llama's here are")
        if any(dropouts.values()):
            draft.notes.assume("no dropout, as no Llama here has any")
        family = "llama"
    elif not gated and not rotary and not shared:
        sizes |= {"max_positions": positions, **dropouts}
        if no_bias:
            draft.notes.assume("linears have biases, as every GPT's here have")
        family = "gpt"
    else:
        family = ""
    if explicit and not draft.answers.model:
        draft.put("execution.softmax", "fused")
    if not fuses:
        draft.put("execution.loss", "composite")
    made = {key: value for key, value in sizes.items() if value is not None}
    if family:
        draft.put_model({"family": family, "sizes": made}, f"the arguments' {family}")
    elif not draft.answers.model:
        draft.notes.problem("model", "expected a Llama (swiglu and rope) or a GPT (neither), found "
                                     "a mixture; give --model")


def _vocabulary(config: ConfigKeys, draft: Draft) -> int | None:
    """The padded vocabulary; asked where a tokenizer's file has it."""
    size = config.whole("vocab_size", config.whole("padded_vocab_size"))
    multiple = config.whole("make_vocab_size_divisible_by", PADDING) or PADDING
    tokenizer = str(config.any("tokenizer_type", "GPT2BPETokenizer"))
    trained = str(config.any(SCRIPT, "gpt"))
    if not draft.answers.model and (trained in OTHER_MODELS or tokenizer.startswith("Bert")):
        draft.notes.problem("model", f"expected a GPT's arguments, found those of {trained} with "
                                     f"{tokenizer[:40]}, which is not modelled; give --model")
    if size is None and (draft.answers.model or VOCABULARY in draft.answers.settings):
        return None
    if size is None and tokenizer == "GPT2BPETokenizer":
        size = GPT2_VOCABULARY
        draft.notes.assume(f"vocabulary: {size:,}, GPT-2's tokenizer's")
    if size is None:
        draft.ask(VOCABULARY, "the tokenizer's file has it")
        return None
    return -(-size // multiple) * multiple


def is_config(config: dict[str, Any]) -> bool:
    """True for a table that looks like Megatron's arguments."""
    return "micro_batch_size" in config and ("num_layers" in config or "seq_length" in config)


IMPORTER = Importer(
    parsers={
        ".sh": shell_config, ".slurm": shell_config, ".sbatch": shell_config,
        ".txt": shell_config, ".yaml": yaml_arguments, ".yml": yaml_arguments,
        ".json": json_arguments,
    },
    read=read, is_config=is_config,
)
