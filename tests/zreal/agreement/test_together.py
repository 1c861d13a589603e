"""Options asked for together: torch on the fake process group against the Program, every allocation
and free of a step in order."""

from __future__ import annotations

import pytest

from tests.support.agreement import inexact
from tests.support.installed_torch import TORCH
from tests.zreal.agreement.test_event_order import of_program, of_torch
from zsim.errors import ScenarioError
from zsim.models.checkpointing import Checkpointing
from zsim.scenario.derived import derived
from zsim.scenario.scenario import Scenario, parse

SIZES = "num_layers = 3, hidden_size = 12, num_heads = 2, vocabulary = 13"
MODELS = {
    "mlp": 'family = "mlp", sizes = { dims = [9, 9, 9, 9], hidden = 13, num_classes = 3 }',
    "gpt": f'family = "gpt", sizes = {{ {SIZES} }}',
    "gpt sdpa": f'family = "gpt", sizes = {{ {SIZES}, tied = false, attention = "sdpa" }}',
    "llama": f'family = "llama", sizes = {{ {SIZES}, feed_forward = 23, tied = true }}',
}
FSDP2 = 'name = "fsdp2"'
STACK = ', uses = { times = 2, order = "stack" }'
FROZEN = 'frozen = ["*.attn.*", "w?e.*"]'
FIRST = 'frozen = ["w?e.*", "blocks.0.*", "*.bias"]'
AUTOCAST = {"precision": 'parameters = "fp32", autocast = "bf16"'}
BF16 = {"precision": 'parameters = "bf16", reduce = "fp32"'}
HSDP = 'name = "hsdp", dp_replicate = 2'


def scenario(
    model: str, *, own: str = "", strategy: str = FSDP2, ranks: int = 2, batch: str = "",
    precision: str = 'reduce = "fp32"', more: str = "",
) -> Scenario:
    text = f"""
model = {{ {MODELS[model]}{own} }}
batch = {{ micro_batch = 2, sequence_length = {1 if model == "mlp" else 5}{batch} }}
cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}
strategy = {{ {strategy} }}
precision = {{ {precision} }}
{more}
"""
    return parse(text.encode(), where="together.toml")


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("mlp", {"own": ", uses = 2", **AUTOCAST}),
        ("llama", {
            "own": ", uses = 2", "more": 'activation_checkpointing = { mode = "full" }', **AUTOCAST,
        }),
        ("gpt sdpa", {"strategy": 'name = "ddp"', "more": FIRST, **AUTOCAST}),
        ("gpt", {
            "strategy": 'name = "ddp"', "own": ", uses = 2", "batch": ", forwards = 2", **AUTOCAST,
        }),
    ],
)
def test_a_weight_is_cast_once_for_all_that_read_it_and_a_frozen_one_at_each_use(
    model: str, options: dict[str, str]
) -> None:
    case = scenario(model, **options)
    assert of_program(case) == of_torch(case)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gpt", {"own": ", uses = 2", "more": FIRST}),
        ("gpt sdpa", {"batch": ", forwards = 2", "more": FIRST, **BF16}),
        ("mlp", {"own": STACK, "more": 'frozen = ["blocks.0.*"]', "strategy": 'name = "ddp"'}),
    ],
)
def test_frozen_parts_may_run_again(model: str, options: dict[str, str]) -> None:
    case = scenario(model, **options)
    assert of_program(case) == of_torch(case)


@pytest.mark.skipif(TORCH != "2.13", reason="refused, as the parameters stay unsharded")
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("mlp", {"more": "wrapping = { every = 2 }"}),
        ("gpt", {"more": 'wrapping = { every = "all" }'}),
        ("gpt sdpa", {
            "own": STACK, "batch": ", forwards = 2",
            "more": 'wrapping = { every = 3, ends = "apart" }',
        }),
        ("mlp", {
            "more": "wrapping = { every = 3 }",
            "strategy": f"{FSDP2}, reshard_after_forward = 2", "ranks": 4,
        }),
    ],
)
def test_a_group_of_which_some_modules_run_ends_with_the_roots_forward(
    model: str, options: dict[str, str]
) -> None:
    case = scenario(model, **options | {"own": ', unused = ["blocks.1"]' + options.get("own", "")})
    assert of_program(case) == of_torch(case)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("mlp", {"more": 'frozen = ["blocks.[01].*"]'}),
        ("gpt", {"more": FIRST, "batch": ", accumulation = 2"}),
        ("gpt sdpa", {"more": FIRST, "batch": ", forwards = 2", **BF16}),
        ("mlp", {"more": 'frozen = ["blocks.0.*"]', "own": ", uses = 2", **BF16}),
    ],
)
@pytest.mark.parametrize("steps", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_kept_of_blocks_without_a_backward_outlives_the_step(
    model: str, options: dict[str, str], steps: int
) -> None:
    case = scenario(model, strategy=f"{FSDP2}, reshard_after_forward = 2", ranks=4, **options)  # type: ignore[arg-type]
    assert of_program(case) == of_torch(case, steps=steps)


def test_offloaded_gradients_are_clipped_where_they_lie() -> None:
    case = scenario(
        "mlp", strategy=f"{FSDP2}, offload = true", more="optimizer = { clip_norm = 1.0 }"
    )
    assert of_program(case) == of_torch(case)


BOTH = 'wrapping = { nested = ["attn", "mlp"] }'


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gpt", {"more": BOTH, "strategy": f"{FSDP2}, reshard_after_forward = true"}),
        ("llama", {"more": 'wrapping = { nested = ["mlp"] }'}),
        ("mlp", {"more": 'wrapping = { nested = ["fc1"] }'}),
        ("gpt", {
            "more": BOTH, "batch": ", accumulation = 2",
            "strategy": f'{FSDP2}, sync = "last"', **BF16,
        }),
        ("gpt sdpa", {
            "more": 'wrapping = { ends = "apart", nested = ["mlp"] }',
            "own": ', unused = ["blocks.1"]',
        }),
    ],
)
def test_units_in_units_allocate_and_free_in_torchs_order(
    model: str, options: dict[str, str]
) -> None:
    case = scenario(model, **options)  # type: ignore[arg-type]
    assert of_program(case) == of_torch(case)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gpt", {
            "strategy": 'name = "zero3"', "more": 'wrapping = { nested = ["ln_1", "attn.v"] }',
        }),
        ("llama", {"strategy": 'name = "zero2"', "more": f"{BOTH}\n{FROZEN}", **BF16}),
        ("gpt sdpa", {
            "strategy": 'name = "zero1", granularity = "unit"',
            "more": 'wrapping = { every = 2, nested = ["mlp"] }',
        }),
        ("mlp",
         {"strategy": 'name = "zero_redundancy"', "more": 'wrapping = { nested = ["fc1"] }'}),
    ],
)
def test_units_in_units_are_exact_where_they_are_buffers_or_nothing(
    model: str, options: dict[str, str]
) -> None:
    assert inexact(scenario(model, **options)) == []


AGAIN = 'activation_checkpointing = { mode = "full" }'
KEPT = 'activation_checkpointing = { mode = "selective", save = ["linear"] }'
WHOLE = 'activation_checkpointing = { mode = "full", early_stop = false }'
SHARD = f"{FSDP2}, reshard_after_forward = true"


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gpt", {"more": f"{BOTH}\n{AGAIN}", "strategy": SHARD}),
        ("llama", {"more": f'wrapping = {{ nested = ["mlp"] }}\n{KEPT}', "strategy": SHARD}),
        ("gpt sdpa", {
            "more": f"{BOTH}\n{KEPT}", "strategy": f"{HSDP}, reshard_after_forward = false",
            "ranks": 4,
        }),
        ("mlp", {"more": f'wrapping = {{ nested = ["fc1", "fc2"] }}\n{KEPT}'}),
        ("gpt",
         {"more": f"{FIRST}\n{BOTH}\n{AGAIN}", "strategy": f"{FSDP2}, forward_prefetch = 1"}),
    ],
)
def test_units_in_blocks_that_are_recomputed_allocate_and_free_in_torchs_order(
    model: str, options: dict[str, str]
) -> None:
    case = scenario(model, **options)  # type: ignore[arg-type]
    assert of_program(case) == of_torch(case)
    assert inexact(case) == []


@pytest.mark.skipif(TORCH != "2.13", reason="torch before 2.13 does not refuse it")
@pytest.mark.parametrize(
    ("model", "nested", "strategy"),
    [
        ("gpt", '["ln_1", "attn"]', SHARD),
        ("llama", '["attn.q", "attn.k"]', SHARD),
        ("gpt", '["ln_1", "ln_2"]', SHARD),
    ],
)
def test_where_hooks_call_more_while_outputs_are_kept_torch_refuses_what_we_refuse(
    model: str, nested: str, strategy: str
) -> None:
    wrapping = f"wrapping = {{ nested = {nested} }}"
    with pytest.raises(ScenarioError, match="encountered during backward but not found in storage"):
        scenario(model, strategy=strategy, more=f"{wrapping}\n{KEPT}")
    again = Checkpointing(mode="selective", save=("linear",))
    case = derived(scenario(model, strategy=strategy, more=wrapping), checkpointing=again)
    with pytest.raises(RuntimeError, match="encountered during backward but not found in storage"):
        of_torch(case)


def test_a_frozen_unit_that_a_recomputation_leaves_gathered_is_held_as_its_shard() -> None:
    """Gathered parameters stand in the module when the optimizer has stepped; what the rank holds
    are the sharded ones."""
    case = scenario("mlp", own=", uses = 3", strategy=SHARD, more=f'wrapping = {{ nested = '
                                                                  f'["fc1"] }}\nfrozen = '
                                                                  f'["*.fc1.*"]\n{AGAIN}')
    assert inexact(case) == []


@pytest.mark.parametrize(
    "options",
    [
        {
            "strategy": f"{HSDP}, reshard_after_forward = true", "ranks": 4,
            "more": 'wrapping = { nested = ["fc2"] }',
        },
    ],
)
def test_every_phase_and_each_collective_is_torchs(options: dict[str, str]) -> None:
    assert inexact(scenario("mlp", **options)) == []  # type: ignore[arg-type]
