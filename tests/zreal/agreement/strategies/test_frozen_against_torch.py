"""Frozen parameters and unused blocks: torch on the fake process group, and our executor, against
the Program."""

from __future__ import annotations

import pytest
import torch

from tests.support.agreement import inexact
from tests.support.installed_torch import TORCH
from tests.zreal.agreement.test_event_order import of_program, of_torch
from zreal import torch_private
from zreal.modules import modules
from zreal.modules.numerics.parity import largest, relative_differences
from zreal.modules.numerics.reference import SingleProcess
from zreal.observer.observer import observe
from zsim.ir.ops import COLLECTIVES
from zsim.runs.backend import RunOptions
from zsim.runs.registry import find
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse

SMALL = "num_layers = 4, hidden_size = 8, num_heads = 4, vocabulary = 13"
MODELS = {
    "mlp": 'family = "mlp", sizes = { dims = [7, 5, 5, 5, 9, 9, 4], hidden = 11, num_classes = 3 }',
    "gpt": f'family = "gpt", sizes = {{ {SMALL} }}',
    "gpt sdpa": f'family = "gpt", sizes = {{ {SMALL}, tied = false, attention = "sdpa" }}',
    "llama": f'family = "llama", sizes = {{ {SMALL}, num_kv_heads = 2, feed_forward = 10, '
             f'attention = "explicit" }}',
    "llama sdpa": f'family = "llama", sizes = {{ {SMALL}, num_kv_heads = 2, feed_forward = 10 }}',
}
FSDP2 = 'name = "fsdp2"'
HSDP = 'name = "hsdp", dp_replicate = 2, dp_shard = 2'
OURS = ('name = "zero1"', 'name = "zero1", form = "all_reduce"', 'name = "zero2"', 'name = "zero3"')


def scenario(
    model: str, strategy: str, frozen: str, *, unused: str = "[]", ranks: int = 2,
    parameters: str = "fp32", more: str = "",
) -> Scenario:
    text = f"""
model = {{ {MODELS[model]}, unused = {unused} }}
batch = {{ micro_batch = 2, sequence_length = {1 if model == "mlp" else 8} }}
cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}
strategy = {{ {strategy} }}
precision = {{ parameters = "{parameters}", reduce = "fp32" }}
frozen = {frozen}
{more}
"""
    return parse(text.encode(), where="frozen.toml")


@pytest.mark.parametrize(
    ("model", "strategy", "frozen", "parameters"),
    [
        ("mlp", FSDP2, '["blocks.*.weight"]', "bf16"),
        ("mlp", f"{FSDP2}, reshard_after_forward = false", '["blocks.[01].*"]', "fp32"),
        (
            "gpt", f"{FSDP2}, reshard_after_forward = true", '["w?e.*", "blocks.[01].*", "*.bias"]',
            "bf16",
        ),
        ("gpt sdpa", FSDP2, '["w?e.*", "blocks.0.attn.[qk].*", "blocks.0.ln_1.*"]', "fp32"),
        ("gpt sdpa", 'name = "ddp"', '["blocks.2.*", "*.ln_1.*"]', "bf16"),
        ("llama", FSDP2, '["wte.*", "blocks.0.*gate*", "blocks.0.attn.*"]', "bf16"),
        ("llama sdpa", 'name = "zero_redundancy"', '["wte.*", "*.attn.[qk].*", "*norm*"]', "bf16"),
    ],
)
def test_frozen_weights_change_allocations_and_frees_in_torchs_order(
    model: str, strategy: str, frozen: str, parameters: str
) -> None:
    case = scenario(model, strategy, frozen, parameters=parameters)
    # DDP rebuilds its buckets in the second
    assert of_program(case) == of_torch(case, steps=2 if strategy.startswith(FSDP2) else 3)


@pytest.mark.parametrize(
    ("model", "strategy", "frozen", "more"),
    [
        ("gpt", FSDP2, '["wte.*"]', 'activation_checkpointing = { mode = "full" }'),
        ("gpt sdpa", 'name = "ddp"', '["wte.*", "blocks.*"]', ""),
        ("gpt sdpa", HSDP, '["wpe.*"]', ""),
        ("llama", FSDP2, '["wte.*"]', ""),
    ],
)
def test_a_gradient_is_over_with_the_addition_of_two_tables_of_which_the_other_is_frozen(
    model: str, strategy: str, frozen: str, more: str
) -> None:
    """The sum over sequences that a table of places gets does not hold what it was made of, unless
    the words' table waits for that."""
    case = scenario(model, strategy, frozen, ranks=4 if strategy == HSDP else 2, more=more)
    assert of_program(case) == of_torch(case, steps=3)


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        (FSDP2, ""),
        (f"{FSDP2}, reshard_after_forward = true", 'activation_checkpointing = { mode = "full" }'),
        (HSDP, 'precision = { parameters = "bf16", reduce = "fp32" }'),
    ],
)
def test_a_frozen_block_that_returns_what_a_unit_in_it_made_gathers_after_that(
    strategy: str, more: str
) -> None:
    """The block's last part has an op of its own, which only lets go of the block's input. Both
    hooks are on one tensor all the same."""
    text = f"""
model = {{ {MODELS["mlp"]}, unused = ["blocks.1"] }}
batch = {{ micro_batch = 2, forwards = 2 }}
cluster = {{ preset = "cpu-gloo", ranks = {4 if strategy == HSDP else 2} }}
strategy = {{ {strategy} }}
wrapping = {{ nested = ["fc2"] }}
frozen = ["blocks.3.*"]
{more}
"""
    case = parse(text.encode(), where="frozen.toml")
    assert of_program(case) == of_torch(case)


@pytest.mark.parametrize(
    ("model", "frozen", "again"),
    [
        (
            "gpt sdpa", '["w?e.*", "blocks.[01].*"]',
            'mode = "selective", save = ["linear", "attention"]',
        ),
        (
            "llama", '["wte.*", "*norm*", "blocks.1.*"]',
            'mode = "selective", recompute = ["linear"]',
        ),
    ],
)
def test_recomputation_reaches_what_autograd_packs_of_frozen_layers(
    model: str, frozen: str, again: str
) -> None:
    case = scenario(model, FSDP2, frozen, more=f"activation_checkpointing = {{ {again} }}")
    assert of_program(case) == of_torch(case, steps=2)


@pytest.mark.parametrize(
    ("strategy", "unused"),
    [(HSDP, '["blocks.1"]'), ('name = "ddp"', "[]"), ('name = "zero_redundancy"', "[]")],
)
def test_collectives_and_memory_of_every_phase_are_torchs(strategy: str, unused: str) -> None:
    case = scenario(
        "mlp", strategy, '["blocks.0.*", "blocks.*.fc1.weight"]', unused=unused, ranks=4,
        parameters="bf16",
    )
    assert inexact(case) == []


def test_gradients_of_a_node_that_frees_nothing_are_in_their_bucket_before_the_next_node() -> None:
    case = scenario("gpt sdpa", 'name = "ddp", gradient_as_bucket_view = true', '["*weight"]')
    assert inexact(case) == []


@pytest.mark.parametrize(
    ("model", "frozen", "unused"),
    [("gpt", '["wpe.*"]', '["blocks.0", "blocks.3"]'), ("mlp", "[]", '["blocks.1", "blocks.2"]')],
)
def test_a_block_that_forward_passes_by_is_never_gathered_nor_stepped(
    model: str, frozen: str, unused: str
) -> None:
    case = scenario(model, f"{FSDP2}, reshard_after_forward = true", frozen, unused=unused)
    assert of_program(case) == of_torch(case, steps=2)
    program = plan(case, device="cpu", torch=TORCH).of_rank(0)
    gathered = {op.unit for op in (*program.first, *program.steady) if op.kind in COLLECTIVES}
    assert gathered == {unit.fqn for unit in case.model.units} - case.model.unused


def test_groups_before_the_first_trained_parameter_are_gathered_once_more_by_a_prefetch_that_nobody_awaits() -> (  # noqa: E501
    None
):
    case = scenario("mlp", FSDP2, '["blocks.[01].*"]')
    steady = plan(case, device="cpu", torch=TORCH).of_rank(0).steady
    issued = [(op.kind, op.unit) for op in steady if op.kind in ("all_gather", "reduce_scatter")][
        7:
    ]
    assert issued == [
        ("all_gather", "blocks.5"),
        *(
            (kind, f"blocks.{i - (kind == 'all_gather')}")
            for i in (5, 4, 3)
            for kind in ("all_gather", "reduce_scatter")
        ),
        ("all_gather", "blocks.1"), ("reduce_scatter", "root"), ("reduce_scatter", "blocks.2"),
    ]


@pytest.mark.parametrize("strategy", OURS)
def test_our_own_strategies_reduce_and_step_trained_buffers_only(strategy: str) -> None:
    case = scenario(
        "mlp", strategy, '["blocks.0.*", "*.bias"]', unused='["blocks.1"]', parameters="bf16"
    )
    assert inexact(case, interpreter="executor") == []


def test_the_reference_leaves_frozen_and_unused_parameters_as_they_are() -> None:
    case = scenario("mlp", FSDP2, '["blocks.0.*", "*.bias"]', unused='["blocks.1"]')
    done = SingleProcess(case).train(2)
    assert set(done.parameters) == {
        f"blocks.{i}.fc{j}.weight" for i in (2, 3, 4, 5) for j in (1, 2)
    } | {"head.weight"}
    model = modules.build(case.model, seed=case.seed)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == set(case.model.frozen)
    assert set(done.untrained) == {name for name, _ in model.named_parameters()} - set(
        done.parameters
    )


def test_an_untrained_parameter_that_moves_by_a_bit_is_infinitely_far_from_the_reference() -> None:
    case = scenario("mlp", FSDP2, '["blocks.0.*", "*.bias"]', unused='["blocks.1"]')
    done = SingleProcess(case).train(1)
    parameters = {**done.parameters, **done.untrained}
    assert largest(relative_differences(parameters, done))[0] == 0.0
    moved = torch.nextafter(parameters["head.bias"], torch.ones(()))
    assert largest(relative_differences(parameters | {"head.bias": moved}, done)) == (
        float("inf"), "head.bias",
    )
    assert largest(relative_differences(dict(done.parameters), done))[0] == float("inf")


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("strategy", "parameters", "more"),
    [
        (FSDP2, "fp32", 'activation_checkpointing = { mode = "full" }'),
        ('name = "zero3"', "bf16", 'wrapping = { every = 4, ends = "apart" }'),
    ],
)
def test_training_leaves_what_is_frozen_or_unused_as_it_was_and_trains_the_rest_as_one_process(
    strategy: str, parameters: str, more: str
) -> None:
    """However the model is wrapped, and whatever is recomputed."""
    case = scenario(
        "mlp", strategy, '["blocks.0.*", "*.bias"]', unused='["blocks.1"]',
        parameters=parameters, more=more,
    )
    ranks = find("gloo").run(case, options=RunOptions(all_ranks=True)).ranks
    assert max(rank.numerics.largest_relative_difference for rank in ranks if rank.numerics) < 1e-2


def test_torch_keeps_no_gradient_and_no_state_of_what_is_not_trained() -> None:
    case = scenario("mlp", FSDP2, '["blocks.0.*", "*.bias"]', unused='["blocks.1"]')
    with torch_private.fake_group(rank=0, world_size=2):
        subject = observe(case, rank=0).subject
        assert subject is not None
        names = {id(parameter): name for name, parameter in subject.module.named_parameters()}
        stepped = {
            names[id(parameter)] for parameter, state in subject.optimizer.state.items() if state
        }
    assert stepped == case.model.trained
