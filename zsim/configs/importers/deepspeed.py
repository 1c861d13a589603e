"""DeepSpeed's ds_config.json as a scenario.

Keys, their meaning and defaults are those of DeepSpeed 0.19 (runtime/zero/config.py and others).
Where transformers' trainer fills in "auto", its own rule gives sizes of buckets from the model. Any
other "auto" is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zsim.configs.config_keys import AUTO, ConfigKeys
from zsim.configs.draft import Draft
from zsim.configs.importer import JSON_OR_YAML, Importer
from zsim.errors import shown
from zsim.scenario.scenario import Scenario
from zsim.strategies.deepspeed_engine.options import MOST_ELEMENTS, as_config

CLIP_NORM = 1.0
"""Norm to which DeepSpeed clips by default since 0.19.3."""
DTYPES = {
    "fp32": "fp32", "float32": "fp32", "torch.float32": "fp32", "bf16": "bf16",
    "bfloat16": "bf16", "bfp16": "bf16", "torch.bfloat16": "bf16", "fp16": "fp16",
    "float16": "fp16", "half": "fp16", "torch.float16": "fp16",
}
"""Dtypes as DeepSpeed spells them, and as scenarios do."""
BY_WIDTH: Mapping[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda width: width * width,
    "stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
    "stage3_param_persistence_threshold": lambda width: 10 * width,
}
"""transformers' rule for each size that is "auto", from the model's width."""
SIZES = ("allgather_bucket_size",)
SHARD_SIZES = ("stage3_max_live_parameters", "stage3_max_reuse_distance",
               "stage3_model_persistence_threshold")
FLAGS = ("allgather_partitions", "overlap_comm", "contiguous_gradients", "reduce_scatter")
DROPPED = "--drop leaves it out"
UNMODELLED = f"zsim does not model it; {DROPPED}"
LEAVES = f'strategy.leaf_module = "blocks" may be meant; {DROPPED}'
UNSAID = "a checkpoint, a log or a check, which is no part of a step"
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "torchadam": "adamw",
              "sgd": "sgd"}


def read(config: ConfigKeys, draft: Draft) -> None:
    """Put what a ds_config says into the draft; its problems, ignored keys and assumptions go to
    the notes."""
    _batch(config, draft)
    offloads = _zero(config.table("zero_optimization"), draft)
    _precision(config, draft)
    _optimizer(config, draft, offloads=offloads)
    _compile(config, draft)
    _requests(config, draft)
    _ignored(config)
    config.close()


def _batch(config: ConfigKeys, draft: Draft) -> None:
    draft.batch(
        micro=config.whole("train_micro_batch_size_per_gpu"),
        accumulation=config.whole("gradient_accumulation_steps"),
        total=config.whole("train_batch_size"), total_key="train_batch_size",
    )
    draft.ask("batch.micro_batch", 'train_micro_batch_size_per_gpu is "auto", or not there')


def _zero(zero: ConfigKeys, draft: Draft) -> bool:
    """Put the strategy; returns whether the optimizer's states are offloaded."""
    stage = zero.whole("stage", 0)
    if stage not in (0, 1, 2, 3):
        draft.notes.problem("zero_optimization.stage", f"expected 0 to 3, found {stage}")
        stage = 0
    if stage == 0:
        draft.put("strategy.name", "ddp")
        draft.notes.assume(
            "stage 0 is ddp, which reduces within backward; DeepSpeed reduces after it"
        )
        zero.ignore(
            "an option of stages 1 to 3", *BY_WIDTH, *SIZES, *SHARD_SIZES, *FLAGS,
            "round_robin_gradients", "sub_group_size", "offload_optimizer", "offload_param",
        )
    offloads = _offload(zero, draft) if stage else False
    if stage and _uses_drives(draft):
        draft.put("strategy.name", f"zero{stage}")
        draft.notes.assume(
            f"strategy: zero{stage} stands in for DeepSpeed's engine, which has no drives here; "
            "its buffers and order are others"
        )
        _others(zero, stage)
        _of_engine(zero, stage)
    elif stage:
        draft.put("strategy.name", f"deepspeed{stage}")
        _others(zero, stage)
        _sizes(zero, draft)
        if stage == 3:
            _leaves(zero, draft)
    _unmodelled(zero)
    zero.close()
    return offloads


def _uses_drives(draft: Draft) -> bool:
    return "nvme" in (draft.get("offload.optimizer"), draft.get("offload.parameters"))


def _requests(config: ConfigKeys, draft: Draft) -> None:
    """Put the requests to drives."""
    if not _uses_drives(draft):
        config.ignore("requests to drives, on which nothing is", "aio")
        return
    if (device := draft.get("offload.optimizer")) != "nvme":
        config.notes.problem(
            "zero_optimization.offload_optimizer.device",
            f"expected nvme with offload_param on nvme, found {device or 'none'}",
        )
        config.any("aio")
        return
    table = config.table("aio")
    size = table.whole("block_size")
    draft.put("offload.block_size", None if size is None else f"{size} B")
    draft.put("offload.queue_depth", table.whole("queue_depth"))
    table.ignore("threads and order of requests to drives are not modelled", "thread_count",
                 "intra_op_parallelism", "single_submit", "overlap_events", "use_gds")
    table.close()


def _others(zero: ConfigKeys, stage: int) -> None:
    """Leave out the options of other stages."""
    if stage == 3:
        zero.ignore("an option of stages 1 and 2", "round_robin_gradients")
        return
    names = [key for key in (*BY_WIDTH, *SHARD_SIZES) if key.startswith("stage3_")]
    zero.ignore(
        "an option of stage 3", *names, *(key.removeprefix("stage3_") for key in names),
        "sub_group_size", "zero_hpz_partition_size", "zero_quantized_weights",
        "enable_sanity_checks",
    )


def _of_engine(zero: ConfigKeys, stage: int) -> None:
    """Check the options of the engine for which another strategy stands in, and leave them out."""
    reason = f"an option of the engine for which zero{stage} stands in"
    sizes = [_alias(zero, key) for key in (*BY_WIDTH, *SIZES, *SHARD_SIZES, "sub_group_size")]
    flags = (*FLAGS, "round_robin_gradients")
    present = [key for key in (*sizes, *flags) if key in zero]
    zero.notes.ignored.update({f"{zero.prefix}{key}": reason for key in present})
    for key in sizes:
        if (size := zero.whole(key) or 0) < 0:
            zero.notes.problem(f"{zero.prefix}{key}", f"expected at least 0, found {size}")
    for key in flags:
        zero.flag(key)
    unmodelled = f"zsim does not model it with drives; {DROPPED}"
    zero.only("zero_hpz_partition_size", 1, unmodelled=unmodelled)
    zero.only("zero_quantized_weights", False, unmodelled=unmodelled)


def _sizes(zero: ConfigKeys, draft: Draft) -> None:
    """Put the options that DeepSpeed's strategies have by the same names."""
    for key, rule in BY_WIDTH.items():
        name = _alias(zero, key)
        if zero.is_auto(name):
            zero.any(name)
            width = draft.hidden_size
            if width is None and draft.tables["model"]:
                draft.ask(f"strategy.{key}", f'zero_optimization.{key} is "auto"')
            elif width is not None:
                draft.put(f"strategy.{key}", rule(width))
                draft.notes.assume(
                    f'{key} = {rule(width):,}: "auto", by transformers\' rule for a width of '
                    f"{width:,}"
                )
        else:
            draft.put(f"strategy.{key}", zero.whole(name))
    for key in (*SIZES, "zero_hpz_partition_size"):
        draft.put(f"strategy.{key}", zero.whole(key))
    for key in (*FLAGS, "round_robin_gradients", "zero_quantized_weights"):
        draft.put(f"strategy.{key}", zero.flag(key))
    for key in SHARD_SIZES:
        name = _alias(zero, key)
        if zero.is_auto(name):
            draft.ask(f"strategy.{key}", f'{key} is "auto", which transformers does not fill in')
        size = zero.whole(name)
        draft.put(f"strategy.{key}", None if size is None else min(size, MOST_ELEMENTS))
    group = zero.whole("sub_group_size")
    draft.put("strategy.sub_group_size", 1 if group == 0 else group)


def _leaves(zero: ConfigKeys, draft: Draft) -> None:
    """Put the blocks as leaf modules, where the config names each of them."""
    table = zero.table("leaf_module")
    names = table.any("names") or []
    for key in ("classes", "name_suffixes"):
        table.only(key, None, unmodelled=LEAVES)
    table.close()
    if not names:
        return
    draft.put("strategy.leaf_module", "blocks")

    def check(scenario: Scenario) -> None:
        blocks = as_config(scenario.options, scenario.model)["leaf_module"]["names"]
        if not isinstance(names, list) or sorted(map(str, names)) != sorted(blocks):
            zero.notes.problem(
                f"{table.prefix}names", f"expected every block, {shown(blocks)}, found "
                f"{shown(names)}; other leaves are not modelled; --drop {table.prefix}names "
                "leaves them out"
            )

    draft.check(check)


def _alias(zero: ConfigKeys, key: str) -> str:
    """The name under which the config has `key`: DeepSpeed takes it without stage3_ as well."""
    short = key.removeprefix("stage3_")
    return short if short in zero and key not in zero else key


def _unmodelled(zero: ConfigKeys) -> None:
    """Leave out what changes no step, and refuse what would and is not modelled."""
    zero.ignore(
        UNSAID, "stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save", "load_from_fp32_weights", "elastic_checkpoint",
        "pipeline_loading_checkpoint", "override_module_apply", "log_trace_cache_warnings",
        "ignore_unused_parameters", "legacy_stage1",
    )
    for key, default in (
        ("use_multi_rank_bucket_allreduce", True), ("compute_grad_norm", True),
        ("memory_efficient_linear", True),
        ("stage3_module_granularity_threshold", 0), ("module_granularity_threshold", 0),
        ("stage3_use_all_reduce_for_fetch_params", False), ("parameter_alignment", False),
        ("use_all_reduce_for_fetch_params", False), ("allgather_sequential", False),
        ("stage3_allgather_sequential", False), ("zero_quantized_nontrainable_weights", False),
        ("zero_quantized_gradients", False), ("zeropp_loco_param", None), ("zenflow", None),
        ("mics_shard_size", -1), ("enable_sanity_checks", False),
        ("mics_hierarchical_params_gather", False), ("save_muon_momentum_buffer_in_memory", False),
    ):
        zero.only(key, default, unmodelled=UNMODELLED)
    zero.only("leaf_module", None, unmodelled=LEAVES)
    for key, name in (("cpu_offload", "offload_optimizer"), ("cpu_offload_params", "offload_param"),
                      ("cpu_offload_param", "offload_param")):
        zero.only(key, False, unmodelled=f'DeepSpeed calls it {name} = {{"device": "cpu"}} now')
    zero.ignore("an option of offload's older form", "cpu_offload_use_pin_memory")


def _offload(zero: ConfigKeys, draft: Draft) -> bool:
    """Put the places of states outside the device; returns whether the optimizer's are."""
    pins: list[bool] = []
    for key, state in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
        table = zero.table(key)
        device = table.word("device", ("none", "cpu", "nvme"), "none")
        pin = table.flag("pin_memory", True)
        if device != "none":
            draft.put(f"offload.{state}", device)
            pins.append(bool(pin))
        _buffers(table, draft, drives=device == "nvme", state=state)
        table.close()
    if not all(pins):
        draft.put("offload.pin_memory", False)
    return draft.get("offload.optimizer") is not None


def _buffers(table: ConfigKeys, draft: Draft, *, drives: bool, state: str) -> None:
    """Put the buffers of what goes to drives, and refuse partial offload."""
    table.ignore("a path of the machine", "nvme_path")
    table.ignore("buffers of parameters on drives are not modelled apart", "max_in_cpu",
                 "buffer_size")
    table.ignore("the way in which memory is made", "fast_init", "cpuadam_cores_perc")
    count = table.whole("buffer_count")
    if state == "optimizer":
        draft.put("offload.buffer_count", count if drives else None)
        for key in ("pipeline_read", "pipeline_write"):
            draft.put(f"offload.{key}", table.flag(key) or None)
        table.ignore("the older name of pipeline_read and pipeline_write", "pipeline")
    table.only("ratio", 1.0, unmodelled="partial offload is not modelled")
    table.only("super_offload", False, unmodelled="not modelled")


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
    autocast.only("enabled", False, unmodelled="DeepSpeed's autocast is not modelled")
    autocast.ignore("an option of torch_autocast", "dtype", "lower_precision_safe_modules")
    autocast.close()
    amp = config.table("amp")
    amp.only("enabled", False, unmodelled="apex is not modelled")
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
    if _uses_drives(draft):
        if config.number("gradient_clipping", CLIP_NORM):
            draft.notes.assume(
                "optimizer.clip_norm = 0: zero1 to zero3 do not clip with drives; DeepSpeed does"
            )
        return
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


IMPORTER = Importer(parsers=JSON_OR_YAML, read=read, is_config=is_config)
