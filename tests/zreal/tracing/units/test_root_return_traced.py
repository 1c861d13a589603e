"""The return of the whole module: what its caller then computes, and what of the output lives on.
Each held to torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from tests.zreal.tracing.user_steps import Exact, differences
from zreal.tracing.errors import UntraceableError
from zreal.tracing.trace import trace
from zsim.autograd.traced.model import LOSS_MODULE
from zsim.autograd.traced.traced_file import dump, save
from zsim.autograd.traced.traced_file import parse as read
from zsim.errors import ZsimError
from zsim.scenario.scenario import parse

WIDTH, CLASSES = 16, 100
UNITS = [f"layers.{index}" for index in range(4)]


@dataclass
class Output:
    """A dataclass of a user: fully_shard looks into it too."""

    loss: Tensor | None
    logits: Tensor
    hidden: tuple[Tensor, ...]


class Model(nn.Module):
    """Four residual layers and a head; `returns` makes the output of the loss, logits and hidden
    values."""

    def __init__(self, returns: Callable[[Tensor, list[Tensor]], Any], *, embeds: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH) if embeds else None
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES) if embeds else None
        self.returns = returns

    def forward(self, x: Tensor) -> Any:
        x = x if self.embedding is None else self.embedding(x)
        hidden = [x]
        for layer in self.layers:
            hidden.append(layer(functional.gelu(hidden[-1])))
        return self.returns(hidden[-1] if self.head is None else self.head(hidden[-1]), hidden)


def classes(logits: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), torch.zeros(len(logits), dtype=torch.int64))


def squares(value: Tensor) -> Tensor:
    return value.float().square().mean()


Returns = Callable[[Tensor, list[Tensor]], Any]
Loss = Callable[[Any], Tensor]
WAYS: dict[str, tuple[Returns, Loss]] = {
    "logits": (lambda y, _: y, classes), "a view": (lambda y, _: y.view(-1), squares),
    "logits and hidden": (
        lambda y, hidden: {"y": y, "hidden": tuple(hidden)},
        lambda out: classes(out["y"]) + sum(map(squares, out["hidden"])),
    ),
    "with a loss inside too": (
        lambda y, hidden: Output(squares(hidden[1]), y, ()),
        lambda out: classes(out.logits) + out.loss,
    ),
    "with what needs no gradient": (
        lambda y, hidden: [y, y.argmax(-1), hidden[2].detach().exp()], lambda out: classes(out[0]),
    ),
    "the loss": (lambda y, _: squares(y), lambda out: out),
    "loss and logits": (lambda y, _: (squares(y), y), lambda out: out[0]),
    "loss and more": (
        lambda y, hidden: {"loss": squares(y), "p": y.float().softmax(-1), "hidden": hidden},
        lambda out: out["loss"] * 2,
    ),
    "a dataclass": (lambda y, hidden: Output(squares(y), y, tuple(hidden)), lambda out: out.loss),
}
"""Output of a module, and the loss that its caller makes of it."""
SHARDED = [
    *(
        f'name = "fsdp2", reshard_after_forward = {value}'
        for value in ('"auto"', "true", "false", "2")
    ),
    'name = "hsdp", dp_replicate = 2, dp_shard = 2, reshard_after_forward = true',
    'name = "hsdp", dp_replicate = 1, dp_shard = 4, reshard_after_forward = 2',
    'name = "fsdp1", dp_shard = 4, dp_replicate = 1',
    'name = "fsdp1", dp_shard = 2, dp_replicate = 2, backward_prefetch = "post"', 'name = "ddp"',
]


@cache
def maker(way: str, *, embeds: bool) -> Callable[[], nn.Module]:
    return lambda: Model(WAYS[way][0], embeds=embeds)


def tokens() -> tuple[Tensor]:
    return (torch.randint(CLASSES, (50,)),)


def values() -> tuple[Tensor]:
    return (torch.randn(50, WIDTH),)


@settings(max_examples=16)
@given(
    way=st.sampled_from(list(WAYS)), strategy=st.sampled_from(SHARDED), embeds=st.booleans(),
    dtype=st.sampled_from(["fp32", "bf16"]), rank=st.integers(0, 3), accumulation=st.integers(1, 2),
)
def test_whatever_it_returns_lives_on_until_the_loss_is_made(
    way: str, strategy: str, embeds: bool, dtype: str, rank: int, accumulation: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    differing = differences(
        maker(way, embeds=embeds), tokens if embeds else values, strategy,
        tmp_path_factory.mktemp("traced"), ranks=4, rank=rank, accumulation=accumulation,
        parameters="fp32" if "ddp" in strategy else dtype, loss=WAYS[way][1],
    )
    assert differing == {}


def model_of_transformers(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers", minversion="5")
    config = transformers.AutoConfig.for_model(
        name, vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4,
    )
    made = transformers.AutoModelForCausalLM.from_config(config)
    assert isinstance(made, nn.Module)
    return made


def sentences() -> dict[str, Tensor]:
    ids = torch.randint(300, (2, 16))
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize("strategy", SHARDED[3:6:2])
@pytest.mark.parametrize(
    ("name", "layers"), [("bert", "bert.encoder.layer"), ("qwen3", "model.layers")]
)
def test_a_model_output_lives_on_through_the_roots_reshard(
    name: str, layers: str, strategy: str, exact: Exact
) -> None:
    exact(
        lambda: model_of_transformers(name), sentences, strategy, ranks=4, parameters="bf16",
        layers=layers, loss=lambda output: output.loss,
    )


def test_a_file_knows_what_comes_after_the_root() -> None:
    model = trace(maker("logits", embeds=True), tokens(), units=UNITS, loss=classes)
    assert [(m.fqn, m.after_root) for m in model.lowered[-2:]] == [
        ("root.4", False), (LOSS_MODULE, True),
    ]
    assert read(dump(model).encode()) == model
    inside = trace(maker("the loss", embeds=True), tokens(), units=UNITS)
    assert not any(module.after_root for module in inside.lowered)


def test_a_loss_that_reads_parameters_is_refused_where_they_may_be_sharded(tmp_path: Path) -> None:
    module = Model(WAYS["logits"][0], embeds=True)

    def loss(output: Tensor) -> Tensor:
        assert module.head is not None
        return classes(output) + squares(module.head.weight)

    save(trace(module, tokens(), units=UNITS, loss=loss), tmp_path / "traced.json")
    text = """
model = { traced = "traced.json" }
batch = { micro_batch = 50, sequence_length = 1 }
cluster = { preset = "cpu-gloo", ranks = 2 }
strategy = """
    for strategy in ('name = "fsdp2"', 'name = "fsdp1", dp_shard = 2, dp_replicate = 1'):
        with pytest.raises(ZsimError, match=r"the loss reads head\.weight after the module has"):
            parse(f"{text} {{ {strategy} }}".encode(), where="user.toml", folder=tmp_path)
    parse(f'{text} {{ name = "ddp" }}'.encode(), where="user.toml", folder=tmp_path)


@pytest.mark.parametrize(("call", "message"), [
    (lambda module, out: module(tokens()[0])["y"].sum(), "one call of the module in a step"),
    (lambda module, out: module.layers[1](out["hidden"]).sum(), "a run of it in the loss"),
])
def test_a_loss_that_calls_the_module_or_a_unit_again_is_refused(
    call: Callable[[nn.Module, Any], Tensor], message: str
) -> None:
    module = Model(lambda y, hidden: {"y": y, "hidden": hidden[-1]}, embeds=True)
    units = UNITS if "run" in message else []
    with pytest.raises(UntraceableError, match=message):
        trace(module, tokens(), units=units, loss=lambda out: call(module, out))
