"""Parameters without dimensions, as CLIP's logit_scale: under DDP to the byte, and refused by name
where torch's FSDP does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.cases.sampling import one_in
from tests.zreal.tracing.user_steps import DDP, FSDP1, FSDP2, HSDP, Exact
from zreal import torch_private
from zreal.tracing.trace import trace
from zsim.autograd.traced.traced_file import save
from zsim.errors import ZsimError
from zsim.scenario.scenario import parse

WIDTH = 16
REPLICATED = [
    DDP, f"{DDP}, gradient_as_bucket_view = true", f"{DDP}, bucket_cap_mb = 0.001",
    'name = "zero_redundancy"',
]


class Gated(nn.Module):
    """A residual layer with a gain and a shift of one number each."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(functional.gelu(x)) * self.gain + self.shift


class Contrastive(nn.Module):
    """Likeness of rows, scaled by a number in the root; the layers may have numbers of their own.
    """

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.6592))
        self.layers = nn.ModuleList(layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        rows = functional.normalize(x, dim=-1)
        likeness = rows @ rows.t() * self.logit_scale.exp()
        return functional.cross_entropy(likeness, torch.arange(len(rows)))


def in_the_root() -> nn.Module:
    return Contrastive(lambda: nn.Linear(WIDTH, WIDTH))


def in_every_unit() -> nn.Module:
    return Contrastive(Gated)


def rows() -> tuple[Tensor]:
    return (torch.randn(6, WIDTH),)


OPTIMIZERS = ('name = "sgd"', 'name = "adamw"', 'name = "adamw", clip_norm = 1.0')


@pytest.mark.parametrize(
    ("make", "strategy", "optimizer", "accumulation"),
    one_in(4, product([in_the_root, in_every_unit], REPLICATED, OPTIMIZERS, [1, 2])),
)
def test_numbers_that_are_parameters_are_reduced_in_buckets_with_others(
    make: Callable[[], nn.Module], strategy: str, optimizer: str, accumulation: int, exact: Exact
) -> None:
    exact(make, rows, strategy, accumulation=accumulation, optimizer=optimizer)


@pytest.mark.parametrize("strategy", [FSDP2, HSDP, FSDP1])
def test_fsdp_refuses_them_by_name_as_torch_does(strategy: str, tmp_path: Path) -> None:
    save(trace(in_the_root, rows(), name="traced"), tmp_path / "traced.json")
    text = f"""
model = {{ traced = "traced.json" }}
batch = {{ micro_batch = 6, sequence_length = 1 }}
cluster = {{ preset = "cpu-gloo", ranks = {4 if "hsdp" in strategy else 2} }}
strategy = {{ {strategy} }}
"""
    with pytest.raises(ZsimError, match="takes no scalar parameters, and logit_scale is one"):
        parse(text.encode(), where="user.toml", folder=tmp_path)
    subject = torch.distributed.fsdp.FullyShardedDataParallel
    with (
        torch_private.fake_group(rank=0, world_size=2),
        pytest.raises(ValueError, match="support scalar parameters. Change (logit_)?scale"),
    ):
        _ = (
            subject(in_the_root(), device_id=torch.device("cpu"))
            if strategy is FSDP1
            else torch.distributed.fsdp.fully_shard(in_the_root())
        )


def clip() -> Any:
    """A small CLIPModel, whose two encoders know nothing of each other."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    text = sizes | {"vocab_size": 100, "max_position_embeddings": 16, "eos_token_id": 99}
    vision = sizes | {"image_size": 16, "patch_size": 8}
    return transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)
    )


def captions() -> dict[str, Any]:
    return {
        "input_ids": torch.randint(2, 98, (4, 12)), "pixel_values": torch.randn(4, 3, 16, 16),
        "return_loss": True,
    }


def test_clip_is_trained_by_ddp(exact: Exact) -> None:
    layers = "text_model.encoder.layers"
    exact(clip, captions, DDP, layers=layers)
