"""Expectations of torch's own tests with torch beside them: DDP's buckets, owners of optimizer
states, and a gathered block that outlives its use. The table is tests/torch_expectations.md."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.optim import ZeroRedundancyOptimizer

from zreal import torch_private
from zreal.observer.observer import observe
from zsim.autograd.lowering.lower_model import lower
from zsim.ir.ledger_replay import replay
from zsim.ir.sharding import greedy_owners
from zsim.models.families.mlp import MlpSizes, build
from zsim.models.spec import Parameter
from zsim.models.training_options import Batch, Precision
from zsim.scenario.plan import plan, training
from zsim.scenario.scenario import parse
from zsim.strategies import ddp
from zsim.strategies.building.training import Training
from zsim.strategies.replicated.buckets import ready_order, reduced_parameters


def perceptron(dims: list[int], hidden: int) -> Training:
    """A perceptron in float32."""
    model = build(
        MlpSizes(dims=tuple(dims), hidden=hidden, num_classes=3), name="mlp", sequence_length=1
    )
    batch = Batch(micro_batch=1)
    modules = lower(model, batch=batch, dtype="float32")
    return Training(model=model, modules=modules, batch=batch, precision=Precision())


def torchs_buckets(
    parameters: tuple[Parameter, ...], limits: list[int]
) -> tuple[tuple[Parameter, ...], ...]:
    """Buckets that torch makes of `parameters`, none of which takes memory."""
    tensors = [torch.empty(parameter.numel, device="meta") for parameter in parameters]
    indices, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
    return tuple(tuple(parameters[index] for index in bucket) for bucket in indices)


@settings(max_examples=20, deadline=None)
@given(
    dims=st.lists(st.sampled_from([1, 7, 10, 512, 1024]), min_size=2, max_size=5),
    hidden=st.sampled_from([1, 50, 512, 4096]),
    cap=st.one_of(st.none(), st.sampled_from([400, 4 * 512, 2**20, 2**20 + 2048, 2**22])),
    finds_unused=st.booleans(),
)
def test_buckets_close_where_torch_closes_them(
    dims: list[int], hidden: int, cap: int | None, finds_unused: bool
) -> None:
    """test_c10d_common.py, assignment of gradients to buckets with one limit and with several: the
    first of 1 MiB, all later ones of 25 MiB."""
    case = perceptron(dims, hidden)
    options = ddp.Options(
        bucket_cap_mb=None if cap is None else cap / ddp.MIB, find_unused_parameters=finds_unused
    )
    limits = [cap] if cap else [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * 2**20]
    if finds_unused:
        theirs = torchs_buckets(reduced_parameters(case.model), limits)[::-1]
    else:
        theirs = torchs_buckets(ready_order(case), limits)
    assert ddp.buckets(case, options) == theirs


def logged(text: str) -> tuple[int, ...]:
    """The numbers of one entry of torch's log."""
    return tuple(int(number) for number in text.replace(",", " ").split())


@pytest.mark.parametrize("model", [
    'family = "mlp", sizes = { dims = [7, 5, 9, 4], hidden = 11, num_classes = 3 }',
    'family = "gpt", sizes = { num_layers = 2, hidden_size = 8, num_heads = 2, vocabulary = 13 }',
    'family = "llama", sizes = { num_layers = 2, hidden_size = 8, num_heads = 2, num_kv_heads = 1, '
    'feed_forward = 24, vocabulary = 13 }',
])
@pytest.mark.parametrize("cap", ["", ", bucket_cap_mb = 0.0005"])
def test_torch_logs_the_buckets_and_the_order_of_gradients_that_we_plan(
    model: str, cap: str
) -> None:
    """distributed_test.py, DDP's logging data: bytes of the first bucket and of rebuilt ones, the
    parameters in each, the order in which gradients were ready."""
    text = f"""
model = {{ {model} }}
batch = {{ micro_batch = 2, sequence_length = {1 if "mlp" in model else 4} }}
cluster = {{ preset = "cpu-gloo", ranks = 2 }}
strategy = {{ name = "ddp"{cap} }}
"""
    case = parse(text.encode(), where="expected.toml")
    with torch_private.fake_group(rank=0, world_size=2):
        subject = observe(case, rank=0).subject
        assert subject is not None
        log = subject.module._get_ddp_logging_data()

    planned = training(case, device="cpu")
    numbers = {
        parameter.fqn: index for index, parameter in enumerate(reduced_parameters(case.model))
    }
    buckets = ddp.buckets(planned, case.options)
    sizes = tuple(4 * sum(parameter.numel for parameter in bucket) for bucket in buckets)
    members = [tuple(numbers[parameter.fqn] for parameter in bucket) for bucket in buckets]
    ready = tuple(numbers[parameter.fqn] for parameter in ready_order(planned))
    assert logged(log["bucket_sizes"]) == (4 * case.model.num_parameters,)
    assert logged(log["rebuilt_bucket_sizes"]) == sizes
    assert [logged(each) for each in log["rebuilt_per_bucket_param_indices"].split(",")] == members
    assert logged(log["prev_iteration_grad_ready_order_indices"]) == ready
    assert (len(buckets) > 1) == bool(cap)


def owned_by_torch(sizes: list[int], *, ranks: int) -> list[list[int]]:
    """Indices of the parameters that torch gives each rank, as its optimizer holds them."""
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    names = {id(parameter): index for index, parameter in enumerate(parameters)}
    with torch_private.fake_group(rank=0, world_size=ranks):
        optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
        return [
            [names[id(parameter)] for group in groups for parameter in group["params"]]
            for groups in optimizer._partition_parameters()
        ]


def owned(sizes: list[int], *, ranks: int) -> list[list[int]]:
    """Indices of the parameters that each rank owns, largest first."""
    owners = greedy_owners(sizes, num_ranks=ranks)
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    return [[index for index in order if owners[index] == rank] for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_equal_owners_hold_equal_parts(ranks: int) -> None:
    """optim/test_zero_redundancy_optimizer.py, sharding: 9, 7, 5 and 3 elements for each rank."""
    sizes = [9, 7, 5, 3]
    ours = owned(sizes * ranks, ranks=ranks)
    assert ours == owned_by_torch(sizes * ranks, ranks=ranks)
    assert {sum((sizes * ranks)[index] for index in part) for part in ours} == {sum(sizes)}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 5))
def test_any_parameters_have_the_owners_that_torch_gives_them(sizes: list[int], ranks: int) -> None:
    """optim/test_zero_redundancy_optimizer.py, its greedy partition of sorted parameters."""
    assert owned(sizes, ranks=ranks) == owned_by_torch(sizes, ranks=ranks)


TEXT = """
model = { family = "gpt", sizes = { num_layers = 3, hidden_size = 48, num_heads = 4, vocabulary = 32, tied = false } }
batch = { micro_batch = 1, sequence_length = 4 }
cluster = { preset = "cpu-gloo", ranks = 2 }
"""  # noqa: E501


@pytest.mark.parametrize(("strategy", "part", "shards", "halves_of_blocks"), [
    ("reshard_after_forward = false", "forward", 3, 4),
    ("reshard_after_forward = true, offload = true", "backward", 1, 9),
])
def test_torch_holds_a_block_more_than_its_own_bound_counts(
    strategy: str, part: str, shards: int, halves_of_blocks: int
) -> None:
    """test_fully_shard_memory.py, forward without reshard and offloaded backward. Beside shards and
    whole parameters it counts one gathered block, and three blocks; torch 2.13 holds two, and four.
    Half a block of gradients is on the host, as the shards are, which is the device here."""
    text = f"{TEXT}strategy = {{ name = \"fsdp2\", {strategy} }}\n"
    case = parse(text.encode(), where="expected.toml")
    with torch_private.fake_group(rank=0, world_size=2):
        measured = observe(case, rank=0).run.phases["first"].memory
    predicted = replay(plan(case, device="cpu").of_rank(0))["first"]

    shard = 2 * case.model.num_parameters
    block = next(4 * unit.numel for unit in case.model.units if unit.fqn == "blocks.0")
    assert measured.highest_by_part[part] == predicted.highest_by_part[part]
    bound = shards * shard + halves_of_blocks * block // 2
    assert bound <= measured.highest_by_part[part] < bound + block // 2
