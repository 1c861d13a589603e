"""Traced modules with frozen units under FSDP1: to the byte, or refused by name where views of one
flat parameter get other gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from tests.zreal.tracing.test_user_modules_traced import Teacher, inputs
from tests.zreal.tracing.user_steps import FSDP1, Exact, differences
from zsim.errors import ZsimError

WIDTH = 16
OPTIONS = (
    "", ", use_orig_params = true", ', backward_prefetch = "post"',
    ', backward_prefetch = "none", forward_prefetch = true', ', sharding = "grad_op"',
    ', sharding = "grad_op", use_orig_params = true', ", limit_all_gathers = false",
)


class Layers(nn.Module):
    """Four residual layers between an embedding and a head; the units called `frozen` are so."""

    def __init__(self, frozen: frozenset[str]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 50)
        for name in frozen:
            parts = [self.embedding, self.head] if name == "root" else [self.layers[int(name)]]
            for part in parts:
                part.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


@cache
def maker(frozen: frozenset[str]) -> Callable[[], nn.Module]:
    return lambda: Layers(frozen)


def tokens() -> tuple[Tensor]:
    return (torch.randint(50, (4, 8)),)


@settings(max_examples=8)
@given(
    frozen=st.frozensets(st.sampled_from("0123"), min_size=1, max_size=4), root=st.booleans(),
    options=st.sampled_from(OPTIONS), parameters=st.sampled_from(["fp32", "bf16"]),
    rank=st.integers(0, 1), accumulation=st.integers(1, 2), sync=st.sampled_from(["every", "last"]),
)
def test_whole_units_that_are_frozen_are_gathered_and_never_reduced(
    frozen: frozenset[str], root: bool, options: str, parameters: str, rank: int,
    accumulation: int, sync: str, tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if root and len(frozen) < 4:
        frozen = frozen | {"root"}
    differing = differences(
        maker(frozen), tokens, f'{FSDP1}{options}, sync = "{sync}"',
        tmp_path_factory.mktemp("traced"), ranks=2, rank=rank, parameters=parameters,
        accumulation=accumulation,
    )
    assert differing == {}


def test_so_are_those_that_run_under_no_grad(exact: Exact) -> None:
    exact(lambda: Teacher((1, 2)), inputs, FSDP1)


class Adapters(nn.Module):
    """Layers with a frozen weight and a trained one each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(4)
        )
        for layer in self.layers:
            layer.get_submodule("0").requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


@pytest.mark.parametrize("options", ["", ", use_orig_params = true"])
def test_units_of_which_a_part_is_frozen_are_refused_in_one_line(
    tmp_path: Path, options: str
) -> None:
    with pytest.raises(ZsimError, match=r"layers\.0 is frozen in part, .*; freeze whole") as error:
        differences(Adapters, inputs, f"{FSDP1}{options}", tmp_path, ranks=2)
    assert "\n" not in str(error.value)
