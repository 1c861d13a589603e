"""Construction unit by unit: no rank holds the whole model, and values are those of the whole."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from zreal import torch_private
from zreal.meters.measured_step import MeasuredRank
from zreal.modules import modules
from zreal.modules.initial_values import Initialiser, by_unit
from zreal.observer.observer import observe
from zreal.observer.subjects.table import SUBJECTS
from zreal.observer.whole_tensors import whole_parameters
from zsim.scenario.scenario import Scenario, parse

TEXT = """
model = {{ preset = "gpt-tiny" }}
batch = {{ micro_batch = 1, sequence_length = 16 }}
cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}
strategy = {{ name = "{strategy}", {axis} = {ranks} }}
"""


def scenario(strategy: str, *, ranks: int) -> Scenario:
    """A small GPT under `strategy`."""
    axis = "dp_shard" if strategy.startswith("fsdp") else "dp_replicate"
    text = TEXT.format(strategy=strategy, axis=axis, ranks=ranks)
    return parse(text.encode(), where=f"{strategy}.toml")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero_redundancy"])
def test_values_made_unit_by_unit_are_those_of_the_whole_model(strategy: str) -> None:
    case = scenario(strategy, ranks=1)
    expected = modules.build(case.model, seed=case.seed).state_dict()
    model = modules.empty(case.model, seed=case.seed)
    assert all(parameter.is_meta for parameter in model.parameters())
    with torch_private.fake_group(rank=0, world_size=1):
        measured = MeasuredRank(
            case, rank=0, device="cpu", progress=lambda _: None, keep=lambda _: None
        )
        make = Initialiser(
            model=model, spec=case.model, seed=case.seed, device="cpu", meter=measured.meter
        )
        subject = SUBJECTS[strategy](case, model, measured.mesh, make)
        gathered = whole_parameters(subject)
    assert gathered.keys() == expected.keys()
    assert all(torch.equal(gathered[fqn], expected[fqn]) for fqn in expected)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_a_rank_that_shards_never_holds_the_whole_model(strategy: str) -> None:
    """The largest unit whole, joined once more by FSDP1, is the most beside shards."""
    case = scenario(strategy, ranks=64)
    sizes = {parameter.fqn: 4 * parameter.numel for parameter in case.model.parameters}
    largest = max(sum(sizes[fqn] for fqn in fqns) for fqns in by_unit(case.model).values())
    with torch_private.fake_group(rank=0, world_size=64):
        built = observe(case, rank=0).run.phases["construction"].memory
    joined = {"fsdp2": 1, "fsdp1": 2}[strategy]
    assert largest <= built.peak_bytes <= joined * largest + 2 * sum(sizes.values()) / 64
    assert built.peak_bytes < sum(sizes.values())
