"""ddp and zero_redundancy as predicted against torch's own, on the fake process group."""

from __future__ import annotations

import itertools

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.agreement import inexact
from tests.support.cases.sampling import one_in
from zreal import torch_private
from zsim.scenario.scenario import Scenario, parse
from zsim.strategies.ddp import BUCKET_CAP_MB, FIRST_BUCKET_CAP_MB, MIB

STRATEGIES = (
    '"ddp"', '"ddp", bucket_cap_mb = 0.02', '"ddp", gradient_as_bucket_view = true',
    '"zero_redundancy"',
)
PRECISIONS = (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"))
ACCUMULATIONS = ((1, "every"), (2, "every"), (2, "last"))


def scenario(
    model: str,
    strategy: str,
    *,
    ranks: int = 2,
    precision: tuple[str, str] = ("fp32", "fp32"),
    accumulation: tuple[int, str] = (1, "every"),
    optimizer: str = 'name = "adamw"',
) -> Scenario:
    """A scenario whose strategy is `strategy`, written as in the file after `name =`."""
    count, sync = accumulation
    text = f"""
model = {{ preset = "{model}" }}
batch = {{ micro_batch = 2, sequence_length = {1 if "mlp" in model else 32}, accumulation = {count} }}
cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}
strategy = {{ name = {strategy}, sync = "{sync}" }}
precision = {{ parameters = "{precision[0]}", reduce = "{precision[1]}" }}
optimizer = {{ {optimizer} }}
"""  # noqa: E501
    return parse(text.encode(), where="test.toml")


@pytest.mark.parametrize(
    ("strategy", "precision", "accumulation"),
    one_in(5, itertools.product(STRATEGIES, PRECISIONS, ACCUMULATIONS)),
)
def test_ddp_is_exact(
    strategy: str, precision: tuple[str, str], accumulation: tuple[int, str]
) -> None:
    case = scenario("mlp-tiny", strategy, precision=precision, accumulation=accumulation)
    assert inexact(case) == []


def test_every_rank_of_zero_redundancy_is_exact() -> None:
    case = scenario("mlp-uneven", '"zero_redundancy"', ranks=3)
    assert inexact(case, ranks=(0, 1, 2)) == []


@pytest.mark.parametrize("implementation", ["foreach", "for-loop", "fused"])
def test_sgd_is_exact(implementation: str) -> None:
    optimizer = f'name = "sgd", momentum = 0.9, implementation = "{implementation}"'
    assert inexact(scenario("mlp-tiny", '"ddp"', optimizer=optimizer)) == []


def test_bucket_caps_are_torchs_own() -> None:
    """1 MiB for the first bucket, then the default of DistributedDataParallel, in MiB."""
    with torch_private.fake_group(rank=0, world_size=2):
        default = DistributedDataParallel(nn.Linear(1, 1)).bucket_bytes_cap
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == FIRST_BUCKET_CAP_MB * MIB
    assert default == BUCKET_CAP_MB * MIB
