"""The table zero_optimization of DeepSpeed's ds_config.json: stage, sizes, leaf modules, and
offload with its requests to drives."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from zsim.configs.config_keys import ConfigKeys
from zsim.configs.draft import Draft
from zsim.errors import shown
from zsim.models.training_options import QUEUE_DEPTH
from zsim.scenario.scenario import Scenario
from zsim.strategies.deepspeed_engine.config_keys import REMOVED
from zsim.strategies.deepspeed_engine.options import MOST_ELEMENTS, VERSION, as_config

BY_WIDTH: Mapping[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda width: width * width,
    "stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
    "stage3_param_persistence_threshold": lambda width: 10 * width,
}
"""transformers' rule for each size that is "auto", from the model's width."""
SIZES = ("allgather_bucket_size",)
SHARD_SIZES = ("stage3_max_live_parameters", "stage3_max_reuse_distance",
               "stage3_model_persistence_threshold", "stage3_module_granularity_threshold")
QUANTIZED = ("zero_quantized_weights", "zero_quantized_gradients")
FLAGS = ("allgather_partitions", "overlap_comm", "contiguous_gradients", "reduce_scatter")
OFF = {"mics_shard_size": -1, "zeropp_loco_param": None, "stage3_max_live_params": None}
"""Values that say nothing, of keys of older versions; false of others."""
WHOLE_WEIGHTS = (
    "stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
)
"""The names that one key has had."""
DROPPED = "--drop leaves it out"
UNMODELLED = f"zsim does not model it; {DROPPED}"
LEAVES = f'strategy.leaf_module = "blocks" may be meant; {DROPPED}'
UNSAID = "a checkpoint, a log or a check, which is no part of a step"


def read_zero(zero: ConfigKeys, draft: Draft) -> bool:
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
            *QUANTIZED,
        )
    offloads = _offload(zero, draft, stage) if stage else False
    if stage:
        draft.put("strategy.name", f"deepspeed{stage}")
        _others(zero, stage)
        _sizes(zero, draft)
        if stage == 3:
            _leaves(zero, draft)
    _whole_weights(zero, draft, stage)
    _unmodelled(zero)
    zero.close()
    return offloads


def read_requests(config: ConfigKeys, draft: Draft) -> None:
    """Put the requests to drives; each thread has so many at once."""
    device = draft.get("offload.optimizer")
    if "nvme" not in (device, draft.get("offload.parameters")):
        config.ignore("requests to drives, on which nothing is", "aio")
        return
    if device != "nvme":
        config.notes.problem(
            "zero_optimization.offload_optimizer.device",
            f"expected nvme with offload_param on nvme, found {device or 'none'}",
        )
        config.any("aio")
        return
    table = config.table("aio")
    size = table.whole("block_size")
    draft.put("offload.block_size", None if size is None else f"{size} B")
    depth, threads = table.whole("queue_depth"), table.whole("intra_op_parallelism") or 1
    if threads > 1:
        depth = QUEUE_DEPTH if depth is None else depth
        draft.notes.assume(
            f"offload.queue_depth = {depth * threads:,}: queue_depth {depth:,} of each of "
            f"{threads:,} threads (intra_op_parallelism); files are of whole KiB, as with one "
            f"thread, and not of {threads:,} KiB"
        )
    draft.put("offload.queue_depth", None if depth is None else depth * threads)
    table.ignore("the older name of intra_op_parallelism, which DeepSpeed does not read",
                 "thread_count")
    table.ignore("the order of requests to drives is not modelled", "single_submit",
                 "overlap_events")
    table.only("use_gds", False, unmodelled=UNMODELLED)
    table.close()


def _others(zero: ConfigKeys, stage: int) -> None:
    """Leave out the options of other stages."""
    if stage == 3:
        zero.ignore("an option of stages 1 and 2", "round_robin_gradients")
        return
    names = [key for key in (*BY_WIDTH, *SHARD_SIZES) if key.startswith("stage3_")]
    zero.ignore(
        "an option of stage 3", *names, *(key.removeprefix("stage3_") for key in names),
        "sub_group_size", "zero_hpz_partition_size", *QUANTIZED, "enable_sanity_checks",
    )


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
    for key in (*FLAGS, "round_robin_gradients", *QUANTIZED):
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


def _whole_weights(zero: ConfigKeys, draft: Draft, stage: int) -> None:
    """Put the file of whole weights that trainers save beside checkpoints."""
    if stage < 3:
        zero.ignore("an option of stage 3", *WHOLE_WEIGHTS)
    for key in WHOLE_WEIGHTS:
        if zero.flag(key):
            draft.prefer(
                "checkpoint.gather_16bit_weights", True, source=f"{zero.prefix}{key}",
                assumed="checkpoint.gather_16bit_weights = true: each save has a file of whole "
                        f"weights, as {key} permits and trainers do",
            )


def _unmodelled(zero: ConfigKeys) -> None:
    """Leave out what changes no step, and refuse what would and is not modelled."""
    zero.ignore(
        UNSAID, "load_from_fp32_weights", "elastic_checkpoint",
        "pipeline_loading_checkpoint", "override_module_apply", "log_trace_cache_warnings",
        "ignore_unused_parameters",
    )
    for key, default in (
        ("use_multi_rank_bucket_allreduce", True), ("compute_grad_norm", True),
        ("memory_efficient_linear", True),
        ("stage3_use_all_reduce_for_fetch_params", False), ("parameter_alignment", False),
        ("use_all_reduce_for_fetch_params", False), ("allgather_sequential", False),
        ("stage3_allgather_sequential", False), ("zero_quantized_nontrainable_weights", False),
        ("zenflow", None), ("enable_sanity_checks", False),
        ("save_muon_momentum_buffer_in_memory", False),
    ):
        zero.only(key, default, unmodelled=UNMODELLED)
    zero.only("leaf_module", None, unmodelled=LEAVES)
    for key, why in REMOVED.items():
        zero.only(
            key, OFF.get(key, False),
            unmodelled=f"DeepSpeed {VERSION} refuses it, a key of an older version, {why}; "
                       f"{DROPPED}",
        )
    for key, name in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        zero.only(
            key, False, unmodelled=f'DeepSpeed {VERSION} calls it {name} = {{"device": "cpu"}}'
        )
    zero.ignore("an option of offload's older form", "cpu_offload_use_pin_memory")


def _offload(zero: ConfigKeys, draft: Draft, stage: int) -> bool:
    """Put the places of states outside the device; returns whether the optimizer's are."""
    pins: list[bool] = []
    for key, state in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
        table = zero.table(key)
        device = table.word("device", ("none", "cpu", "nvme"), "none")
        pin = table.flag("pin_memory", True)
        if device == "nvme" and stage < 3 and state == "optimizer":
            device = "cpu"
            draft.notes.assume(
                f'offload.optimizer = "cpu": at stage {stage} DeepSpeed takes nvme for cpu'
            )
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
    table.ignore("the way in which memory is made", "fast_init", "cpuadam_cores_perc")
    count = table.whole("buffer_count")
    if state == "optimizer":
        draft.put("offload.buffer_count", count if drives else None)
        for key in ("pipeline_read", "pipeline_write"):
            flag = table.flag(key) or None
            draft.put(f"offload.{key}", flag if drives else None)
        table.ignore("the older name of pipeline_read and pipeline_write", "pipeline")
        table.ignore("an option of parameters on drives", "buffer_size", "max_in_cpu")
    else:
        sizes = {"max_in_cpu": table.whole("max_in_cpu"), "parameter_buffer_count": count,
                 "parameter_buffer_size": table.whole("buffer_size")}
        for key, size in sizes.items():
            draft.put(f"offload.{key}", size if drives else None)
    table.only("ratio", 1.0, unmodelled="partial offload is not modelled")
    table.only("super_offload", False, unmodelled="not modelled")
