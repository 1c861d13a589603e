"""fsdp2 and hsdp as predicted against torch's own fully_shard on the fake process group: order,
bytes and memory, all exact."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.agreement import differences
from tests.support.cases.sampling import one_in
from tests.support.installed_torch import TORCH
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse
from zsim.testing.strategies import scenarios

PRECISIONS = (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"))
ACCUMULATIONS = ((1, "every"), (2, "every"), (3, "last"))


def scenario(
    model: str, *, ranks: int, keep: str = '"auto"', precision: tuple[str, str] = ("fp32", "fp32"),
    accumulation: tuple[int, str] = (1, "every"), replicas: int = 1,
    implementation: str = "foreach",
) -> Scenario:
    """A scenario of fully_shard, on a 2-D mesh when there are replicas."""
    count, sync = accumulation
    name = "hsdp" if replicas > 1 else "fsdp2"
    replicate = f"dp_replicate = {replicas}, " if replicas > 1 else ""
    text = f"""
model = {{ preset = "{model}" }}
batch = {{ micro_batch = 2, sequence_length = {1 if "mlp" in model else 32}, accumulation = {count} }}
cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}
strategy = {{ name = "{name}", {replicate}dp_shard = {ranks // replicas}, reshard_after_forward = {keep}, sync = "{sync}" }}
precision = {{ parameters = "{precision[0]}", reduce = "{precision[1]}" }}
optimizer = {{ name = "adamw", implementation = "{implementation}" }}
"""  # noqa: E501
    return parse(text.encode(), where="test.toml")


@pytest.mark.parametrize(
    ("keep", "precision", "accumulation"),
    one_in(5, itertools.product(('"auto"', "true", "false", "2"), PRECISIONS, ACCUMULATIONS)),
)
def test_fsdp2_of_uneven_mlp_on_four_ranks_is_exact(
    keep: str, precision: tuple[str, str], accumulation: tuple[int, str]
) -> None:
    case = scenario(
        "mlp-uneven", ranks=4, keep=keep, precision=precision, accumulation=accumulation
    )

    assert differences(case, rank=3) == []


@pytest.mark.parametrize(
    ("precision", "accumulation"), one_in(2, itertools.product(PRECISIONS, ACCUMULATIONS))
)
def test_hsdp_of_mlp_on_two_times_two_ranks_is_exact(
    precision: tuple[str, str], accumulation: tuple[int, str]
) -> None:
    case = scenario("mlp-tiny", ranks=4, replicas=2, precision=precision, accumulation=accumulation)

    assert differences(case, rank=0) == []


@pytest.mark.parametrize("ranks", [2, 8, 64, 1024])
def test_fsdp2_of_mlp_is_exact_on_the_last_rank_of_any_world(ranks: int) -> None:
    assert differences(scenario("mlp-tiny", ranks=ranks), rank=ranks - 1) == []


@pytest.mark.parametrize(
    ("model", "precision", "accumulation"),
    one_in(5, itertools.product(["gpt-tiny", "llama-tiny"], PRECISIONS, ACCUMULATIONS)),
)
def test_fsdp2_of_transformers_is_exact(
    model: str, precision: tuple[str, str], accumulation: tuple[int, str]
) -> None:
    assert differences(
        scenario(model, ranks=4, precision=precision, accumulation=accumulation), rank=0
    ) == []


@pytest.mark.parametrize("implementation", ["foreach", "for-loop", "fused"])
def test_optimizer_implementations_are_exact_on_a_model_of_nothing_but_optimizer(
    implementation: str
) -> None:
    assert differences(scenario("mlp-small", ranks=2, implementation=implementation), rank=0) == []


EXACT = scenarios(families=("mlp", "gpt"), strategies=("fsdp2", "hsdp"))


@settings(max_examples=8)
@given(case=EXACT, data=st.data())
def test_random_scenarios_of_fully_shard_are_exact(case: Scenario, data: st.DataObject) -> None:
    """One rank and many, one shard or one replica, odd widths, every option: order, bytes, peaks
    and what is held by kind."""
    assert differences(case, rank=data.draw(st.integers(0, case.world_size - 1))) == []


@pytest.mark.parametrize(
    ("mesh", "sync", "precision"),
    one_in(5, itertools.product(
        [(2, 1), (2, 2), (4, 3)], ["every", "last"], [*PRECISIONS, ("fp32", "bf16")]
    )),
)
def test_replicas_reduced_after_the_last_micro_batch_only_are_exact(
    mesh: tuple[int, int], sync: str, precision: tuple[str, str]
) -> None:
    replicas, shards = mesh
    text = f"""
model = {{ preset = "mlp-uneven" }}
batch = {{ micro_batch = 2, accumulation = 3 }}
cluster = {{ preset = "cpu-gloo", ranks = {replicas * shards} }}
strategy = {{ name = "hsdp", dp_replicate = {replicas}, dp_shard = {shards}, all_reduce = "last", sync = "{sync}" }}
precision = {{ parameters = "{precision[0]}", reduce = "{precision[1]}" }}
"""  # noqa: E501
    case = parse(text.encode(), where="test.toml")
    assert differences(case, rank=case.world_size - 1) == []
    steady = plan(case, device="cpu", torch=TORCH).of_rank(0).steady
    kinds = [op.kind for op in steady]
    assert kinds.count("all_reduce") == len(case.model.units)
    assert kinds.count("reduce_scatter") == len(case.model.units) * (
        3 if sync == "every" else 1
    ) * (shards > 1)


MESHES = [(1, 1), (1, 4), (4, 1), (3, 5), (16, 64), (4, 256)]


@pytest.mark.parametrize(("replicas", "shards"), MESHES)
def test_hsdp_of_any_mesh_is_exact_from_construction_on(replicas: int, shards: int) -> None:
    text = f"""
model = {{ preset = "mlp-tiny" }}
batch = {{ micro_batch = 2 }}
cluster = {{ preset = "cpu-gloo", ranks = {replicas * shards} }}
strategy = {{ name = "hsdp", dp_replicate = {replicas}, dp_shard = {shards} }}
"""
    assert differences(parse(text.encode(), where="mesh.toml"), rank=0) == []


@pytest.mark.parametrize(("ranks", "keep"), [(64, 8), (1024, 8), (1024, 512)])
def test_resharding_to_fewer_ranks_is_exact_from_construction_on(ranks: int, keep: int) -> None:
    assert differences(scenario("mlp-tiny", ranks=ranks, keep=str(keep)), rank=0) == []
