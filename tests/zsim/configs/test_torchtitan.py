"""torchtitan's TOML and its Python become the same scenario, and no line of Python runs."""

from __future__ import annotations

import pytest

from tests.support.configs import imported
from zsim import ScenarioError

TOML = """\
[job]
description = "Llama 3 8B"
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 1
seq_len = 8192
steps = 1000
[parallelism]
data_parallel_shard_degree = -1
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
PYTHON = """\
import os

from torchtitan.trainer import Trainer

def llama3_8b() -> Trainer.Config:
    model_spec = model_registry("8B")
    return Trainer.Config(
        model_spec=model_spec,
        optimizer=OptimizersContainer.Config(lr=3e-4),
        training=TrainingConfig(local_batch_size=1, seq_len=8192, steps=1000),
        dataloader=DataLoader.Config(dataset=open("/etc/passwd")),
        activation_checkpoint=SelectiveAC.Config(),
    )

def llama3_8b_again():
    config = llama3_8b()
    config.training.local_batch_size = 2
    config.activation_checkpoint = FullAC.Config()
    return config

def with_a_loop():
    config = llama3_8b()
    for layer in config.model_spec.layers:
        os.remove(layer)
    return config
"""
OPEN = {"batch__sequence_length": None, "batch__micro_batch": None, "cluster__ranks": None,
        "cluster__nodes": 1, "model": None, "cluster": "dgx-h100"}
TABLES = {
    "model": {"preset": "llama-3-8b", "loss_dtype": "float32"},
    "batch": {"micro_batch": 1, "accumulation": 1, "sequence_length": 8192},
    "cluster": {"preset": "dgx-h100", "nodes": 1},
    "strategy": {"name": "fsdp2", "reshard_after_forward": "auto"},
    "precision": {"parameters": "bf16", "reduce": "fp32"},
    "wrapping": {"ends": "apart"},
    "optimizer": {
        "clip_norm": 1.0, "name": "adamw", "implementation": "fused", "learning_rate": 3e-4,
        "weight_decay": 0.1,
    },
    "activation_checkpointing": {
        "mode": "selective", "save": ["linear", "attention"], "save_every": 2
    },
}


def python(folder, recipe, text=PYTHON, **answers):
    """The import of one recipe of a Python config."""
    return imported(folder, text, name="config.py", recipe=recipe, **OPEN | answers)


def toml(folder, text, **answers):
    """The import of a TOML config."""
    return imported(folder, text, name="train.toml", **OPEN | answers)


def test_toml_and_python_mean_the_same(tmp_path):
    assert toml(tmp_path, TOML).scenario.tables == TABLES
    assert python(tmp_path, "llama3_8b").scenario.tables == TABLES


def test_a_recipe_may_change_another(tmp_path):
    tables = python(tmp_path, "llama3_8b_again").scenario.tables
    assert tables["batch"]["micro_batch"] == 2
    assert tables["activation_checkpointing"] == {"mode": "full"}


def test_statements_are_named_and_not_executed(tmp_path):
    with pytest.raises(ScenarioError, match=r"line 23: for layer in .*: a statement, which is not"):
        python(tmp_path, "with_a_loop")
    assert python(tmp_path, "with_a_loop", dropped=("statements",)).scenario.tables == TABLES


def test_a_file_of_several_recipes_asks_for_one(tmp_path):
    with pytest.raises(ScenarioError, match="--recipe with llama3_8b, llama3_8b_again or"):
        python(tmp_path, "")


def test_a_value_that_is_an_expression_is_refused_where_it_matters(tmp_path):
    text = PYTHON.replace("local_batch_size=1", "local_batch_size=int(os.environ['B'])")
    with pytest.raises(ScenarioError, match="local_batch_size: expected a whole number"):
        python(tmp_path, "llama3_8b", text)


@pytest.mark.parametrize("text", [
    "def f(:\n", "x = 1\n", "def a():\n    return b()\ndef b():\n    return a()\n",
    "def a():\n    return " + "[" * 300 + "]" * 300, "def a():\n    return a" + ".b" * 950 + "()",
])
def test_python_that_is_no_config_is_refused(tmp_path, text):
    with pytest.raises(ScenarioError):
        imported(tmp_path, text, "torchtitan", name="config.py", recipe="a")


@pytest.mark.parametrize(("more", "key", "value"), [
    ("", "activation_checkpointing", {"mode": "full", "every": 2}),
    ("[training]\nnum_tokens_per_microbatch_per_dp_rank = 8192\nmax_context_length = 4096\n"
     "num_tokens_per_train_step = 131072\n", "batch",
     {"micro_batch": 2, "accumulation": 2, "sequence_length": 4096}),
    ("[training]\nlocal_batch_size = 2\nglobal_batch_size = 64\nseq_len = 128\n", "batch",
     {"micro_batch": 2, "accumulation": 4, "sequence_length": 128}),
    ('[parallelism]\ndata_parallel_replicate_degree = 2\nfsdp_reshard_after_forward = "never"\n'
     "data_parallel_shard_degree = 4\n", "strategy",
     {"name": "hsdp", "reshard_after_forward": False, "dp_replicate": 2, "dp_shard": 4}),
    ("[parallelism]\ndata_parallel_replicate_degree = 8\ndata_parallel_shard_degree = 1\n",
     "strategy", {"name": "ddp", "dp_replicate": 8}),
    ("[compile]\nenable = true\n", "execution", {"compile": True}),
    ('[compile]\nenable = true\ncomponents = ["model"]\n', "execution", {"compile": "blocks"}),
    ('[compile]\nenable = true\ncomponents = ["model", "loss"]\n', "execution",
     {"compile": True}),
])
def test_each_part_of_toml_has_its_table(tmp_path, more, key, value):
    text = f'[job]\n[lr_scheduler]\n[model]\nname = "llama3"\nflavor = "8B"\n{more}'
    for table in ("training", "parallelism"):
        text += "" if f"[{table}]" in more else f"[{table}]\n"
    assert toml(tmp_path, text).scenario.tables[key] == value


def test_float8_all_gathers_are_assumed_away_and_said(tmp_path):
    text = TOML.replace('flavor = "8B"', 'flavor = "8B"\nconverters = ["float8"]')
    result = toml(tmp_path, text + "[float8]\nenable_fsdp_float8_all_gather = true\n")
    assert result.scenario.tables["execution"] == {"float8": "tensorwise"}
    assert any("float8 all-gathers move half" in sentence for sentence in result.assumed)


@pytest.mark.parametrize(("before", "after", "said"), [
    ("seq_len", "seq_length", r"training.seq_length: unknown key, did you mean seq_len\?"),
    ('mode = "selective"', 'mode = "memory_budget"', "a memory budget, which is not modelled"),
    ("data_parallel_shard_degree = -1", "tensor_parallel_degree = 8",
     "tensor_parallel_degree: expected 1, found 8"),
    ("data_parallel_shard_degree = -1", "context_parallel_degree = 2", "expected 1, found 2"),
    ('flavor = "8B"', 'flavor = "9B"', "model: missing: model is llama3 9B, which no preset is"),
    ("[parallelism]", "max_norm = 0.0\n[parallelism]",
     "training.max_norm: expected above 0, found 0, by which .* inf clips none"),
    ("[parallelism]", '[compile]\nenable = true\ncomponents = ["loss"]\n[parallelism]',
     'compile.components: expected "model", or "model" and "loss"'),
])
def test_what_is_wrong_or_not_modelled_is_named(tmp_path, before, after, said):
    with pytest.raises(ScenarioError, match=said):
        toml(tmp_path, TOML.replace(before, after))
