"""Arguments of Megatron and nanotron's YAML have model, batch and ranks in them, and are read as
text."""

from __future__ import annotations

import pytest

from tests.support.configs import imported
from zsim import ScenarioError

SCRIPT = """\
#!/bin/bash
# --num-layers 99
GPUS_PER_NODE=4
NUM_NODES=${NUM_NODES:-1}
WIDTH=64
TRAINING_ARGS=(
    --micro-batch-size 2 --global-batch-size 32   # of all ranks
    --bf16 --clip-grad 1.0 --lr 6.0e-5 --lr-decay-style cosine
)
MODEL_ARGS="
    --num-layers 2 \\
    --hidden-size $WIDTH \\
    --ffn-hidden-size $((2*$WIDTH)) \\
    --num-attention-heads 4 --swiglu --position-embedding-type rope --normalization RMSNorm \\
    --group-query-attention --num-query-groups 2 --seq-length 64 --disable-bias-linear \\
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
"
rm -rf "$(touch executed)"
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES pretrain_gpt.py ${MODEL_ARGS} \\
    ${TRAINING_ARGS[@]} "--vocab-size 250" --use-distributed-optimizer --save $CHECKPOINTS
"""
OPEN = {"batch__sequence_length": None, "batch__micro_batch": None, "cluster__ranks": None,
        "model": None}


def script(folder, text=SCRIPT, **answers):
    """The import of a shell script."""
    return imported(folder, text, "megatron", name="train.sh", **OPEN | answers)


def test_a_script_is_a_llama_under_zero_1(tmp_path):
    result = script(tmp_path)
    assert result.scenario.tables == {
        "model": {"family": "llama", "sizes": {
            "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2,
            "feed_forward": 128, "vocabulary": 256, "tied": False, "attention": "sdpa",
            "loss_dtype": "float32", "qkv_bias": False, "output_bias": False, "mlp_bias": False,
        }},
        "batch": {"micro_batch": 2, "accumulation": 4, "sequence_length": 64},
        "cluster": {"preset": "cpu-gloo", "ranks": 4},
        "strategy": {"name": "zero1", "sync": "last", "granularity": "4000000000000 B"},
        "precision": {"parameters": "bf16", "reduce": "fp32"},
        "execution": {"accumulation": "fp32", "loss": "composite"},
        "optimizer": {
            "name": "adamw", "implementation": "fused", "learning_rate": 6e-5,
            "weight_decay": 0.01, "clip_norm": 1.0,
        },
    }
    assert {"save", "lr_decay_style"} <= set(result.ignored)
    assert not (tmp_path / "executed").exists()


def test_a_gpt_has_learned_positions_and_gpt_2s_vocabulary(tmp_path):
    text = "train --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 " \
           "--max-position-embeddings 64 --micro-batch-size 1 --hidden-dropout 0.0 --fp16"
    result = script(tmp_path, text, cluster__ranks=2)
    sizes = result.scenario.tables["model"]["sizes"]
    assert (sizes["vocabulary"], sizes["max_positions"], sizes["tied"]) == (50304, 64, True)
    assert (sizes["attention_dropout"], sizes["residual_dropout"]) == (0.1, 0.0)
    assert result.scenario.strategy == "ddp"


def test_arguments_in_a_variable_of_one_line_count_once(tmp_path):
    text = SCRIPT.replace(
        "torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES",
        'LAUNCH="--nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES"\ntorchrun $LAUNCH',
    )
    assert script(tmp_path, text).scenario.tables == script(tmp_path).scenario.tables


def test_yaml_of_arguments_is_the_same_as_a_script(tmp_path):
    text = "ENV_VARS:\n  A: 1\nMODEL_ARGS:\n  --num-layers: 2\n  --hidden-size: 64\n" \
           "  --num-attention-heads: 4\n  --seq-length: 64\n  --micro-batch-size: 1\n" \
           "  --max-position-embeddings: 64\n  --bf16: true\n"
    result = imported(tmp_path, text, name="model_config.yaml", **OPEN | {"cluster__ranks": 2})
    assert result.kind == "megatron"
    assert result.scenario.model.num_parameters > 0


@pytest.mark.parametrize(("more", "said"), [
    ("--num-layers 3", 'num_layers: expected a whole number, found "2 and 3"'),
    ("--tensor-model-parallel-size 2", "--drop tensor_model_parallel_size leaves it out"),
    ("--num-experts 8", 'num_experts: expected 1, found "8"'),
    ("--deepspeed --deepspeed_config ds.json --zero-stage 1", "in its ds_config.json"),
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 1",
     "recompute_num_layers: expected 1, found 1 of method block"),
    ("--clip-gard 1", r"clip_gard: unknown key, did you mean clip_grad\?"),
    ("--fp16", "fp16: contradictory"),
])
def test_arguments_that_contradict_or_are_not_modelled_are_named(tmp_path, more, said):
    with pytest.raises(ScenarioError, match=said):
        script(tmp_path, SCRIPT + f"\nother {more}\n")


def test_ranks_that_share_a_product_are_data_parallel_where_the_user_drops_it(tmp_path):
    text = SCRIPT + "\nother --tensor-model-parallel-size 2\n"
    result = script(tmp_path, text, dropped=("tensor_model_parallel_size",))
    assert result.scenario.tables == script(tmp_path).scenario.tables
    result = nanotron(tmp_path, tp="2", dropped=("parallelism.tp",))
    assert result.scenario.world_size == 2


@pytest.mark.parametrize("arguments", [
    "pretrain_bert.py", "pretrain_t5.py --tokenizer-type BertWordPieceCase --vocab-extra-ids 100",
    "train.py --tokenizer-type BertWordPieceLowerCase",
])
def test_an_encoder_is_no_gpt_but_for_a_model_of_the_user(tmp_path, arguments):
    text = f"{arguments} --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 " \
           "--micro-batch-size 1 --num_gpus 2"
    with pytest.raises(ScenarioError, match="expected a GPT's arguments") as caught:
        script(tmp_path, text)
    assert "vocabulary" not in str(caught.value)
    assert script(tmp_path, text, model="gpt-tiny").scenario.world_size == 2


def test_options_of_experts_are_left_out_where_there_are_none(tmp_path):
    text = SCRIPT + "\nother --num-experts 1 --moe-router-topk 2 --disable-moe-token-dropping\n"
    assert {"moe_router_topk", "disable_moe_token_dropping"} <= set(script(tmp_path, text).ignored)


NANOTRON = """\
checkpoints: {checkpoint_interval: 10}
general: {project: debug, seed: 42}
model:
  ddp_bucket_cap_mb: 25
  dtype: bfloat16
  init_method: {std: 0.025}
  make_vocab_size_divisible_by: 8
  model_config: {hidden_size: 16, intermediate_size: 64, is_llama_config: true,
    num_attention_heads: 4, num_hidden_layers: 2, num_key_value_heads: 4, rms_norm_eps: 1.0e-05,
    tie_word_embeddings: true, vocab_size: 250}
optimizer:
  accumulate_grad_in_fp32: true
  clip_grad: 1.0
  learning_rate_scheduler: {learning_rate: 0.0003, lr_warmup_steps: 2}
  optimizer_factory: {adam_eps: 1.0e-08, name: adamW, torch_adam_is_fused: true}
  weight_decay: 0.01
  zero_stage: STAGE
parallelism: {dp: 2, pp: 1, tp: TP, tp_mode: REDUCE_SCATTER}
tokenizer: {tokenizer_name_or_path: gpt2}
tokens: {batch_accumulation_per_replica: 4, micro_batch_size: 2, sequence_length: 32,
  train_steps: 15}
"""


def nanotron(folder, *, stage="0", tp="1", text=NANOTRON, dropped=()):
    """The import of a nanotron config."""
    text = text.replace("STAGE", stage).replace("TP", tp)
    return imported(folder, text, name="config.yaml", dropped=dropped, **OPEN)


@pytest.mark.parametrize(("stage", "strategy"), [
    ("0", {"name": "ddp", "bucket_cap_mb": 25.0, "gradient_as_bucket_view": True, "sync": "last"}),
    ("1", {"name": "zero1", "granularity": "26214400 B", "sync": "last"}),
    ("3", {"name": "zero1", "granularity": "26214400 B", "sync": "last"}),
])
def test_every_zero_stage_of_nanotron_is_zero_1(tmp_path, stage, strategy):
    result = nanotron(tmp_path, stage=stage)
    assert result.kind == "nanotron"
    assert result.scenario.tables["strategy"] == strategy
    assert result.scenario.tables["model"]["sizes"]["vocabulary"] == 256
    assert result.scenario.tables["batch"] == {
        "micro_batch": 2, "accumulation": 4, "sequence_length": 32
    }
    assert result.scenario.world_size == 2


@pytest.mark.parametrize(("change", "said"), [
    ({"tp": "2"}, "parallelism.tp: expected 1, found 2; tensor and pipeline"),
    ({"text": NANOTRON.replace("dtype: bfloat16", "dtype: int8")}, "model.dtype: expected "),
    ({"text": NANOTRON.replace("clip_grad", "clip_gard")}, "optimizer.clip_gard: unknown key, did"),
    ({"text": NANOTRON.replace("is_llama_config: true", "is_starcoder2_config: true")},
     "expected is_llama_config or is_qwen2_config, found is_starcoder2_config; give --model$"),
])
def test_what_nanotron_has_and_zsim_not_is_named(tmp_path, change, said):
    with pytest.raises(ScenarioError, match=said):
        nanotron(tmp_path, **change)
