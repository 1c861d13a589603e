"""ddp and zero_redundancy as predicted against torch's own, on the fake process group: order and
bytes exact."""

from __future__ import annotations

import itertools

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.sampling import one_in
from zreal import torch_private
from zreal.observer.observer import observe
from zsim.ir.ledger_replay import replay
from zsim.ir.ops import COLLECTIVES
from zsim.ir.program import PHASES
from zsim.ir.run import RankRun
from zsim.scenario.plan import plan
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


def observed(case: Scenario, *, rank: int) -> RankRun:
    """Run of torch on `rank` of the fake process group."""
    with torch_private.fake_group(rank=rank, world_size=case.world_size):
        return observe(case, rank=rank).run


def wrong_collectives(case: Scenario, measured: RankRun) -> list[str]:
    """The phases whose collectives differ from the Program's in order, op, bytes or axis."""
    program = plan(case, device="cpu").of_rank(measured.rank)
    problems = []
    for phase in PHASES:
        issued = [
            (op.kind, op.nbytes, op.group) for op in program.phase(phase) if op.kind in COLLECTIVES
        ]
        recorded = [
            (record.op, record.nbytes, record.group)
            for record in measured.phases[phase].collectives
        ]
        if issued != recorded:
            problems.append(f"{phase}: issued {issued}, recorded {recorded}")
    return problems


def peaks(case: Scenario, *, rank: int) -> dict[str, int]:
    """Predicted peak bytes of the steps."""
    memory = replay(plan(case, device="cpu").of_rank(rank))
    return {phase: memory[phase].peak_bytes for phase in ("first", "steady")}


def measured_peaks(measured: RankRun) -> dict[str, int]:
    """Measured peak bytes of the steps."""
    return {phase: measured.phases[phase].memory.peak_bytes for phase in ("first", "steady")}


@pytest.mark.parametrize(
    ("strategy", "precision", "accumulation"),
    one_in(5, itertools.product(STRATEGIES, PRECISIONS, ACCUMULATIONS)),
)
def test_collectives_of_ddp_are_exact(
    strategy: str, precision: tuple[str, str], accumulation: tuple[int, str]
) -> None:
    case = scenario("mlp-tiny", strategy, precision=precision, accumulation=accumulation)

    assert wrong_collectives(case, observed(case, rank=1)) == []


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_rank_of_zero_redundancy_has_its_own_exact_memory(rank: int) -> None:
    case = scenario("mlp-uneven", '"zero_redundancy"', ranks=3)

    assert peaks(case, rank=rank) == measured_peaks(observed(case, rank=rank))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_peak_memory_of_ddp_is_exact(strategy: str, accumulation: tuple[int, str]) -> None:
    case = scenario("mlp-tiny", strategy, accumulation=accumulation)

    assert peaks(case, rank=0) == measured_peaks(observed(case, rank=0))


@pytest.mark.parametrize("optimizer", ['name = "sgd"', 'name = "sgd", momentum = 0.9'])
@pytest.mark.parametrize("implementation", ["foreach", "for-loop", "fused"])
def test_peak_memory_with_sgd_is_exact(optimizer: str, implementation: str) -> None:
    case = scenario("mlp-tiny", '"ddp"', optimizer=f'{optimizer}, implementation = '
                                                   f'"{implementation}"')

    assert peaks(case, rank=0)["steady"] == measured_peaks(observed(case, rank=0))["steady"]


@pytest.mark.parametrize("model", ["gpt-tiny", "llama-tiny"])
@pytest.mark.parametrize("strategy", ['"ddp", bucket_cap_mb = 0.1', '"zero_redundancy"'])
def test_ddp_of_transformers_reduces_the_same_buckets_and_peaks_within_five_percent(
    model: str, strategy: str
) -> None:
    case = scenario(model, strategy)
    measured = observed(case, rank=0)
    highest, expected = measured_peaks(measured), peaks(case, rank=0)

    assert wrong_collectives(case, measured) == []
    assert expected == {phase: pytest.approx(highest[phase], rel=0.05) for phase in highest}


def test_bucket_caps_are_torchs_own() -> None:
    """1 MiB for the first bucket, then the default of DistributedDataParallel, in MiB."""
    with torch_private.fake_group(rank=0, world_size=2):
        default = DistributedDataParallel(nn.Linear(1, 1)).bucket_bytes_cap
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == FIRST_BUCKET_CAP_MB * MIB
    assert default == BUCKET_CAP_MB * MIB
