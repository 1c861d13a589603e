"""fsdp1 against torch where parts are frozen, unused, in one another or run again, and under
autocast: every byte, in torch's order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.agreement import differences
from tests.zreal.agreement.strategies.test_fsdp1_against_torch import seen, waited
from tests.zreal.agreement.test_event_order import of_program, of_torch
from zreal import torch_private
from zreal.meters.mesh_groups import device_mesh
from zreal.modules import modules
from zreal.modules.initial_values import made
from zreal.observer.subjects.table import SUBJECTS
from zsim.errors import ScenarioError
from zsim.scenario.derived import derived
from zsim.scenario.scenario import Scenario, parse

MLP = 'family = "mlp", sizes = { dims = [9, 9, 9, 9], hidden = 11, num_classes = 5 }'
GPT = (
    'family = "gpt", sizes = { num_layers = 3, hidden_size = 12, num_heads = 2, vocabulary = 13, '
    'attention = "sdpa", tied = true }'
)
LLAMA = (
    'family = "llama", sizes = { num_layers = 3, hidden_size = 16, num_heads = 4, num_kv_heads = '
    '2, feed_forward = 9, vocabulary = 7 }'
)
ORIGINAL = "use_orig_params = true"
GRAD_OP = 'sharding = "grad_op"'
BF16 = 'parameters = "bf16"'


def scenario(
    model: str, options: str = "", *, more: str = "", batch: str = "", precision: str = "",
    ranks: int = 4, sync: str = "every",
) -> Scenario:
    """A small model under fsdp1, `more` of the file's tables, and what stands in those of batch and
    precision besides."""
    length = "" if "mlp" in model else ", sequence_length = 4"
    text = f"""
model = {{ {model} }}
batch = {{ micro_batch = 2{length}{batch and f", {batch}"} }}
cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}
strategy = {{ name = "fsdp1", dp_shard = {ranks}, sync = "{sync}"{options and f", {options}"} }}
precision = {{ {precision} }}
{more}
"""
    return parse(text.encode(), where="parts.toml")


LAST = {"batch": "accumulation = 2", "sync": "last"}
CASES = {
    "autocast casts views at each use": scenario(f"{GPT}, uses = 2", precision='autocast = "bf16"'),
    "of several forwards each makes views": scenario(
        MLP, "forward_prefetch = true", batch="forwards = 3, accumulation = 2"
    ),
    "runs meet in an accumulator of each": scenario(
        f"{LLAMA}, uses = 2", ORIGINAL, precision=BF16, **LAST
    ),
    "stacks run again": scenario(
        f'{MLP}, uses = {{ times = 2, order = "stack" }}', f'{GRAD_OP}, backward_prefetch = "post"'
    ),
    "an unused block is never gathered": scenario(f'{GPT}, unused = ["blocks.1"]', precision=BF16),
    "one in the root's unit has a gradient of zeros": scenario(
        f'{MLP}, unused = ["blocks.0"]', more='wrapping = { every = "all" }'
    ),
    "frozen parameters among trained ones get gradients": scenario(
        GPT, ORIGINAL, more='frozen = ["*.bias", "wte.*"]', ranks=5, **LAST
    ),
    "frozen units before the trained ones": scenario(
        MLP, 'backward_prefetch = "post"', more='frozen = ["blocks.[01].*"]', **LAST
    ),
    "a frozen unit amid trained ones": scenario(
        LLAMA, precision=BF16, more='frozen = ["blocks.1.*"]', ranks=2
    ),
    "a frozen unit that nobody frees": scenario(
        f"{MLP}, uses = 2", GRAD_OP, more='frozen = ["blocks.0.*"]', batch="forwards = 2"
    ),
    "a frozen unit that keeps its views": scenario(
        MLP, f"{GRAD_OP}, {ORIGINAL}", more='frozen = ["blocks.0.*", "head.*"]'
    ),
    "units in units": scenario(
        GPT, "forward_prefetch = true", more='wrapping = { nested = ["attn", "mlp"] }',
        precision=BF16,
    ),
    "a unit that is the end of another": scenario(
        f"{MLP}, uses = 2", more='wrapping = { nested = ["fc1", "fc2"] }\nfrozen = ["*.fc1.*"]'
    ),
    "the head apart": scenario(
        MLP, 'backward_prefetch = "none"', more='wrapping = { ends = "apart" }', ranks=8, **LAST
    ),
    "all of it": scenario(
        f'{GPT}, uses = {{ times = 2, order = "stack" }}, unused = ["blocks.1"]',
        f'{ORIGINAL}, {GRAD_OP}, backward_prefetch = "post", forward_prefetch = true',
        more='wrapping = { nested = ["attn"] }\nfrozen = ["*.attn.*", "*.ln_2.bias"]\noptimizer '
        '= { name = "adamw", clip_norm = 1.0 }', batch="forwards = 2, accumulation = 3",
        precision='autocast = "fp16"', sync="last",
    ),
}


def quick(*names: str) -> list[Any]:
    """All cases, those but `names` marked slow."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


SMALL = [name for name, case in CASES.items() if case.model.family == "mlp"]


@pytest.mark.parametrize("name", quick(*SMALL))
def test_each_part_is_exact_on_the_last_rank(name: str) -> None:
    case = CASES[name]
    assert differences(case, rank=case.world_size - 1) == []


@pytest.mark.parametrize("name", quick(
    "runs meet in an accumulator of each", "an unused block is never gathered", "units in units"
))
def test_each_part_allocates_and_frees_in_torchs_order(name: str) -> None:
    assert of_program(CASES[name]) == of_torch(CASES[name])


@pytest.mark.parametrize("original", ["false", "true"])
@pytest.mark.parametrize(
    "ranks", [pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 3, 5, 6, 7, 8, 64)]
)
def test_all_of_it_is_exact_on_any_number_of_ranks(ranks: int, original: str) -> None:
    case = scenario(
        f'{GPT}, uses = 2, unused = ["blocks.2"]', f"use_orig_params = {original}",
        more='wrapping = { nested = ["mlp"] }\nfrozen = ["blocks.0.*"]',
        batch="forwards = 2, accumulation = 2", ranks=ranks,
    )
    assert [differences(case, rank=rank) for rank in {0, ranks // 2, ranks - 1}] == [[]] * len(
        {0, ranks // 2, ranks - 1}
    )


def test_the_limiter_waits_where_torchs_does_when_units_run_again() -> None:
    case = scenario(
        f"{MLP}, uses = 2", 'backward_prefetch = "post"', batch="forwards = 2",
        more='frozen = ["blocks.0.*"]',
    )
    waited(case, seen(case, steps=4))


def test_torch_refuses_what_is_refused_as_torchs() -> None:
    """A flat parameter of frozen and trained ones, where the original parameters are not visible.
    """
    original = scenario(MLP, ORIGINAL, more='frozen = ["*.bias"]')
    with pytest.raises(ScenarioError, match="Must flatten tensors with uniform `requires_grad` "
                                            "when `use_orig_params=False`"):
        scenario(MLP, more='frozen = ["*.bias"]')
    case = derived(original, options=replace(original.options, use_orig_params=False))
    with torch_private.fake_group(rank=0, world_size=case.world_size):
        mesh, _ = device_mesh(case, device="cpu")
        with pytest.raises(ValueError, match="Must flatten tensors with uniform `requires_grad` "
                                             "when `use_orig_params=False`"):
            SUBJECTS["fsdp1"](case, modules.build(case.model, seed=0), mesh, made)
