"""accelerate's YAML and TrainingArguments become the strategy that accelerate would make."""

from __future__ import annotations

import json

import pytest

import zsim
from tests.support.configs import imported, problems
from zsim import ScenarioError

YAML = """\
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
mixed_precision: {precision}
num_machines: 1
num_processes: 4
"""
FSDP = YAML.format(kind="FSDP", precision="bf16") + "fsdp_config:\n"
BLOCKS = "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"


def strategy(folder, text, **settings):
    """The strategy table, and the rest, of an accelerate config."""
    tables = imported(folder, text, name="config.yaml", cluster__ranks=None, **settings)
    return tables.scenario.tables["strategy"], tables


def test_fsdp_1_is_what_accelerate_takes_without_a_version(tmp_path):
    text = FSDP + BLOCKS + (
        "  fsdp_sharding_strategy: SHARD_GRAD_OP\n  fsdp_backward_prefetch: BACKWARD_PRE\n"
        "  fsdp_use_orig_params: 'true'\n  fsdp_state_dict_type: FULL_STATE_DICT\n"
        "  fsdp_activation_checkpointing: true\n"
    )
    table, result = strategy(tmp_path, text)
    assert table == {
        "name": "fsdp1", "sharding": "grad_op", "backward_prefetch": "pre",
        "forward_prefetch": False, "use_orig_params": True, "limit_all_gathers": True,
        "sync": "last",
    }
    assert result.scenario.tables["precision"] == {"parameters": "bf16", "reduce": "bf16"}
    assert result.scenario.checkpointing.mode == "full"
    assert result.scenario.world_size == 4
    assert "fsdp_config.fsdp_state_dict_type" in result.ignored


@pytest.mark.parametrize(("model", "ends"), [("llama-tiny", "apart"), ("gpt-tiny", "root")])
def test_fsdp_2_has_ends_apart_unless_they_share_a_weight(tmp_path, model, ends):
    text = FSDP + BLOCKS + "  fsdp_version: 2\n  fsdp_reshard_after_forward: false\n"
    table, result = strategy(tmp_path, text, model=model)
    assert table == {"name": "fsdp2", "reshard_after_forward": False, "sync": "last"}
    assert result.scenario.wrapping.ends == ends


def test_replicas_of_the_mesh_make_hsdp(tmp_path):
    text = FSDP + BLOCKS + (
        "  fsdp_version: 2\nparallelism_config:\n  parallelism_config_dp_replicate_size: 2\n"
        "  parallelism_config_dp_shard_size: 2\n"
    )
    table, _ = strategy(tmp_path, text)
    assert table == {
        "name": "hsdp", "dp_replicate": 2, "dp_shard": 2, "reshard_after_forward": "auto",
        "sync": "last",
    }


def test_without_a_policy_fsdp_wraps_the_whole_model(tmp_path):
    assert strategy(tmp_path, FSDP)[1].scenario.wrapping.every == "all"


def test_a_bare_no_of_yaml_is_no(tmp_path):
    table, result = strategy(tmp_path, YAML.format(kind="NO", precision="no"))
    assert table == {"name": "ddp", "sync": "last"}
    assert result.scenario.precision.autocast == "none"


@pytest.mark.parametrize("kind", ["'NO'", "MULTI_GPU"])
def test_one_process_is_a_plain_module_whatever_the_type_is(tmp_path, kind):
    """Accelerator.prepare_model wraps in DDP where there are several processes."""
    text = YAML.format(kind=kind, precision="bf16").replace("processes: 4", "processes: 1")
    table, result = strategy(tmp_path, text)
    assert table == {"name": "single"}
    assert result.scenario.tables["precision"] == {"autocast": "bf16"}
    assert result.scenario.tables["cluster"] == {"preset": "cpu-gloo", "ranks": 1}


@pytest.mark.parametrize(("ranks", "name", "ignored"), [(1, "single", True), (4, "ddp", False)])
def test_training_arguments_without_fsdp_are_ddp_or_on_one_process_a_plain_module(
    tmp_path, ranks, name, ignored
):
    arguments = {"per_device_train_batch_size": 2, "bf16": True, "ddp_bucket_cap_mb": 50}
    result = imported(
        tmp_path, arguments, batch__micro_batch=None, cluster__ranks=ranks
    )
    assert result.scenario.strategy == name
    assert ("ddp_bucket_cap_mb" in result.ignored) is ignored


def test_several_gpus_are_ddp_under_autocast(tmp_path):
    table, result = strategy(tmp_path, YAML.format(kind="MULTI_GPU", precision="bf16"))
    assert table == {"name": "ddp", "sync": "last"}
    assert result.scenario.precision.autocast == "bfloat16"


def test_deepspeed_of_accelerate_is_a_ds_config(tmp_path):
    text = YAML.format(kind="DEEPSPEED", precision="bf16") + (
        "deepspeed_config:\n  zero_stage: 2\n  gradient_accumulation_steps: 8\n"
        "  gradient_clipping: 0.5\n  offload_optimizer_device: none\n  zero3_init_flag: false\n"
    )
    table, result = strategy(tmp_path, text)
    assert table == {"name": "deepspeed2"}
    assert result.scenario.batch.accumulation == 8
    assert result.scenario.optimizer.clip_norm == 0.5
    assert result.scenario.precision.reduce == "bfloat16"


def test_whole_weights_of_accelerate_are_those_of_its_ds_config(tmp_path):
    text = YAML.format(kind="DEEPSPEED", precision="bf16") + (
        "deepspeed_config:\n  zero_stage: 3\n  zero3_save_16bit_model: true\n"
    )
    _, result = strategy(tmp_path, text)
    assert result.scenario.checkpoint.gather_16bit_weights


def test_accelerate_may_name_a_ds_config_beside_it(tmp_path):
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}}'
    )
    text = YAML.format(kind="DEEPSPEED", precision="no")
    table, _ = strategy(tmp_path, text + "deepspeed_config:\n  deepspeed_config_file: ds.json\n")
    assert table == {"name": "deepspeed1", "reduce_bucket_size": 1000}


@pytest.mark.parametrize(("text", "said"), [
    (FSDP + "  fsdp_versoin: 2\n", "fsdp_config.fsdp_versoin: unknown key, did you mean version?"),
    (FSDP + "  fsdp_min_num_params: 100\n", "units by size"),
    (FSDP + "  fsdp_sharding_strategy: HALF\n", "expected FULL_SHARD"),
    (YAML.format(kind="MEGATRON_LM", precision="no"), "distributed_type: expected NO"),
    (YAML.format(kind="FSDP", precision="no") + "parallelism_config:\n  cp_size: 2\n",
     "parallelism_config.cp_size: expected 1, found 2"),
    (YAML.format(kind="FSDP", precision="no").replace("machines: 1", "machines: 3"),
     "num_processes: contradictory: expected a multiple of the 3 machines, found 4"),
    (FSDP + BLOCKS + "parallelism_config:\n  tp_size: 2\n",
     "parallelism_config.tp_size: expected 1, found 2"),
])
def test_what_accelerate_cannot_mean_or_zsim_not_do_is_named(tmp_path, text, said):
    with pytest.raises(ScenarioError) as caught:
        strategy(tmp_path, text)
    assert said in str(caught.value)


@pytest.mark.parametrize(("processes", "machines", "ranks"), [(16, 2, 16), (4, 1, 4), (8, 1, 8)])
def test_processes_are_whole_nodes_of_gpus_or_some_of_one(tmp_path, processes, machines, ranks):
    text = (FSDP + BLOCKS).replace("processes: 4", f"processes: {processes}")
    text = text.replace("machines: 1", f"machines: {machines}")
    assert strategy(tmp_path, text, cluster="dgx-h100")[1].scenario.world_size == ranks


@pytest.mark.parametrize(("processes", "machines"), [(12, 1), (4, 2), (16, 4)])
def test_other_numbers_of_processes_are_refused(tmp_path, processes, machines):
    text = (FSDP + BLOCKS).replace("processes: 4", f"processes: {processes}")
    text = text.replace("machines: 1", f"machines: {machines}")
    with pytest.raises(ScenarioError, match="expected whole nodes of dgx-h100, 8 GPUs each"):
        strategy(tmp_path, text, cluster="dgx-h100")


ARGUMENTS = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "bf16": True,
    "max_grad_norm": 0.3, "learning_rate": 2e-5, "warmup_ratio": 0.1, "output_dir": "out",
    "gradient_checkpointing": True, "max_length": 32, "optim": "adamw_torch",
}


def arguments(folder, **more):
    """The scenario's tables of ARGUMENTS and `more`."""
    return imported(
        folder, ARGUMENTS | more, batch__micro_batch=None, batch__sequence_length=None
    ).scenario.tables


def test_arguments_without_fsdp_are_ddp(tmp_path):
    assert arguments(tmp_path) == {
        "model": {"preset": "gpt-tiny", "loss_dtype": "float32"},
        "cluster": {"preset": "cpu-gloo", "ranks": 4},
        "batch": {"micro_batch": 2, "accumulation": 4, "sequence_length": 32},
        "strategy": {"name": "ddp", "find_unused_parameters": False, "sync": "last"},
        "precision": {"autocast": "bf16"},
        "optimizer": {
            "name": "adamw", "implementation": "foreach", "learning_rate": 2e-5,
            "weight_decay": 0.0, "clip_norm": 0.3,
        },
        "activation_checkpointing": {"mode": "full"},
    }


def test_a_preset_keeps_what_the_module_of_its_config_json_keeps(tmp_path):
    """The loss is in float32 there, which for a large vocabulary is a third of the peak."""
    (tmp_path / "llama.json").write_text(json.dumps({
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "vocab_size": 128256, "hidden_act": "silu", "tie_word_embeddings": True,
    }))

    def peak(model, **settings):
        result = imported(
            tmp_path, ARGUMENTS | {"max_length": 2048, "fsdp": "full_shard", "fsdp_config": {}},
            name="args.json", model=model, cluster="dgx-h100", cluster__ranks=None,
            cluster__nodes=1, batch__micro_batch=None, batch__sequence_length=None, **settings,
        )
        return zsim.simulate(result.scenario).peak_memory

    of_module = peak(str(tmp_path / "llama.json"))
    assert peak("llama-3.2-1b") == pytest.approx(of_module, rel=0.005)
    narrow = {"model__loss_dtype": "model", "execution__norms": "fused"}
    assert peak("llama-3.2-1b", **narrow) < 0.8 * of_module


def test_accelerate_asks_whose_module_a_preset_stands_for(tmp_path):
    of_preset = imported(tmp_path, FSDP + BLOCKS, name="config.yaml").assumed
    assert any("--set model.loss_dtype=float32" in said for said in of_preset)


def test_torchaos_optimizer_in_eight_bits_is_not_that_in_four_bytes(tmp_path):
    assert arguments(tmp_path, optim="adamw_torch_8bit")["optimizer"]["name"] == "adamw8bit"


def test_fsdp_config_is_version_2_unless_it_says_so(tmp_path):
    second = arguments(tmp_path, fsdp="full_shard auto_wrap", fsdp_config={})
    assert second["strategy"] == {
        "name": "fsdp2", "reshard_after_forward": "auto", "sync": "last",
    }
    first = arguments(tmp_path, fsdp="shard_grad_op auto_wrap", fsdp_config={"fsdp_version": 1})
    assert first["strategy"]["name"] == "fsdp1"
    assert first["strategy"]["sharding"] == "grad_op"
    assert first["strategy"]["use_orig_params"] is True
    assert second["precision"] == {"parameters": "bf16", "reduce": "bf16"}


def test_gradients_are_reduced_after_the_last_micro_batch_unless_each_is_asked(tmp_path):
    """The Trainer enters accelerate's no_sync before the last: ranks keep whole gradients."""
    text, each = {"fsdp": "full_shard auto_wrap"}, {"sync_each_batch": True, "num_steps": 4}
    config = {"split_batches": False, "gradient_accumulation_kwargs": each}
    assert "sync" not in arguments(tmp_path, **text, accelerator_config=config)["strategy"]
    config["gradient_accumulation_kwargs"] = {}
    assert arguments(tmp_path, **text, accelerator_config=config)["strategy"]["sync"] == "last"
    zero = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2}
    assert "sync" not in arguments(tmp_path, deepspeed=zero)["strategy"]


@pytest.mark.parametrize(("arguments_of_it", "unused"), [
    ({"gradient_checkpointing": False}, True), ({"gradient_checkpointing": True}, False),
    ({"gradient_checkpointing": False, "ddp_find_unused_parameters": False}, False),
    ({"gradient_checkpointing": False, "base_model": "a/b"}, False),
])
def test_ddp_looks_for_unused_parameters_as_the_trainer_has_it(tmp_path, arguments_of_it, unused):
    """transformers 5.24 does where nothing is checkpointed, and steps take 3 to 11 % longer."""
    tables = arguments(tmp_path, **arguments_of_it)
    assert tables["strategy"]["find_unused_parameters"] is unused


def test_the_trainer_fills_in_what_its_ds_config_leaves_open(tmp_path):
    config = {
        "zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto", "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    tables = arguments(tmp_path, deepspeed=config)
    assert tables["strategy"] == {"name": "deepspeed2"}
    assert tables["batch"]["micro_batch"] == 2
    assert tables["precision"] == {"parameters": "bf16", "reduce": "bf16"}
    assert tables["optimizer"]["clip_norm"] == 0.3


@pytest.mark.parametrize(("more", "said"), [
    ({"fp16": True}, "fp16: contradictory"),
    ({"use_liger_kernel": True}, "use_liger_kernel: expected false, found true"),
    ({"enable_liger_kernel": True}, "enable_liger_kernel: expected false, found true"),
    ({"optim": "adamw_8bit"}, "optim: expected torch's AdamW"),
    ({"optim": "paged_adamw_8bit", "deepspeed": {"zero_optimization": {"stage": 2}}},
     "optim: expected adamw_torch beside deepspeed, found paged_adamw_8bit"),
    ({"stage": "dpo"}, "stage: expected sft or pt, found another"),
    ({"finetuning_type": "lora"}, 'finetuning_type: expected "full", found "lora"'),
    ({"num_generations": 7, "use_vllm": True}, "reinforcement learning generates text"),
    ({"per_device_batch_size": 1}, "per_device_batch_size: unknown key, did you mean"),
])
def test_arguments_that_are_wrong_or_not_modelled_are_named(tmp_path, more, said):
    with pytest.raises(ScenarioError) as caught:
        arguments(tmp_path, **more)
    assert said in problems(caught.value)


def test_the_launcher_keeps_original_parameters_where_a_config_does_not_say(tmp_path):
    assert strategy(tmp_path, FSDP + BLOCKS)[0]["use_orig_params"] is True


def test_dynamo_compiles_the_step(tmp_path):
    text = FSDP + BLOCKS + "dynamo_config:\n  dynamo_backend: {}\n"
    assert strategy(tmp_path, text.format("INDUCTOR"))[1].scenario.execution.compile
    assert not strategy(tmp_path, text.format("'NO'"))[1].scenario.execution.compile


def test_ranks_on_cpus_are_none_of_a_cluster_of_gpus(tmp_path):
    with pytest.raises(ScenarioError, match="use_cpu: expected false on a cluster of GPUs"):
        strategy(tmp_path, FSDP + BLOCKS + "use_cpu: true\n", cluster="dgx-h100")


def test_what_makes_yaml_unreadable_is_told_without_a_kind_too(tmp_path):
    path = tmp_path / "alias.yaml"
    path.write_text("a: &x 1\nb: *x\n")
    with pytest.raises(ScenarioError, match="expected no anchors and aliases"):
        zsim.import_config(path)
