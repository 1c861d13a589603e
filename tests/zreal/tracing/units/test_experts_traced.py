"""Mixtures of experts whose products are made by group, in any dtype: their tokens are sorted by
expert. Held to torch."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.cases.sampling import one_in
from tests.zreal.tracing.user_steps import DDP, FSDP2, HSDP, Exact
from zreal.tracing.fakes.real_layouts import call
from zreal.tracing.kernels import kernel

GROUPED: Any = torch.ops.aten._grouped_mm.default
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "rows in groups": ((12, 16), (3, 16, 24)), "columns in groups": ((3, 12, 16), (16, 24)),
    "sums in groups": ((16, 24), (24, 8)), "one by one": ((3, 12, 16), (3, 16, 24)),
    "rows that are padded": ((12, 16), (3, 16, 6)),
}
OFFSETS = {"columns in groups": 24, "sums in groups": 24}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_products_of_groups_lie_as_real_ones_do_and_are_refused_as_those(
    name: str, dtype: torch.dtype, turned: bool
) -> None:
    first, second = (torch.ones(shape, dtype=dtype) for shape in SHAPES[name])
    second = second.transpose(-1, -2).contiguous().transpose(-1, -2) if turned else second
    ends = OFFSETS.get(name, 12)
    offsets = (
        None
        if name == "one by one"
        else torch.tensor([ends // 3, ends // 2, ends], dtype=torch.int32)
    )
    mode = FakeTensorMode()
    given = tuple(
        None if tensor is None else mode.from_tensor(tensor) for tensor in (first, second, offsets)
    )
    try:
        real = GROUPED(first, second, offsets)
    except RuntimeError as error:
        assert name == "rows that are padded"
        assert not turned
        with pytest.raises(RuntimeError, match=str(error)), mode:
            call(GROUPED, given, {}, device="cpu")
        return
    with mode:
        fake = call(GROUPED, given, {}, device="cpu")
    layout, expected = (
        (tensor.dtype, tensor.shape, tensor.stride(), tensor.untyped_storage().nbytes())
        for tensor in (fake, real)
    )
    assert layout == expected


@pytest.mark.parametrize("name", SHAPES)
def test_each_token_meets_one_expert(name: str) -> None:
    first, second = (torch.ones(shape) for shape in SHAPES[name])
    grouped = kernel(GROUPED, (first, second, None), {}, torch.ones(1))
    groups = 3 if name == "one by one" else 1
    assert grouped is not None
    assert grouped.flops == 2 * groups * first.shape[-2] * first.shape[-1] * second.shape[-1]


class Mixture(nn.Module):
    """Layers of four experts. The expert of each token does not depend on data, and no expert has
    more than another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.float().pow(2).mean()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Parameter(torch.randn(4, *shape) / 8) for shape in ((16, 32), (32, 16))
        )

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.arange(1, 5, dtype=torch.int32, device=x.device) * (len(x) // 4)
        inner = torch._grouped_mm(x, self.up, offs=ends)
        return torch._grouped_mm(nn.functional.silu(inner), self.down, offs=ends)


STEPS = [(FSDP2, "fp32"), (FSDP2, "bf16"), (HSDP, "fp32"), (HSDP, "bf16"), (DDP, "fp32")]


@pytest.mark.parametrize(("strategy", "parameters"), STEPS)
def test_a_step_of_experts_is_exact(strategy: str, parameters: str, exact: Exact) -> None:
    def data() -> tuple[Tensor, ...]:
        return (torch.randn(32, 16),)

    exact(Mixture, data, strategy, parameters=parameters, accumulation=2)


SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "use_cache": False,
}
MODELS: dict[str, Any] = {
    "mixtral": (
        transformers.MixtralForCausalLM, transformers.MixtralConfig(**SIZES, num_local_experts=4)
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeForCausalLM,
        transformers.Qwen3MoeConfig(
            **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
        ),
    ),
}


class Looked(nn.Module):
    """A model of transformers with its loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        kind, config = MODELS[name]
        self.inner = kind(config)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.inner(input_ids=tokens, labels=tokens).loss
        return loss


@pytest.mark.parametrize(("name", "parameters"), one_in(2, product(MODELS, ["fp32", "bf16"])))
def test_mixtures_of_transformers_are_exact(name: str, parameters: str, exact: Exact) -> None:
    def data() -> tuple[Tensor, ...]:
        return (torch.randint(0, 64, (2, 16)),)

    exact(lambda: Looked(name), data, FSDP2, parameters=parameters, layers="inner.model.layers")
