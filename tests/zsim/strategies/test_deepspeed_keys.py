"""Keys of DeepSpeed's own config under its strategies: each is an option, or told where it is."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from zsim.errors import ScenarioError
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES
from zsim.strategies.deepspeed_engine.config_keys import BESIDE_ZERO

ZERO_KEYS = [
    "allgather_bucket_size", "allgather_partitions", "compute_grad_norm",
    "contiguous_gradients", "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory",
    "elastic_checkpoint", "enable_sanity_checks", "ignore_unused_parameters", "leaf_module",
    "legacy_stage1", "load_from_fp32_weights", "log_trace_cache_warnings",
    "memory_efficient_linear", "mics_hierarchical_params_gather", "mics_shard_size",
    "offload_optimizer", "offload_param", "overlap_comm", "override_module_apply",
    "parameter_alignment", "pipeline_loading_checkpoint", "reduce_bucket_size",
    "reduce_scatter", "round_robin_gradients", "save_muon_momentum_buffer_in_memory", "stage",
    "stage3_allgather_sequential", "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold", "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size", "stage3_use_all_reduce_for_fetch_params", "sub_group_size",
    "use_multi_rank_bucket_allreduce", "zenflow", "zero_hpz_partition_size",
    "zero_quantized_gradients", "zero_quantized_nontrainable_weights", "zero_quantized_weights",
    "zeropp_loco_param",
]
"""Fields of DeepSpeedZeroConfig by their aliases, of 0.19.0 and 0.19.8 together."""


def scenario(strategy: str, **options: Any) -> Scenario:
    return Scenario(
        model={"preset": "mlp-uneven"}, batch={"micro_batch": 2},
        cluster={"preset": "cpu-gloo", "ranks": 2}, strategy={"name": strategy} | options,
    )


@pytest.mark.parametrize("strategy", ["deepspeed1", "deepspeed2", "deepspeed3"])
def test_no_key_of_deepspeeds_config_is_unknown(strategy: str) -> None:
    known = {field.name for field in fields(STRATEGIES[strategy].options)}
    others = [
        key for key in (*ZERO_KEYS, *BESIDE_ZERO, "fp16", "loss_scale", "super_offload")
        if key not in known
    ]
    with pytest.raises(ScenarioError) as caught:
        scenario(strategy, **dict.fromkeys(others, True))
    told = {problem.split(": ")[1]: problem for problem in caught.value.problems}
    assert sorted(told) == sorted(f"strategy.{key}" for key in others)
    assert not [line for line in told.values() if "unknown key" in line or "did you mean" in line]


@pytest.mark.parametrize(("strategy", "key", "told"), [
    ("deepspeed2", "offload_optimizer", 'offload = { optimizer = "cpu", adam = "deepspeed" }'),
    ("deepspeed3", "offload_param", 'offload.parameters = "cpu" of deepspeed3'),
    ("deepspeed1", "fp16", 'this is precision.parameters = "fp16"'),
    ("deepspeed3", "round_robin_gradients", "an option of stages 1 and 2"),
    ("deepspeed2", "sub_group_size", "an option of stage 3"),
    ("deepspeed1", "trace", "an option of stage 3"),
    ("deepspeed3", "prescale_gradients", "zsim does not model; leave it out"),
    ("deepspeed3", "enable_sanity_checks", "broadcasts of stage 3 before each reduction"),
])
def test_a_key_that_is_elsewhere_is_told_where(strategy: str, key: str, told: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        scenario(strategy, **{key: 1})
    assert len(caught.value.problems) == 1
    assert told in caught.value.problems[0]


@pytest.mark.parametrize(("strategy", "tables"), [
    ("deepspeed2", {"offload": {"optimizer": "cpu", "adam": "deepspeed"}}),
    ("deepspeed3", {"offload": {"optimizer": "cpu", "parameters": "cpu", "adam": "deepspeed"}}),
    ("deepspeed1", {"precision": {"parameters": "fp16"}}),
])
def test_what_such_a_line_says_to_write_is_a_scenario(
    strategy: str, tables: dict[str, Any]
) -> None:
    assert scenario(strategy).with_(**tables).strategy == strategy
