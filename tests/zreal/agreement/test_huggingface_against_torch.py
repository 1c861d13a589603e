"""A config.json, simulated, against the module that transformers makes of it, trained with dropout:
events, bytes and order, all exact."""

from __future__ import annotations

import itertools
import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.agreement import differences, inexact
from tests.support.cases.sampling import one_in
from tests.zreal.agreement.test_event_order import of_program, of_torch
from tests.zreal.tracing.test_tracing_against_torch import traced_events
from zreal import backends, torch_private
from zreal.backends import requirements
from zreal.modules import modules
from zreal.modules.numerics import batches
from zreal.tracing.trace import trace
from zsim.autograd.lowered import Accumulated, NodeOver, Recomputed
from zsim.autograd.lowering.lower_model import lower
from zsim.errors import BackendUnavailableError, ScenarioError
from zsim.ir.ops import Alloc, Free
from zsim.models.families import huggingface
from zsim.models.training_options import DTYPE_NBYTES, Dtype
from zsim.runs.backend import RunOptions
from zsim.scenario.scenario import Scenario, parse

transformers = pytest.importorskip("transformers", minversion="5")

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 160, "vocab_size": 320,
    "max_position_embeddings": 64,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_layer": 6, "n_embd": 64, "n_head": 4, "vocab_size": 320,
    "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA, "mistral": LLAMA | {"model_type": "mistral", "sliding_window": None},
    "qwen2": LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 32},
    "qwen3, biases, tied, not grouped": LLAMA
    | {
        "model_type": "qwen3", "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True,
        "num_key_value_heads": 4,
    },
    "gemma": LLAMA | {"model_type": "gemma", "head_dim": 32},
    "gemma, biases, untied, one head of keys": LLAMA
    | {
        "model_type": "gemma", "head_dim": 16, "attention_bias": True, "tie_word_embeddings": False,
        "num_key_value_heads": 1,
    },
    "phi3": LLAMA | {"model_type": "phi3", "pad_token_id": 0},
    "phi3, a part turned, not grouped": LLAMA
    | {
        "model_type": "phi3", "pad_token_id": 0, "partial_rotary_factor": 0.5,
        "num_key_value_heads": 4, "tie_word_embeddings": True,
    },
    "mistral, a rest of the width": LLAMA
    | {
        "model_type": "mistral", "sliding_window": None, "num_attention_heads": 5,
        "num_key_value_heads": 1,
    },
    "gpt2": GPT2,
    "llama, biases, one head, tied": LLAMA
    | {
        "attention_bias": True, "mlp_bias": True, "num_attention_heads": 1,
        "num_key_value_heads": 1, "tie_word_embeddings": True,
    },
    "llama, wide heads, not grouped": LLAMA | {"head_dim": 32, "num_key_value_heads": 4},
    "gpt2, nothing dropped": GPT2 | {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt2, other kernels, untied": GPT2
    | {"activation_function": "gelu", "attn_pdrop": 0.0, "tie_word_embeddings": False},
    "gpt2, tanh, only attention drops": GPT2
    | {"activation_function": "gelu_pytorch_tanh", "resid_pdrop": 0.0, "embd_pdrop": 0.0},
}
KINDS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "gpt2")
PRECISIONS = {
    "fp32": ("fp32", "fp32"), "bf16": ("bf16", "fp32"), "bf16 all through": ("bf16", "bf16")
}


def scenario(
    folder: Path, config: str, strategy: str, *, precision: str = "fp32", ranks: int = 2,
    batch: str = "micro_batch = 2", more: str = "",
) -> Scenario:
    (folder / "config.json").write_text(json.dumps(CONFIGS[config]))
    parameters, reduce = PRECISIONS[precision]
    text = f"""
model = {{ huggingface = "config.json" }}
batch = {{ sequence_length = 16, {batch} }}
cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}
strategy = {{ {strategy} }}
precision = {{ parameters = "{parameters}", reduce = "{reduce}" }}
{more}
"""
    return parse(text.encode(), where="huggingface.toml", folder=folder)


def lowered_events(case: Scenario, dtype: Dtype) -> list[int]:
    """Bytes that forward and backward of a micro-batch allocate and, negative, free."""
    nbytes = {p.fqn: p.numel * DTYPE_NBYTES[dtype] for p in case.model.parameters}
    changes = []
    lowered = lower(case.model, batch=case.batch, dtype=dtype)
    forwards = [module.forward for module in lowered]
    for computation in forwards + [module.backward for module in lowered[::-1]]:
        for event in computation.memory:
            if isinstance(event, Recomputed | NodeOver | Accumulated):
                continue
            if isinstance(event, Alloc):
                nbytes[event.buffer] = event.nbytes
            changes.append(
                -nbytes[event.buffer]
                if isinstance(event, Free)
                else nbytes[getattr(event, "buffer", "") or event.fqn]
            )
    return changes


@pytest.mark.parametrize(
    ("config", "dtype"), one_in(7, itertools.product(CONFIGS, ["float32", "bfloat16"]))
)
def test_every_allocation_and_free_is_that_of_the_same_module_traced(
    config: str, dtype: Dtype, tmp_path: Path
) -> None:
    case = scenario(tmp_path, config, 'name = "fsdp2"')
    given = CONFIGS[config] | {"use_cache": False}
    tokens = torch.randint(300, (2, 16))
    units = [unit.fqn for unit in case.model.units[1:]]
    seen = trace(
        lambda: transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**given)
        ),
        {"input_ids": tokens, "labels": tokens.clone()}, units=units, dtype=dtype,
        sums_in_place=False,
    )
    assert lowered_events(case, dtype) == traced_events(seen)
    assert seen.units == case.model.units


@pytest.mark.parametrize(
    ("config", "strategy", "precision"),
    one_in(17, itertools.product(KINDS, ["fsdp2", "ddp", "zero_redundancy"], PRECISIONS)),
)
def test_what_torch_holds_and_sends_is_exact(
    config: str, strategy: str, precision: str, tmp_path: Path
) -> None:
    case = scenario(tmp_path, config, f'name = "{strategy}"', precision=precision)
    assert differences(case, rank=1) == []


@pytest.mark.parametrize(("config", "precision"), one_in(4, itertools.product(KINDS, PRECISIONS)))
def test_so_is_what_a_plain_module_holds_while_it_is_cast_too(
    config: str, precision: str, tmp_path: Path
) -> None:
    case = scenario(tmp_path, config, 'name = "single"', precision=precision, ranks=1)
    assert differences(case, rank=0) == []


@pytest.mark.parametrize(
    ("strategy", "config", "precision"),
    one_in(7, itertools.product(["zero3", "zero1"], KINDS, ["fp32", "bf16"])),
)
def test_what_our_programs_hold_and_send_when_they_are_executed_is_exact(
    strategy: str, config: str, precision: str, tmp_path: Path
) -> None:
    case = scenario(tmp_path, config, f'name = "{strategy}"', precision=precision)
    assert inexact(case, ranks=(1,), interpreter="executor") == []


@pytest.mark.parametrize(
    ("config", "strategy", "precision"),
    one_in(13, itertools.product(KINDS, ["fsdp2", "ddp"], ["fp32", "bf16"])),
)
def test_every_allocation_and_free_of_a_step_comes_in_torchs_order(
    config: str, strategy: str, precision: str, tmp_path: Path
) -> None:
    case = scenario(tmp_path, config, f'name = "{strategy}"', precision=precision)
    assert of_program(case) == of_torch(case)


OPTIONS: dict[str, dict[str, str]] = {
    "recomputed": {"more": 'activation_checkpointing = { mode = "full" }'},
    "every second recomputed": {"more": 'activation_checkpointing = { mode = "full", every = 2 }'},
    "linears kept": {"more": 'activation_checkpointing = { mode = "selective", save = '
                             '["linear"], save_every = 2 }'},
    "two blocks wrapped": {"more": "wrapping = { every = 2 }"},
    "wrapped whole": {"more": 'wrapping = { every = "all" }'},
    "accumulated": {"batch": "micro_batch = 2, accumulation = 3", "strategy": 'sync = "last"'},
    "one sequence": {"batch": "micro_batch = 1"},
    "first blocks frozen": {"more": 'frozen = ["*.[0-3].*"]'},
    "some frozen": {"more": 'frozen = ["*attn.[cq]_*", "*norm*"]'},
}


@pytest.mark.parametrize(
    ("option", "config", "strategy"),
    one_in(29, itertools.product(OPTIONS, KINDS, ["fsdp2", "ddp"])),
)
def test_each_option_is_exact(option: str, config: str, strategy: str, tmp_path: Path) -> None:
    asked = dict(OPTIONS[option])
    more = ", ".join(
        [f'name = "{strategy}"', *([asked.pop("strategy")] if "strategy" in asked else [])]
    )
    if option == "some frozen" and config == "gpt2":
        asked["more"] = 'frozen = ["*c_attn*"]'
    case = scenario(
        tmp_path, config, more, precision="bf16" if strategy == "fsdp2" else "fp32", **asked
    )
    assert differences(case, rank=1) == []


def test_dropout_is_the_same_on_a_rank_and_in_the_reference(tmp_path: Path) -> None:
    case = scenario(tmp_path, "gpt2", 'name = "fsdp2"')
    with torch_private.fake_group(rank=0, world_size=1):
        model = modules.build(case.model, seed=1)
        ((x, targets),) = batches.micro_batches(case, rank=0, step=0, dtype="float32")
        first = model(x, targets)
        whole = x
        for module in case.model.modules:
            whole = model.run(module, whole, targets)
    assert model.training
    assert torch.equal(first, whole)
    assert not torch.equal(first, model.eval()(x, targets))


HEADS: dict[str, dict[str, int]] = {
    "shared by two": {}, "that do not divide": {"num_attention_heads": 5, "num_key_value_heads": 5},
    "more than the width": {"num_attention_heads": 128, "num_key_value_heads": 128},
    "that do not divide, of a size of their own": {
        "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 8
    },
    "that their keys and values do not divide": {"num_key_value_heads": 3},
    "fewer than their keys and values": {"num_key_value_heads": 8},
    "of an odd size": {"hidden_size": 12, "num_key_value_heads": 4},
    "of an odd size of their own": {"head_dim": 7}, "of an even size of their own": {"head_dim": 6},
}


@pytest.mark.parametrize(("kind", "heads"), [*itertools.product(KINDS[:-1], HEADS)])
def test_heads_are_refused_just_where_transformers_cannot_make_or_run_them(
    kind: str, heads: str
) -> None:
    config = CONFIGS[kind] | HEADS[heads] | {"num_hidden_layers": 1}
    try:
        made = transformers.AutoConfig.for_model(**config)
        transformers.AutoModelForCausalLM.from_config(made)(torch.zeros(1, 4, dtype=torch.long))
        runs = True
    except Exception:  # its own kinds, and torch's of shapes that do not fit
        runs = False
    if runs:
        model = transformers.AutoModelForCausalLM.from_config(made)
        assert huggingface.from_config(config, sequence_length=4).num_parameters == sum(
            p.numel() for p in model.parameters()
        )
    else:
        with pytest.raises(
            ScenarioError,
            match=r"config\.json: (num_attention_heads|num_key_value_heads|head_dim): expected ",
        ):
            huggingface.from_config(config, sequence_length=4)


def test_a_backend_without_transformers_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(requirements, "version", missing)
    with pytest.raises(BackendUnavailableError) as caught:
        backends.FakeBackend().run(
            scenario(tmp_path, "llama", 'name = "fsdp2"'), options=RunOptions()
        )
    assert str(caught.value) == (
        "backend fake, model.huggingface: expected transformers >=5,<6, whose modules are "
        "trained, found no transformers; "
        "pip install 'zsim[real,huggingface]'"
    )
