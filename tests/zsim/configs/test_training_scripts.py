"""Configs of axolotl and LLaMA-Factory are TrainingArguments with own keys and defaults."""

from __future__ import annotations

import pytest

from tests.support.configs import imported
from zsim import ScenarioError

OPEN = {"batch__sequence_length": None, "batch__micro_batch": None}
AXOLOTL = """\
base_model: example/Llama-3.2-1B-Instruct
model_type: AutoModelForCausalLM
datasets:
  - path: example/instructions
    type: alpaca
val_set_size: 0.1
sequence_len: 64
sample_packing: true
adapter:
lora_r:
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 2e-5
bf16: auto
gradient_checkpointing: true
wandb_project: example
saves_per_epoch: 1
special_tokens:
  pad_token: "<pad>"
"""
FACTORY = """\
model_name_or_path: example/Qwen9-4B
stage: sft
do_train: true
finetuning_type: full
dataset: mine
template: qwen
cutoff_len: 64
output_dir: out
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
bf16: true
"""


def config(folder, text, *more, **answers):
    """The import of a YAML config with lines added."""
    return imported(folder, "\n".join((text, *more)), name="config.yaml", **OPEN | answers)


@pytest.mark.parametrize("more", [
    (), ("fsdp: full_shard auto_wrap",),
    ("deepspeed: {train_micro_batch_size_per_gpu: auto, zero_optimization: {stage: 3, "
     "reduce_bucket_size: auto}}",),
])
def test_a_model_that_a_config_names_is_as_one_that_an_option_names(tmp_path, more):
    named = AXOLOTL.replace("Llama-3.2-1B-Instruct", "Meta-Llama-3-8B")
    of_config = config(tmp_path, named, *more, model=None).scenario.tables
    assert of_config == config(tmp_path, named, *more, model="llama-3-8b").scenario.tables
    assert of_config["execution"]["norms"] == "composite"


def test_an_axolotl_config_names_model_batch_and_length(tmp_path):
    result = config(tmp_path, AXOLOTL, model=None)
    tables = result.scenario.tables
    assert result.kind == "transformers"
    assert tables["model"] == {"preset": "llama-3.2-1b", "loss_dtype": "float32"}
    assert tables["batch"] == {"micro_batch": 2, "accumulation": 4, "sequence_length": 64}
    assert tables["precision"] == {"parameters": "bf16", "reduce": "bf16", "master": False}
    assert tables["activation_checkpointing"] == {"mode": "full"}
    assert tables["optimizer"]["implementation"] == "fused"
    assert {"datasets", "wandb_project", "special_tokens"} <= set(result.ignored)
    assert any("bf16 is auto" in said for said in result.assumed)


def test_axolotls_fsdp_is_the_first_unless_it_says_so(tmp_path):
    fsdp = ("fsdp_config:", "  auto_wrap_policy: TRANSFORMER_BASED_WRAP")
    first = config(tmp_path, AXOLOTL, "fsdp: [full_shard, auto_wrap]", *fsdp)
    assert first.scenario.strategy == "fsdp1"
    second = config(tmp_path, AXOLOTL, "fsdp_version: 2", "dp_replicate_size: 2", *fsdp)
    assert second.scenario.strategy == "hsdp"
    assert second.scenario.tables["precision"] == {"parameters": "bf16", "reduce": "bf16"}


def test_llama_factory_checkpoints_and_keeps_float32_unless_it_says_so(tmp_path):
    tables = config(tmp_path, FACTORY).scenario.tables
    assert tables["activation_checkpointing"] == {"mode": "full"}
    assert tables["precision"] == {"autocast": "bf16"}
    pure = config(tmp_path, FACTORY.replace("bf16", "pure_bf16"),
                  "disable_gradient_checkpointing: true").scenario.tables
    assert "activation_checkpointing" not in pure
    assert pure["precision"] == {"parameters": "bf16", "reduce": "bf16", "master": False}


def test_a_model_loaded_in_two_bytes_has_states_of_two_bytes(tmp_path):
    text = "per_device_train_batch_size: 1\nmax_length: 64\nbf16: true\ntorch_dtype: bfloat16\n"
    result = config(tmp_path, text)
    assert result.scenario.tables["precision"]["master"] is False
    assert "parameters and states of the optimizer are bf16" in "".join(result.assumed)
    sharded = config(tmp_path, text, "fsdp: full_shard auto_wrap").scenario.tables
    assert sharded["precision"] == {"parameters": "bf16", "reduce": "bf16"}


def test_a_model_that_no_preset_is_is_asked_by_its_name(tmp_path):
    with pytest.raises(ScenarioError, match="missing: model_name_or_path is example/Qwen9-4B, whi"):
        config(tmp_path, FACTORY, model=None)


def test_the_ds_config_of_a_config_is_sought_in_the_folders_above_it(tmp_path):
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "zero1.json").write_text(
        '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"},'
        ' "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}'
    )
    folder = tmp_path / "examples" / "full"
    folder.mkdir(parents=True)
    result = config(folder, FACTORY, "deepspeed: deepspeed/zero1.json", "weight_decay: 0.25")
    assert result.scenario.strategy == "deepspeed1"
    assert result.scenario.optimizer.weight_decay == 0.25


def test_a_ds_config_that_is_not_there_is_named_with_the_config_that_names_it(tmp_path):
    with pytest.raises(ScenarioError, match=r"config.yaml: examples/ds_z3.json: no such file"):
        config(tmp_path, FACTORY, "deepspeed: examples/ds_z3.json")


@pytest.mark.parametrize(("more", "said"), [
    (("finetuning_type: lora", "lora_rank: 8"), "--drop finetuning_type leaves it out: all"),
    (("use_galore: true", "galore_rank: 128"), "use_galore: expected false, found true; this opti"),
    (("freeze_vision_tower: true",), "give it as the scenario's frozen"),
    (("plugins: [a.b.Kernels]", "liger_rope: true"), "plugins: expected null"),
    (("optimizer: adamw_bnb_8bit",), "--drop optimizer for AdamW, of 8 bits with --set"),
    (("mine: 1",), "mine: unknown key; --drop mine leaves it out"),
    (("mine: 1", "yours: 2"), "mine: unknown key, and so is yours; --drop mine,yours leaves them"),
    (("mine: 1", "yours: 2", "a: 3"), "mine: unknown key, and so are yours, a; --drop mine,yours,"),
])
def test_a_refusal_is_one_line_with_its_way_out(tmp_path, more, said):
    text = FACTORY.replace("finetuning_type: full\n", "") if "lora" in more[0] else FACTORY
    with pytest.raises(ScenarioError) as caught:
        config(tmp_path, text, *more)
    (line,) = str(caught.value).splitlines()
    assert said in line


def test_dropped_keys_leave_their_default_to_the_user(tmp_path):
    result = config(tmp_path, FACTORY, "optim: adamw_bnb_8bit", dropped=("optim",),
                    optimizer__name="adamw8bit")
    assert result.scenario.optimizer.name == "adamw8bit"


def test_an_unknown_key_of_null_says_nothing(tmp_path):
    assert config(tmp_path, FACTORY, "mine:").ignored["mine"] == "null says nothing"
