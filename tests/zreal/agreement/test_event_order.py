"""Every allocation and every free of a step, in order: torch on the fake process group against the
Program.

Cases are small models with one option at a time, and 50 draws of the matrix with all of them. ZeRO,
which torch does not have, is not among them.

Neighbouring frees are put in order of size: the end of a Python frame or of an autograd node drops
several references in either order. That changes no byte in use at any allocation. Nothing is left
out.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from functools import cache

import pytest
from torch.nn.utils import clip_grad_norm_

from tests.support.agreement import steps_until_steady
from tests.support.cases.memory_matrix import matrix
from tests.support.cases.sampling import one_in
from tests.support.installed_torch import TORCH
from zreal import torch_private
from zreal.meters.memory import MemoryMeter
from zreal.meters.mesh_groups import device_mesh
from zreal.modules import modules
from zreal.modules.initial_values import made
from zreal.modules.numerics import batches as batching
from zreal.observer.subjects.table import SUBJECTS
from zsim.ir.ops import Alloc, Op
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse

QUICK_DRAWS = (7, 31)
"""Draws, of the fifty, that every run of the suite compares."""

SMALL = "num_layers = 2, hidden_size = 16, num_heads = 4, feed_forward = 24, vocabulary = 29"
MODELS = {
    "mlp": '{ preset = "mlp-tiny" }', "gpt explicit": '{ preset = "gpt-tiny", num_layers = 2 }',
    "gpt sdpa": '{ preset = "gpt-tiny", num_layers = 2, attention = "sdpa" }',
    "llama explicit": '{ preset = "llama-tiny", num_layers = 2, attention = "explicit" }',
    "llama sdpa": '{ preset = "llama-tiny", num_layers = 2 }',
    "gpt math": f'{{ family = "gpt", sizes = {{ {SMALL}, attention = "math" }} }}',
    "llama math": f'{{ family = "llama", sizes = {{ {SMALL}, num_kv_heads = 2, attention = "math" '
                  f'}} }}',
    "llama tied": f'{{ family = "llama", sizes = {{ {SMALL}, num_kv_heads = 2, tied = true }} }}',
    "llama ungrouped": f'{{ family = "llama", sizes = {{ {SMALL}, num_kv_heads = 4, attention = '
                       f'"explicit" }} }}',
}
STRATEGIES = {
    "fsdp2": 'name = "fsdp2"', "fsdp2 resharding": 'name = "fsdp2", reshard_after_forward = true',
    "ddp": 'name = "ddp"', "zero_redundancy": 'name = "zero_redundancy"',
}
CHECKPOINTING = {
    "none": 'mode = "none"', "full": 'mode = "full"',
    "save": 'mode = "selective", save = ["linear"]',
    "recompute": 'mode = "selective", recompute = ["linear"]',
    "save every second": 'mode = "selective", save = ["linear"], save_every = 2',
}


def scenario(
    model: str, strategy: str, *, parameters: str, again: str = "none", micro_batch: int = 2,
    accumulation: int = 1, ranks: int = 2, autocast: str = "none", frozen: str = "[]",
) -> Scenario:
    text = f"""
frozen = {frozen}
model = {MODELS.get(model, model)}
batch = {{ micro_batch = {micro_batch}, sequence_length = {1 if model == "mlp" else 8}, accumulation = {accumulation} }}
cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}
strategy = {{ {STRATEGIES.get(strategy, strategy)} }}
precision = {{ parameters = "{parameters}", reduce = "fp32", autocast = "{autocast}" }}
activation_checkpointing = {{ {CHECKPOINTING[again]} }}
"""  # noqa: E501
    return parse(text.encode(), where="order.toml")


def in_order(deltas: Iterable[int]) -> list[int]:
    """The deltas, neighbouring frees sorted."""
    events: list[int] = []
    frees: list[int] = []
    for delta in deltas:
        if delta > 0:
            events += [*sorted(frees), delta]
            frees = []
        elif delta:
            frees.append(delta)
    return [*events, *sorted(frees)]


def of_torch(case: Scenario, *, steps: int | None = None) -> list[int]:
    """The events of rank 0's steady step, or of the last of `steps`, 0 of wrapping the model."""
    return of_torchs_steps(case, steps=steps_until_steady(case) if steps is None else steps)[-1]


def of_torchs_steps(case: Scenario, *, steps: int = 3) -> list[list[int]]:
    """The events of wrapping the model, and of each step, of rank 0."""
    logs: list[list[int]] = []
    with torch_private.fake_group(rank=0, world_size=case.world_size):
        mesh, _ = device_mesh(case, device="cpu")
        meter = MemoryMeter(log=True)
        model = modules.build(case.model, seed=case.seed, checkpointing=case.checkpointing)
        with meter:
            meter.watch(*model.parameters())
            subject = SUBJECTS[case.strategy](case, model, mesh, made)
            assert meter.events is not None
            logs.append(in_order(delta for _, delta in meter.events))
            for step in range(steps):
                with meter.uncounted():
                    batches = batching.micro_batches(case, rank=0, step=step, dtype=subject.dtype)
                meter.events.clear()
                of_micro_batch = batching.forwards_of(case, batches)
                for index, forwards in enumerate(of_micro_batch):
                    with subject.micro_batch(index == len(of_micro_batch) - 1):
                        with batching.autocast(case.precision, device="cpu"):
                            loss = batching.summed_loss(subject.module, forwards)
                        loss.backward()
                        del loss
                if case.optimizer.clip_norm:
                    clip = subject.clip or (
                        lambda norm: clip_grad_norm_(subject.module.parameters(), norm)
                    )
                    clip(case.optimizer.clip_norm)
                subject.optimizer.step()
                subject.optimizer.zero_grad(set_to_none=True)
                logs.append(in_order(delta for _, delta in meter.events))
    return logs


def of_program(case: Scenario, *, step: int = 3) -> list[int]:
    """The events of rank 0's first, second or any later step; of wrapping the model for the step 0.
    """
    program = plan(case, device="cpu", torch=TORCH).of_rank(0)
    steps = (program.construction, program.first, program.second, program.steady)
    live: dict[str, int] = {}
    before, own = (steps[:2], steps[2:]) if step == 2 else (steps[:step], steps[step : step + 1])
    for _ in (delta for ops in before for delta in deltas(ops, live)):
        pass
    return in_order(delta for ops in own for delta in deltas(ops, live))


def deltas(ops: Iterable[Op], live: dict[str, int]) -> Iterator[int]:
    """Bytes that `ops` allocate and, negative, free; `live` are the sizes of what lives."""
    for op in ops:
        for event in op.memory:
            if isinstance(event, Alloc):
                live[event.buffer] = event.nbytes
                yield event.nbytes
            else:
                yield -live.pop(event.buffer)


@pytest.mark.parametrize(
    ("model", "strategy", "parameters"),
    one_in(3, itertools.product(MODELS, STRATEGIES, ["fp32", "bf16"])),
)
def test_every_allocation_and_free_of_a_step_comes_in_torchs_order(
    model: str, strategy: str, parameters: str
) -> None:
    case = scenario(model, strategy, parameters=parameters)
    assert of_program(case) == of_torch(case)


BUCKETS = [
    f'name = "{name}", bucket_cap_mb = 0.002{options}'
    for name in ("ddp", "zero_redundancy")
    for options in (
        "", ", gradient_as_bucket_view = true", ', sync = "last"',
        ', sync = "last", gradient_as_bucket_view = true',
    )
]


@pytest.mark.parametrize(
    "strategy",
    [*BUCKETS, BUCKETS[0] + ", find_unused_parameters = true", 'name = "fsdp2"', 'name = "hsdp"'],
)
@pytest.mark.parametrize(("parameters", "accumulation"), [("fp32", 1), ("bf16", 2)])
def test_so_does_that_of_the_first_and_second_step_in_which_ddp_rebuilds_its_buckets(
    strategy: str, parameters: str, accumulation: int
) -> None:
    mesh = ", dp_replicate = 2, dp_shard = 2" if "hsdp" in strategy else ""
    case = scenario(
        "mlp", strategy + mesh, parameters=parameters, ranks=4 if mesh else 3,
        accumulation=accumulation,
    )
    program = plan(case, device="cpu", torch=TORCH).of_rank(0)
    assert (
        len([
            op for op in program.steady if op.unit.startswith("bucket") and op.kind == "all_reduce"
        ])
        > 1
        or "sdp" in strategy
    )
    assert [of_program(case, step=step) for step in (1, 2)] == of_torchs_steps(case, steps=2)[1:]


@pytest.mark.parametrize("views", ["false", "true"])
def test_ddp_that_finds_unused_parameters_makes_a_storage_for_each_bucket_when_it_wraps_the_model(
    views: str
) -> None:
    options = (
        f"bucket_cap_mb = 0.002, find_unused_parameters = true, gradient_as_bucket_view = {views}"
    )
    case = scenario("mlp", f'name = "ddp", {options}', parameters="fp32", ranks=3)
    reduced = [
        op.nbytes for op in plan(case, device="cpu", torch=TORCH).of_rank(0).steady
        if op.unit.startswith("bucket.") and op.kind == "all_reduce"
    ]
    made = [*reduced, 4 * 14, 4 * 14]  # the map of the 14 parameters, on the host and on the device
    assert of_program(case, step=0)[-len(made) :] == of_torch(case, steps=0)[-len(made) :] == made
    assert len(reduced) > 1


@pytest.mark.parametrize(
    ("model", "again", "parameters"),
    one_in(5, itertools.product(MODELS, ["full", "save", "recompute"], ["fp32", "bf16"])),
)
def test_recomputation_allocates_and_frees_in_torchs_order(
    model: str, again: str, parameters: str
) -> None:
    case = scenario(model, "fsdp2", parameters=parameters, again=again)
    assert of_program(case) == of_torch(case)


GROUPS = {
    "one shard": ('name = "fsdp2"', 1),
    "two replicas of one shard": ('name = "hsdp", dp_replicate = 2, dp_shard = 1', 2),
    "resharded to two": ('name = "fsdp2", reshard_after_forward = 2', 4),
    "replicas reduced last": (
        'name = "hsdp", dp_replicate = 2, dp_shard = 2, all_reduce = "last"', 4
    ),
    "flat": ('name = "fsdp1", dp_shard = 2', 2), "offloaded": ('name = "fsdp2", offload = true', 2),
    "offloaded, one shard": ('name = "fsdp2", offload = true', 1),
    "offloaded, resharded to two": ('name = "fsdp2", reshard_after_forward = 2, offload = true', 4),
}


@pytest.mark.parametrize(
    ("group", "parameters", "accumulation"),
    one_in(3, itertools.product(GROUPS, ["fp32", "bf16"], [1, 3])),
)
def test_groups_of_any_form_allocate_and_free_in_torchs_order(
    group: str, parameters: str, accumulation: int
) -> None:
    strategy, ranks = GROUPS[group]
    case = scenario(
        "gpt sdpa", strategy, parameters=parameters, accumulation=accumulation, ranks=ranks
    )
    assert of_program(case) == of_torch(case)


@pytest.mark.parametrize(("model", "parameters", "again", "frozen"), [
    ("mlp", "fp32", "none", '["blocks.0.*"]'), ("mlp", "bf16", "full", '["blocks.*"]'),
    ("llama sdpa", "bf16", "none", "[]"), ("llama sdpa", "bf16", "none", '["blocks.0.*"]'),
])
def test_a_block_resharded_to_two_holds_what_it_was_called_with_until_its_shard_is_made(
    model: str, parameters: str, again: str, frozen: str
) -> None:
    """The call alone holds it: frozen blocks, and those that cast it, keep none for backward."""
    case = scenario(
        model, GROUPS["resharded to two"][0], parameters=parameters, again=again, frozen=frozen,
        ranks=4,
    )
    assert of_program(case) == of_torch(case)


@pytest.mark.parametrize("model", [name for name in MODELS if name != "mlp"])
def test_one_sequence_is_flattened_with_fewer_copies_than_two(model: str) -> None:
    case = scenario(model, "ddp", parameters="fp32", micro_batch=1)
    assert of_program(case) == of_torch(case)


@pytest.mark.parametrize(
    ("parameters", "autocast"), [("fp32", "none"), ("bf16", "none"), ("fp32", "bf16")]
)
def test_logits_are_cast_before_the_loss_in_torchs_order(parameters: str, autocast: str) -> None:
    model = f'{{ family = "gpt", sizes = {{ {SMALL}, loss_dtype = "float32" }} }}'
    case = scenario(model, "ddp", parameters=parameters, autocast=autocast)
    assert of_program(case) == of_torch(case)


@pytest.mark.parametrize(("model", "strategy", "again"), [
    ("mlp", "fsdp2", "none"), ("mlp", "ddp", "full"), ("gpt explicit", "fsdp2 resharding", "none"),
    ("gpt explicit", "ddp", "recompute"), ("gpt sdpa", "zero_redundancy", "save"),
    ("llama sdpa", "fsdp2", "full"), ("llama sdpa", "fsdp2", "save every second"),
    ("llama tied", "fsdp2", "none"), ("llama ungrouped", "fsdp2", "recompute"),
])
def test_autocast_casts_keeps_and_lets_go_in_torchs_order(
    model: str, strategy: str, again: str
) -> None:
    case = scenario(model, strategy, parameters="fp32", again=again, autocast="bf16")
    assert of_program(case) == of_torch(case)


@cache
def draws() -> tuple[Scenario, ...]:
    """Fifty of the matrix's draws of at most 8 ranks, not traced, whose strategy torch has itself,
    spread over all of them."""
    wanted = re.compile(r'ranks = [1-8] }\n.*name = "(ddp|fsdp2|hsdp|zero_r)')
    texts = [text for text in matrix() if wanted.search(text) and "traced = " not in text]
    return tuple(
        parse(texts[index * len(texts) // 50].encode(), where="matrix.toml") for index in range(50)
    )


@pytest.mark.parametrize(
    "index",
    [pytest.param(n, marks=[] if n in QUICK_DRAWS else [pytest.mark.slow]) for n in range(50)],
)
def test_every_allocation_and_free_of_a_draw_comes_in_torchs_order(index: int) -> None:
    case = draws()[index]
    assert [of_program(case, step=step) for step in (1, 2, 3)] == of_torchs_steps(case)[1:]


@cache
def flat_draws() -> tuple[Scenario, ...]:
    """Twenty of the matrix's draws of fsdp1, as `draws` takes them."""
    texts = [
        text for text in matrix()
        if re.search(r'ranks = [1-8] }\n.*name = "fsdp1"', text) and "traced = " not in text
    ]
    return tuple(
        parse(texts[index * len(texts) // 20].encode(), where="matrix.toml") for index in range(20)
    )


@pytest.mark.parametrize("index", one_in(9, range(20)))
def test_every_allocation_and_free_of_a_draw_of_fsdp1_comes_in_torchs_order(index: int) -> None:
    case = flat_draws()[index]
    assert [of_program(case, step=step) for step in (1, 2, 3)] == of_torchs_steps(case)[1:]


@pytest.mark.parametrize(
    "strategy", ['name = "fsdp2", sync = "last"', 'name = "ddp", sync = "last"']
)
def test_a_norm_after_two_forwards_accumulates_once_its_node_is_over(strategy: str) -> None:
    """The sums of its weight and of its bias both wait, until both are made, for what earlier
    micro-batches have left."""
    text = f"""
model = {{ family = "gpt", sizes = {{ num_layers = 1, hidden_size = 8, num_heads = 1, vocabulary = 5 }} }}
batch = {{ micro_batch = 2, sequence_length = 2, accumulation = 2, forwards = 2 }}
cluster = {{ preset = "cpu-gloo", ranks = 2 }}
strategy = {{ {strategy} }}
"""  # noqa: E501
    case = parse(text.encode(), where="order.toml")
    assert of_program(case) == of_torch(case)
