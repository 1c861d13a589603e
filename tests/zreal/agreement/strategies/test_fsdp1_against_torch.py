"""fsdp1 as predicted against torch's own FullyShardedDataParallel on the fake process group: order,
bytes and memory, all exact."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support.agreement import differences
from tests.support.cases.sampling import one_in
from zreal import torch_private
from zreal.meters.mesh_groups import device_mesh
from zreal.modules import modules
from zreal.modules.initial_values import made
from zreal.modules.numerics import batches as batching
from zreal.observer.subjects.table import SUBJECTS
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse

PRECISIONS = (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "bf16"))
ACCUMULATIONS = ((1, "every"), (2, "every"), (3, "last"))
OPTIONS = (
    "", ", use_orig_params = true", ', sharding = "grad_op"', ', backward_prefetch = "post"',
    ', backward_prefetch = "none", use_orig_params = true', ", forward_prefetch = true",
    ', sharding = "grad_op", forward_prefetch = true, backward_prefetch = "post", '
    'use_orig_params = true, limit_all_gathers = false',
)
OPTIMIZERS = (
    'name = "adamw"', 'name = "adamw", implementation = "for-loop", clip_norm = 0.5',
    'name = "adamw", implementation = "fused", clip_norm = 0.5', 'name = "sgd", momentum = 0.9',
)


def scenario(
    model: str, options: str = "", *, mesh: tuple[int, int] = (1, 4),
    precision: tuple[str, str] = ("fp32", "fp32"), accumulation: tuple[int, str] = (1, "every"),
    optimizer: str = OPTIMIZERS[0], more: str = "",
) -> Scenario:
    """A scenario of fsdp1 on `mesh`, replicas by shards."""
    text = f"""
model = {{ preset = "{model}" }}
batch = {{ micro_batch = 2, sequence_length = {1 if "mlp" in model else 16}, accumulation = {accumulation[0]} }}
cluster = {{ preset = "cpu-gloo", ranks = {mesh[0] * mesh[1]} }}
strategy = {{ name = "fsdp1", dp_replicate = {mesh[0]}, dp_shard = {mesh[1]}, sync = "{accumulation[1]}"{options} }}
precision = {{ parameters = "{precision[0]}", reduce = "{precision[1]}" }}
optimizer = {{ {optimizer} }}
{more}
"""  # noqa: E501
    return parse(text.encode(), where="fsdp1.toml")


CASES = list(itertools.product(OPTIONS, PRECISIONS, ACCUMULATIONS))


@pytest.mark.parametrize(("options", "precision", "accumulation"), one_in(17, CASES))
def test_fsdp1_of_uneven_mlp_is_exact(
    options: str, precision: tuple[str, str], accumulation: tuple[int, str]
) -> None:
    """Each rank of four in turn, with each optimizer in turn; the last shard of each flat parameter
    is padded."""
    index = CASES.index((options, precision, accumulation))
    case = scenario(
        "mlp-uneven", options, precision=precision, accumulation=accumulation,
        optimizer=OPTIMIZERS[index // 5 % 4],
    )
    assert differences(case, rank=index % 4) == []


@pytest.mark.parametrize(("model", "mesh", "options"), [
    ("gpt-tiny", (2, 2), ', sharding = "grad_op", use_orig_params = true'),
    ("llama-tiny", (1, 3), ", forward_prefetch = true"),
])
def test_fsdp1_of_transformers_is_exact(model: str, mesh: tuple[int, int], options: str) -> None:
    """Tied weights of the root, blocks recomputed; replicas reduce shards that are divided before
    and after."""
    more = 'activation_checkpointing = { mode = "full" }' if "llama" in model else ""
    case = scenario(
        model, options, mesh=mesh, precision=("bf16", "fp32"), accumulation=(2, "every"), more=more
    )
    assert differences(case, rank=case.world_size - 1) == []


@pytest.mark.parametrize(("mesh", "options"), [((1, 64), ", use_orig_params = true"), ((8, 8), "")])
def test_fsdp1_is_exact_on_the_last_rank_of_larger_worlds(
    mesh: tuple[int, int], options: str
) -> None:
    """The last of the root's 64 shards is nothing but padding: its gradient is forgotten between
    micro-batches."""
    assert (
        differences(scenario("mlp-tiny", options, mesh=mesh, accumulation=(2, "every")), rank=63)
        == []
    )


MARKS = {
    "FullyShardedDataParallel.rate_limiter": "wait", "c10d::allgather_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
}


def seen(case: Scenario, *, steps: int) -> list[list[str]]:
    """Collectives and waits of the limiter in torch's steps, in order, as the profiler has them.

    The first waits are for frees of an earlier step, and thus over. They are left out: as many as
    torch has in its queue when the step begins.
    """
    marked = []
    with torch_private.fake_group(rank=0, world_size=case.world_size):
        mesh, _ = device_mesh(case, device="cpu")
        model = modules.build(case.model, seed=case.seed)
        subject = SUBJECTS[case.strategy](case, model, mesh, made)
        for step in range(steps):
            earlier = len(subject.module._free_event_queue._queue)
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
            ) as profiler:
                batches = batching.micro_batches(case, rank=0, step=step, dtype=subject.dtype)
                for index, forwards in enumerate(batching.forwards_of(case, batches)):
                    with subject.micro_batch(index == case.batch.accumulation - 1):
                        batching.summed_loss(subject.module, forwards).backward()
            subject.optimizer.zero_grad(set_to_none=True)
            events = sorted(profiler.events(), key=lambda event: event.time_range.start)
            marked.append([MARKS[event.name] for event in events if event.name in MARKS])
            for _ in range(earlier):
                marked[-1].remove("wait")
    return marked


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.11's
@pytest.mark.parametrize(
    "options",
    [', backward_prefetch = "post"', ", forward_prefetch = true", ', sharding = "grad_op"'],
)
def test_the_limiter_makes_the_host_wait_where_torchs_does(options: str) -> None:
    case = scenario("mlp-uneven", options)
    waited(case, seen(case, steps=4))


def waited(case: Scenario, real: list[list[str]]) -> None:
    """Assert that the Program waits as `real` does, in the first step and in a steady one."""
    program = plan(case, device="cpu").ranks[0]
    first, steady = (
        [kind for op in ops if (kind := op.kind.replace("host_wait", "wait")) in MARKS.values()]
        for ops in (program.first, program.steady)
    )
    assert first == real[0]
    assert steady == real[-1]
    assert first.count("wait") > 0 < steady.count("wait")
