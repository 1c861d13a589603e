"""A ds_config becomes the scenario that it means; what is open is asked, what is wrong is named."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zsim
from tests.support.configs import imported, problems
from zsim import ScenarioError
from zsim.configs.front import export_config
from zsim.models.training_options import Offload
from zsim.scenario.plan import plan

STAGE_3 = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5, "bf16": {"enabled": True}, "communication_data_type": "fp32",
    "optimizer": {"type": "AdamW", "params": {"lr": "1e-4", "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {}}, "steps_per_print": 10,
    "zero_optimization": {
        "stage": 3, "overlap_comm": False, "contiguous_gradients": True, "sub_group_size": 1e9,
        "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "max_live_parameters": 7,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
MICRO = {"batch__micro_batch": None}


def changed(**values: object) -> dict[str, object]:
    """STAGE_3 with some keys, of its table zero_optimization those that are there."""
    config = deepcopy(STAGE_3)
    for key, value in values.items():
        table = config["zero_optimization"] if key in config["zero_optimization"] else config
        table[key] = value
    return config


def test_stage_3_is_deepspeed3_with_its_own_options(tmp_path):
    result = imported(tmp_path, STAGE_3, **MICRO)
    assert result.scenario.tables == {
        "model": {"preset": "gpt-tiny"}, "cluster": {"preset": "cpu-gloo", "ranks": 4},
        "batch": {"micro_batch": 2, "accumulation": 4, "sequence_length": 64},
        "strategy": {
            "name": "deepspeed3", "overlap_comm": False, "contiguous_gradients": True,
            "sub_group_size": 10**9, "stage3_max_live_parameters": 7, "reduce_bucket_size": 64**2,
            "stage3_prefetch_bucket_size": int(0.9 * 64**2),
            "stage3_param_persistence_threshold": 640,
        },
        "precision": {"parameters": "bf16", "reduce": "fp32"},
        "optimizer": {
            "name": "adamw", "implementation": "fused", "learning_rate": 1e-4, "clip_norm": 0.5,
        },
        "checkpoint": {"gather_16bit_weights": True},
    }
    assert set(result.ignored) == {"scheduler", "steps_per_print", "optimizer.params.betas"}
    assert any("reduce_bucket_size = 4,096" in sentence for sentence in result.assumed)


WEIGHTS = "stage3_gather_16bit_weights_on_model_save"


def test_whole_weights_beside_checkpoints_refuse_no_config_and_no_candidate(tmp_path):
    """A scenario that cannot have them has none, and the import says why."""
    kept = imported(tmp_path, STAGE_3, **MICRO)
    assert any(said.startswith("checkpoint.gather_16bit_weights") for said in kept.assumed)
    fitted = zsim.fit(kept.scenario)
    assert not [reason for _, reason in fitted.refused if reason.startswith("checkpoint")]
    assert json.loads(export_config(kept.scenario, "deepspeed").text)["zero_optimization"][WEIGHTS]
    other = imported(tmp_path, changed(zero_optimization={
        "stage": 3, WEIGHTS: True, "zero_hpz_partition_size": 2
    }), **MICRO)
    assert "checkpoint" not in other.scenario.tables
    assert other.ignored[f"zero_optimization.{WEIGHTS}"].endswith("found zero_quantized_weights or "
                                                                  "hpZ")
    assert not any("gather_16bit_weights" in said for said in other.assumed)
    earlier = imported(tmp_path, changed(zero_optimization={"stage": 2, WEIGHTS: True}), **MICRO)
    assert earlier.ignored[f"zero_optimization.{WEIGHTS}"] == "an option of stage 3"


def test_a_preset_in_place_of_transformers_module_is_told_with_what_mends_it(tmp_path):
    def told(model, **settings):
        return [said for said in imported(tmp_path, STAGE_3, model=model, **MICRO, **settings)
                .assumed if "module of transformers" in said]

    (of_llama,), (of_gpt,) = told("llama-tiny"), told("gpt-tiny")
    assert of_llama.endswith("--set model.loss_dtype=float32 --set execution.norms=composite")
    assert of_gpt.endswith(": --set model.loss_dtype=float32")
    assert not told("gpt-tiny", model__loss_dtype="float32")


@given(
    micro=st.integers(1, 5), accumulation=st.integers(1, 5), ranks=st.integers(2, 4),
    left_out=st.sampled_from(["micro_batch", "accumulation", "total", "none"]),
)
def test_two_of_the_batch_sizes_define_the_third(
    tmp_path_factory, micro, accumulation, ranks, left_out
):
    sizes = {
        "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro * accumulation * ranks,
    }
    keys = dict(zip(["micro_batch", "accumulation", "total"], sizes, strict=True))
    sizes.pop(keys.get(left_out, ""), None)
    config = {key: value for key, value in STAGE_3.items() if "batch" not in key}
    config.pop("gradient_accumulation_steps")
    folder = tmp_path_factory.mktemp("config")
    batch = imported(folder, config | sizes, **MICRO, cluster__ranks=ranks).scenario.batch
    assert (batch.micro_batch, batch.accumulation) == (micro, accumulation)
    if left_out == "none":
        sizes["train_batch_size"] += 1
        with pytest.raises(ScenarioError, match="train_batch_size: contradictory"):
            imported(folder, config | sizes, **MICRO, cluster__ranks=ranks)


def test_the_batch_of_all_ranks_tells_how_many_there_are(tmp_path):
    config = changed(train_batch_size=2 * 4 * 3)
    assert imported(tmp_path, config, **MICRO, cluster__ranks=None).scenario.world_size == 3


@pytest.mark.parametrize(("config", "said"), [
    ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: expected 0 to 3, found 4"),
    (changed(zero_optimisation={}), "zero_optimisation: unknown key, did you mean "
                                    "zero_optimization?"),
    (changed(fp16={"enabled": True}), "fp16.enabled: contradictory: expected one of bf16 and fp16"),
    (changed(zero_optimization={"stage": 3, "stage3_max_live_params": 1}),
     "zero_optimization.stage3_max_live_params: expected null, found 1; DeepSpeed 0.19 refuses it, "
     "a key of an older version, named stage3_max_live_parameters in 0.19; --drop zero_optim"),
    (changed(zero_optimization={"stage": 3, "mics_shard_size": 8}),
     "zero_optimization.mics_shard_size: expected -1, found 8; DeepSpeed 0.19 refuses it, a key of "
     "an older version, ended with 0.19.7; hsdp shards over a part of the ranks likewise"),
    (changed(zero_optimization={"stage": 3, "zero_quantized_nontrainable_weights": True}),
     "zero_quantized_nontrainable_weights: expected false, found true"),
    (changed(zero_optimization={"stage": 3, "enable_sanity_checks": True}),
     "enable_sanity_checks: expected false, found true; zsim does not model it"),
    (changed(zero_optimization={"stage": 2, "cpu_offload": True}),
     'DeepSpeed 0.19 calls it offload_optimizer = {"device": "cpu"}'),
    (changed(optimizer={"type": "OneBitAdam", "params": {}}), "optimizer.name: expected"),
    (changed(overlap_comm="maybe"), "overlap_comm: expected true or false"),
    (changed(zero_optimization=[]), "zero_optimization: expected a table, found []"),
])
def test_what_is_wrong_is_named(tmp_path, config, said):
    with pytest.raises(ScenarioError) as caught:
        imported(tmp_path, config, "deepspeed", **MICRO)
    assert said in problems(caught.value)


def test_what_is_open_is_asked_by_name_all_at_once(tmp_path):
    config = changed(
        train_micro_batch_size_per_gpu="auto", gradient_clipping="auto", bf16={"enabled": "auto"},
        max_live_parameters="auto",
    )
    with pytest.raises(ScenarioError) as caught:
        imported(tmp_path, config, model=None, cluster=None, batch__sequence_length=None,
                 **MICRO, cluster__ranks=None)
    asked = [line.partition(": ")[0] for line in problems(caught.value).splitlines()]
    assert asked == [
        "model", "cluster", "batch.micro_batch", "strategy.stage3_max_live_parameters",
        "precision.parameters", "optimizer.clip_norm", "batch.sequence_length",
    ]
    answers = {
        "precision__parameters": "bf16", "optimizer__clip_norm": 1.0,
        "strategy__stage3_max_live_parameters": 9,
    }
    assert imported(tmp_path, config, **answers).scenario.precision.reduce == "float32"


def test_an_option_that_says_otherwise_than_the_config_is_refused(tmp_path):
    with pytest.raises(ScenarioError, match="contradictory: the config has 4, the option 2"):
        imported(tmp_path, STAGE_3, **MICRO, batch__accumulation=2)


def test_a_key_is_left_out_where_the_user_says_so(tmp_path):
    config = changed(mine=1)
    with pytest.raises(ScenarioError, match="mine: unknown key"):
        imported(tmp_path, config, **MICRO)
    assert imported(tmp_path, config, dropped=("mine",), **MICRO).ignored["mine"] == "by --drop"


@pytest.mark.parametrize(("stage", "strategy"), [
    (0, "ddp"), (1, "deepspeed1"), (2, "deepspeed2"), (3, "deepspeed3")
])
def test_each_stage_has_its_strategy(tmp_path, stage, strategy):
    config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": False}}
    result = imported(tmp_path, config)
    assert result.scenario.strategy == strategy
    assert result.scenario.optimizer.clip_norm == 1.0


def test_gradients_of_bf16_are_searched_as_deepspeed_does_by_default(tmp_path):
    """All ranks take the largest of a byte in each step."""
    config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    off = config | {"bf16": {"enabled": True, "check_grad_overflow": False}}
    answers = [
        sum(
            op.nbytes == 1
            for op in plan(imported(tmp_path, each).scenario, device="cpu").ranks[0].steady
        )
        for each in (config, off)
    ]
    assert answers == [1, 0]


@pytest.mark.parametrize(("stage", "tables", "told"), [
    (3, {"bf16": {"enabled": True, "check_grad_overflow": False}}, "bf16.check_grad_overflow"),
    (2, {"zero": {"prefetch_bucket_size": 5}}, "zero_optimization.prefetch_bucket_size"),
    (1, {"zero": {"enable_sanity_checks": True}}, "zero_optimization.enable_sanity_checks"),
])
def test_keys_that_a_stage_does_not_read_are_left_out(tmp_path, stage, tables, told):
    zero = {"stage": stage} | tables.pop("zero", {})
    assert told in imported(tmp_path, {"zero_optimization": zero} | tables).ignored


def test_deepspeeds_own_bound_on_what_stays_whole_is_none(tmp_path):
    key, none = "stage3_model_persistence_threshold", 2**63 - 1
    zeros: list[dict[str, int]] = [{"model_persistence_threshold": 300}, {key: none}, {}]
    results = [imported(tmp_path, {"zero_optimization": {"stage": 3} | zero}) for zero in zeros]
    assert [getattr(result.scenario.options, key) for result in results] == [300, 10**12, 10**12]


ON_NVME = {"device": "nvme", "nvme_path": "/local"}
WITH_DRIVES = {
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "gradient_clipping": 0.5,
    "zero_optimization": {
        "stage": 3, "reduce_bucket_size": 5e8, "overlap_comm": True, "sub_group_size": 1e8,
        "offload_optimizer": ON_NVME | {"buffer_count": 8, "pipeline_read": True},
    },
    "aio": {"block_size": 262144, "queue_depth": 32, "intra_op_parallelism": 2,
            "single_submit": False, "thread_count": 4},
}


@pytest.mark.parametrize("parameters", ["none", "cpu"])
def test_a_config_with_the_optimizer_on_drives_is_the_engine_with_its_buffers_and_requests(
    parameters, tmp_path
):
    config = deepcopy(WITH_DRIVES)
    config["zero_optimization"]["offload_param"] = {"device": parameters}
    made = imported(tmp_path, config, **MICRO)
    offload = made.scenario.offload
    assert made.scenario.strategy == "deepspeed3"
    assert (offload.optimizer, offload.parameters) == (
        "nvme", None if parameters == "none" else "cpu"
    )
    assert (offload.buffer_count, offload.pipeline_read) == (8, True)
    assert (offload.block_size, offload.queue_depth) == (2**18, 2 * 32)
    assert made.scenario.options.sub_group_size == 10**8
    assert made.scenario.optimizer.clip_norm == 0.5
    assert not any("stands in" in line for line in made.assumed)
    assert (
        "offload.queue_depth = 64: queue_depth 32 of each of 2 threads (intra_op_parallelism); "
        "files are of whole KiB, as with one thread, and not of 2 KiB"
    ) in made.assumed
    assert made.ignored["aio.thread_count"] == (
        "the older name of intra_op_parallelism, which DeepSpeed does not read"
    )
    assert "aio.single_submit" in made.ignored


def test_one_thread_for_drives_has_nothing_assumed(tmp_path):
    config = deepcopy(WITH_DRIVES) | {"aio": {"queue_depth": 32, "intra_op_parallelism": 1}}
    made = imported(tmp_path, config, **MICRO)
    assert made.scenario.offload.queue_depth == 32
    assert not any("thread" in line for line in made.assumed)


def test_threads_without_a_depth_have_deepspeeds_own_each_and_gds_is_refused(tmp_path):
    config = deepcopy(WITH_DRIVES) | {"aio": {"intra_op_parallelism": 3}}
    assert imported(tmp_path, config, **MICRO).scenario.offload.queue_depth == 3 * 8
    with pytest.raises(ScenarioError, match="aio.use_gds: expected false, found true"):
        imported(tmp_path, config | {"aio": {"use_gds": True}}, **MICRO)


@pytest.mark.parametrize("stage", [1, 2])
def test_drives_at_stages_1_and_2_are_host_memory_as_deepspeed_takes_them(stage, tmp_path):
    config = deepcopy(WITH_DRIVES)
    config["zero_optimization"]["stage"] = stage
    made = imported(tmp_path, config, **MICRO)
    assert made.scenario.strategy == f"deepspeed{stage}"
    assert made.scenario.offload.optimizer == "cpu"
    assert f'offload.optimizer = "cpu": at stage {stage} DeepSpeed takes nvme for cpu' in (
        made.assumed
    )
    assert "aio" in made.ignored


def test_a_config_with_parameters_on_drives_is_the_engine_with_its_buffers_and_what_stays(
    tmp_path
):
    config = deepcopy(WITH_DRIVES)
    config["zero_optimization"]["offload_param"] = ON_NVME | {
        "buffer_count": 9, "buffer_size": 2e8, "max_in_cpu": 1e8
    }
    made = imported(tmp_path, config, **MICRO)
    offload = made.scenario.offload
    assert made.scenario.strategy == "deepspeed3"
    assert (offload.optimizer, offload.parameters) == ("nvme", "nvme")
    assert (offload.buffer_count, offload.parameter_buffer_count) == (8, 9)
    assert (offload.parameter_buffer_size, offload.max_in_cpu) == (2 * 10**8, 10**8)
    written = json.loads(export_config(made.scenario, "deepspeed").text)
    moved = written["zero_optimization"]["offload_param"]
    assert {key: moved[key] for key in ("buffer_count", "buffer_size", "max_in_cpu")} == {
        "buffer_count": 9, "buffer_size": 2 * 10**8, "max_in_cpu": 10**8
    }
    assert not any("stands in" in line for line in made.assumed)


def test_sizes_of_parameters_on_drives_are_left_out_with_those_on_the_host(tmp_path):
    moved = {"device": "cpu"}
    zero = {"stage": 3, "offload_optimizer": moved | {"buffer_size": 10},
            "offload_param": moved | {"max_in_cpu": 10, "buffer_count": 7}}
    made = imported(tmp_path, {"zero_optimization": zero})
    assert made.scenario.offload.max_in_cpu == 10**9
    assert made.ignored["zero_optimization.offload_optimizer.buffer_size"] == (
        "an option of parameters on drives"
    )


def test_parameters_on_the_host_under_an_optimizer_on_the_device_are_so_and_are_written_so(
    tmp_path
):
    moved = {"device": "cpu", "pin_memory": False}
    made = imported(tmp_path, {"zero_optimization": {"stage": 3, "offload_param": moved}})
    assert made.scenario.offload == Offload(parameters="cpu", pin_memory=False)
    zero = json.loads(export_config(made.scenario, "deepspeed").text)["zero_optimization"]
    assert (zero["offload_param"], "offload_optimizer" in zero) == (moved, False)


@pytest.mark.parametrize("optimizer", [{"device": "cpu"}, None])
def test_parameters_on_drives_without_the_optimizer_there_are_refused(optimizer, tmp_path):
    zero = {"stage": 3, "offload_optimizer": optimizer, "offload_param": ON_NVME}
    with pytest.raises(ScenarioError) as caught:
        imported(tmp_path, {"zero_optimization": zero, "aio": {"block_size": 2**20}})
    assert (
        "zero_optimization.offload_optimizer.device: expected nvme with offload_param on nvme, "
        f"found {optimizer['device'] if optimizer else 'none'}"
    ) in problems(caught.value)


@pytest.mark.parametrize(("leaves", "said"), [
    ({"names": ["blocks.0"]}, 'names: expected every block, ["blocks.0", "blocks.1"'),
    ({"names": "blocks.0"}, 'found "blocks.0"; other leaves are not modelled'),
    ({"classes": ["Block"]}, 'classes: expected null, found ["Block"]; strategy.leaf_module'),
    (["blocks.0"], "leaf_module: expected a table"),
])
def test_leaf_modules_other_than_all_blocks_are_refused(tmp_path, leaves, said):
    with pytest.raises(ScenarioError) as caught:
        imported(tmp_path, {"zero_optimization": {"stage": 3, "leaf_module": leaves}})
    assert said in problems(caught.value)
