"""Functions as a user writes them for `zsim validate --module`, good and bad ones."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.zreal.tracing.user_modules import Convolutions, Encoder
from tests.zreal.zero.zero_ranks import Perceptron, encoder


def perceptron() -> dict[str, Any]:
    """Inputs by name, and a loss outside the module."""
    return {
        "module": Perceptron(), "inputs": {"x": torch.randn(4, 16)},
        "loss": lambda output: output.square().mean(),
    }


def transformer() -> dict[str, Any]:
    """Tied weights, and units that are named."""
    tokens = torch.randint(300, (2, 16)), torch.randint(300, (2, 16))
    return {
        "module": encoder(), "inputs": tokens, "units": [f"layers.{i}" for i in range(3)]
    }


def convolutions() -> dict[str, Any]:
    """Images, and norms without running statistics."""
    return {
        "module": Convolutions(lambda width: nn.GroupNorm(2, width)),
        "inputs": (torch.randn(4, 3, 32, 32), torch.randint(10, (4,))),
    }


class Scaled(Perceptron):
    """Likeness of the rows, scaled by a parameter without dimensions, as CLIP's are."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, x: Tensor) -> Tensor:
        rows = nn.functional.normalize(super().forward(x), dim=-1)
        likeness = rows @ rows.t() * self.logit_scale.exp()
        return nn.functional.cross_entropy(likeness, torch.arange(len(x)))


def scaled() -> dict[str, Any]:
    """A scalar parameter."""
    return {"module": Scaled(), "inputs": (torch.randn(4, 16),)}


class Towers(nn.Module):
    """Two towers side by side that share a weight; two layers are read and never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        left = right = x
        for index in range(2):
            left = self.layers[index](left).relu()
            right = nn.functional.linear(right, self.layers[2 + index].weight).relu()
        unused = self.layers[2].bias + self.layers[3].bias
        return (left * right + unused).sum()


def towers() -> dict[str, Any]:
    """A module that breaks the rules of units."""
    return {"module": Towers(), "inputs": (torch.randn(4, 16),)}


def dropout() -> dict[str, Any]:
    """A module that draws random numbers."""
    tokens = torch.randint(300, (2, 16)), torch.randint(300, (2, 16))
    return {"module": Encoder(num_layers=3), "inputs": tokens}


class Forgetful(Perceptron):
    """A layer whose forward costs more in backward than a trace made of it says, on rank 1."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)
        if torch.distributed.is_initialized() and not isinstance(x, torch._subclasses.FakeTensor):
            output = output * output.exp()
        return output


def forgetful() -> dict[str, Any]:
    """A module that does other things when it is real than when it is traced."""
    return {"module": Forgetful(), "inputs": (torch.randn(4, 16),)}


def nothing() -> dict[str, Any]:
    """No inputs."""
    return {"module": Perceptron()}


def raising() -> dict[str, Any]:
    """An error of the user's own."""
    raise ValueError("no such checkpoint")


def leaving() -> dict[str, Any]:
    """An end of the user's own."""
    raise SystemExit(7)


def needing(config: object) -> dict[str, Any]:
    """A function that wants an argument."""
    return {"module": config}


HANGING = "hanging"


def hanging() -> dict[str, Any]:
    """A function without an end, whose own errors are all caught."""
    while True:
        with suppress(Exception):
            time.sleep(60)


def hanging_on_a_rank() -> dict[str, Any]:
    """A function without an end where it runs on a rank, whose process is called so then."""
    if multiprocessing.parent_process() is None:
        return perceptron()
    Path("/proc/self/comm").write_text(HANGING)
    return hanging()


def hanging_on_rank_1() -> dict[str, Any]:
    """A function without an end on the second rank of a launcher."""
    return hanging() if os.environ.get("SLURM_PROCID") == "1" else perceptron()


class Mixed(nn.Module):
    """Parameters made in many ways: drawn, truncated, orthogonal, computed, cut, tied; a mask, and
    a table in a plain dict."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200, 64, padding_idx=0)
        nn.init.trunc_normal_(self.table.weight, std=0.02, a=-0.04, b=0.04)
        with torch.no_grad():
            self.table.weight[0].fill_(0)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
            for _ in range(3)
        )
        self.square = nn.Parameter(torch.empty(64, 64))
        nn.init.orthogonal_(self.square)
        self.doubled = nn.Parameter(self.square.detach() * 2)
        self.lower = nn.Parameter(torch.randn(64, 64)[32:])
        self.norm = nn.RMSNorm(64)
        self.mask: Tensor
        self.register_buffer("mask", torch.triu(torch.full((40, 40), float("-inf")), 1))
        self.cache = {"cos": torch.outer(torch.arange(40.0), torch.arange(64) / 64).cos()}
        self.head = nn.Linear(64, 200, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.table(tokens)
        x = x + self.cache["cos"][:length].to(x.dtype)
        x = self.mask[:length, :length].softmax(-1).to(x.dtype) @ x
        for layer in self.layers:
            x = x + layer(x)
        x = self.norm(x) @ self.square @ self.doubled + self.lower.sum()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Loaded(Mixed):
    """Values that the build has from elsewhere, as from a file."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.tensor([[0.01] * 64] * 64))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = super().forward(tokens, targets)
        return loss + self.own.square().mean()


def loaded_layers() -> dict[str, Any]:
    """Layers that have values of their own, and no buffers."""
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    for layer in layers:
        layer.weight = nn.Parameter(torch.tensor([[0.01] * 64] * 64))
    return {"module": nn.Sequential(*layers), "inputs": [torch.randn(4, 64)], "units": ["0", "1"]}


def mixed() -> dict[str, Any]:
    """A module for the meta device."""
    return {"module": Mixed(), "inputs": list(torch.randint(200, (2, 2, 32)))}


def loaded() -> dict[str, Any]:
    """A module that has values of its own."""
    return {"module": Loaded(), "inputs": list(torch.randint(200, (2, 2, 32)))}


class Named(nn.Module):
    """A module whose output is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.layer(x)}


def lossless() -> dict[str, Any]:
    """An output without a loss."""
    return {"module": Named(), "inputs": [torch.ones(2, 4)]}


class Residual(nn.Module):
    """Layers whose inputs get several gradients each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Adapted(nn.Module):
    """Frozen layers beside small ones that train, as LoRA has them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.base(x) + self.up(self.down(x))).square().mean()


def adapted() -> dict[str, Any]:
    """Parameters of which the first are frozen."""
    return {"module": Adapted(), "inputs": [torch.randn(4, 16)]}


class Shifted(nn.Module):
    """A layer that is shifted by the sums of parameters: their gradients are one number each,
    expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.table = nn.Parameter(torch.randn(64, 64))
        self.row = nn.Parameter(torch.randn(4096))

    def forward(self, x: Tensor) -> Tensor:
        shifted: Tensor = self.linear(x).relu() + self.table.sum() + self.row.sum()
        return shifted


def sums() -> dict[str, Any]:
    """Parameters of which only the sum counts."""
    layers = nn.ModuleList(Shifted() for _ in range(2))
    return {
        "module": nn.Sequential(*layers), "inputs": [torch.randn(8, 64)], "units": ["0", "1"],
        "loss": lambda output: output.mean(),
    }


class Joined(Shifted):
    """A layer that is shifted by the sum of two parameters, which have one gradient together."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.table + self.other).sum() + (self.other - 1).sum()


class Summed(nn.Module):
    """A layer that is shifted by the sum of two parameters, and by nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.left, self.right = (nn.Parameter(torch.randn(64, 64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = self.linear(x).relu() + (self.left + self.right).sum()
        return summed


def sums_of_two() -> dict[str, Any]:
    """Parameters of which only the sum of two counts."""
    return {**sums(), "module": nn.Sequential(Summed(), Summed())}


def joined() -> dict[str, Any]:
    """Parameters that are in several sums."""
    return {**sums(), "module": nn.Sequential(Joined(), Joined())}


def residual() -> dict[str, Any]:
    """Backward has the peak of a sum of gradients."""
    return {"module": Residual(), "inputs": [torch.randn(2, 32, 64)]}


class Keeping(nn.Module):
    """Layers whose output depends on what forwards have left in the module.

    That is running statistics, a moving average, a counter among the buffers and one that is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.BatchNorm1d(16, momentum=0.3)
        self.register_buffer("average", torch.zeros(16))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        x = self.norm(x) * self.norm.running_var - self.norm.running_mean
        self.average.mul_(0.7).add_(x.detach().mean(0), alpha=0.3)
        self.count += 1
        self.calls += 1
        return ((x - 3 * self.average).square() * (1 + self.count / 4)).mean() / self.calls


def keeping() -> dict[str, Any]:
    """State of the module's own."""
    return {"module": Keeping(), "inputs": [torch.randn(8, 16)]}


class Caching(Perceptron):
    """A table that the first forward makes and keeps."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.outer(torch.arange(4.0), torch.arange(16.0)).cos()
        return super().forward(x + self.table)


def caching() -> dict[str, Any]:
    """A tensor in a plain attribute."""
    return {"module": Caching(), "inputs": [torch.randn(4, 16)]}


def keeping_in_two_bytes() -> dict[str, Any]:
    """State in two bytes."""
    return {"module": Keeping().bfloat16(), "inputs": [torch.randn(8, 16)]}


def deaf() -> dict[str, Any]:
    """Code that has SIGTERM and Ctrl-C ignored, as some libraries do."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    return perceptron()


class Routed(nn.Module):
    """Experts in one product of groups, chosen in float32, as those of transformers are.

    Softmax cancels the `shift` of all scores, so its gradient is mostly rounding error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.router = nn.Linear(16, 2)
        self.shift = nn.Parameter(torch.zeros(1))
        self.experts = nn.Parameter(torch.randn(2, 16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        shares = (self.router(x.float()) + self.shift).softmax(-1).to(x.dtype)
        ends = torch.tensor([4, 8], dtype=torch.int32)
        return (torch._grouped_mm(x, self.experts, offs=ends) * shares[:, :1]).square().mean()


def routed() -> dict[str, Any]:
    """Operators that refuse float64."""
    return {"module": Routed(), "inputs": [torch.randn(8, 16)]}


class Selecting(Perceptron):
    """Rows chosen by their values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[torch.where(x[:, 0] > 0)])


def selecting() -> dict[str, Any]:
    """A shape that follows from data."""
    return {"module": Selecting(), "inputs": [torch.randn(4, 16)]}


class Rotated(nn.Module):
    """Turns by complex numbers that the module keeps, as Llama's rotary embedding of torchtitan."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.register_buffer("turns", torch.polar(torch.ones(8), torch.arange(8.0)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            pairs = torch.view_as_complex(layer(x).float().unflatten(1, (8, 2)))
            x = torch.view_as_real(pairs * self.turns).flatten(1).to(x.dtype)
        return x[:, :4].square().mean()


def rotated() -> dict[str, Any]:
    """A complex buffer."""
    return {"module": Rotated(), "inputs": [torch.randn(8, 16)]}


class Transposed(nn.Module):
    """Layers over dim 1 of the input, which they turn to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor, tokens: Tensor, scale: Tensor) -> Tensor:
        x = x.transpose(1, 2) * scale
        for layer in self.layers:
            x = layer(x) * 1.5
        return x.square().mean() + tokens.reshape(-1).float().mean()


def transposed() -> dict[str, Any]:
    """Inputs in another order in memory, cut out of a larger tensor, and expanded."""
    return {
        "module": Transposed(), "inputs": [
            torch.randn(2, 8, 32).transpose(1, 2), torch.randint(9, (2, 257))[:, 1:],
            torch.rand(2, 1, 1).expand(2, 8, 32),
        ],
    }


class Heads(nn.Module):
    """Three heads behind a trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.heads = nn.ModuleDict({name: nn.Linear(16, 8) for name in ("left", "mid", "right")})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x).relu()
        return {name: head(x) for name, head in self.heads.items()}


def one_head_of_three() -> dict[str, Any]:
    """A loss of one output, neither the first nor the last."""
    return {
        "module": Heads(), "inputs": [torch.randn(4, 16)], "units": ["layers.*"],
        "loss": lambda output: output["mid"].square().mean(),
    }


class Exact(Perceptron):
    """Products of numbers of which no device's file says the rate."""

    def forward(self, x: Tensor) -> Tensor:
        wide, waves = x.double(), torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        counts = x.long() @ x.long().t()
        shares = (wide @ wide.t()).float() + (waves @ waves.t()).real + counts.float()
        return super().forward(shares.softmax(-1) @ x)


def exact() -> dict[str, Any]:
    """float64, complex numbers and integers."""
    return {"module": Exact(), "inputs": [torch.randn(4, 16)]}


class Table(nn.Module):
    """A table of eight rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.rows(tokens)  # on real tensors alone it looks whether they are there
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def ninth_row() -> dict[str, Any]:
    """Tokens that the table does not have."""
    return {"module": Table(), "inputs": [torch.full((2, 4), 8)]}
