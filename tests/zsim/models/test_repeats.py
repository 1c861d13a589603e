"""Modules that run more than once: what they are called, what they cost, and what cannot run again.
"""

from __future__ import annotations

from collections import Counter

import pytest

from zsim.autograd.lowered import ParameterGradient
from zsim.errors import ScenarioError
from zsim.ir.ops import Alloc
from zsim.scenario.flops import model_flops
from zsim.scenario.plan import plan, training
from zsim.scenario.scenario import Scenario, parse

GPT = 'family = "gpt", sizes = { num_layers = 6, hidden_size = 12, num_heads = 2, vocabulary = 13 }'
MLP = 'family = "mlp", sizes = { dims = [8, 5, 8], hidden = 6, num_classes = 3 }'


def scenario(
    model: str = GPT, *, uses: object = 1, forwards: int = 1, strategy: str = "fsdp2",
    more: str = "",
) -> Scenario:
    text = f"""
model = {{ {model}, uses = {uses} }}
batch = {{ micro_batch = 2, sequence_length = {1 if "mlp" in model else 4}, forwards = {forwards}{more} }}
cluster = {{ preset = "cpu-gloo", ranks = 2 }}
strategy = {{ name = "{strategy}" }}
"""  # noqa: E501
    return parse(text.encode(), where="x.toml")


def test_runs_are_numbered_on_the_same_unit_and_the_same_parameters() -> None:
    model = training(scenario(MLP.replace("5", "8"), uses=2, forwards=2), device="cpu").model
    assert [(module.fqn, module.unit) for module in model.modules] == [
        ("blocks.0", "blocks.0"), ("blocks.0#2", "blocks.0"), ("blocks.1", "blocks.1"),
        ("blocks.1#2", "blocks.1"), ("head", "root"), ("blocks.0#3", "blocks.0"),
        ("blocks.0#4", "blocks.0"), ("blocks.1#3", "blocks.1"), ("blocks.1#4", "blocks.1"),
        ("head#2", "root"),
    ]
    assert model.parameters == scenario(MLP.replace("5", "8")).model.parameters


def test_the_whole_stack_runs_again() -> None:
    modules = scenario(MLP, uses='{ times = 2, order = "stack" }').model.modules
    assert [module.fqn for module in modules] == [
        "blocks.0", "blocks.1", "blocks.0#2", "blocks.1#2", "head"
    ]


def test_parameters_count_once_and_operations_at_each_run() -> None:
    plain, twice, both = scenario(), scenario(uses=2), scenario(forwards=2)
    head = 2 * 4 * 6 * 12 * 13  # tokens × 6 × the head's weights
    assert twice.model.num_parameters == both.model.num_parameters == plain.model.num_parameters
    assert model_flops(twice) == 2 * model_flops(plain) - head
    assert model_flops(both) == 2 * model_flops(plain)


def test_autograd_makes_one_gradient_of_each_parameter_whatever_runs() -> None:
    case = training(scenario(uses=3, forwards=2), device="cpu")
    events = [event for module in case.modules for event in module.backward.memory]
    made = Counter(event.fqn for event in events if isinstance(event, ParameterGradient))
    assert made == {parameter.fqn: 1 for parameter in case.model.parameters}


def test_on_a_gpu_sums_are_made_in_place_but_for_those_of_linears() -> None:
    """A third gradient of a linear's weight is added into the sum of the first two, which is no
    view any more."""
    made = {}
    for device in ("cpu", "cuda"):
        case = training(scenario(uses=3), device=device)  # type: ignore[arg-type]
        events = [event for module in case.modules for event in module.backward.memory]
        born = Counter(
            event.buffer.rpartition(".grad")[0] for event in events if isinstance(event, Alloc)
        )
        made[device] = (
            born["blocks.0.ln_1.weight"], born["blocks.0.mlp.fc.weight"],
            born["blocks.0.mlp.fc.bias"],
        )
    assert made == {"cpu": (4, 4, 4), "cuda": (3, 4, 4)}


@pytest.mark.parametrize(
    ("uses", "forwards", "gathers"),
    [(1, 1, 7 + 6), (2, 1, 13 + 12), (1, 2, 13 + 12), (3, 2, 37 + 36)],
)
def test_fully_shard_gathers_at_each_run_and_reduces_once(
    uses: int, forwards: int, gathers: int
) -> None:
    steady = plan(scenario(uses=uses, forwards=forwards), device="cpu").ranks[0].steady
    kinds = Counter(op.kind for op in steady)
    assert (kinds["all_gather"], kinds["reduce_scatter"]) == (gathers, 7)


def test_zero3_frees_a_block_before_the_stack_runs_again() -> None:
    """A block that runs twice in a row stays gathered; one that comes again after others does not.
    """
    kinds = {}
    for order in ("block", "stack"):
        case = scenario(uses=f'{{ times = 2, order = "{order}" }}', strategy="zero3")
        steady = plan(case, device="cpu").ranks[0].steady
        kinds[order] = Counter(
            (op.kind, op.unit) for op in steady if op.kind in ("all_gather", "reduce_scatter")
        )
    assert {kind: count[("all_gather", "blocks.3")] for kind, count in kinds.items()} == {
        "block": 2, "stack": 4
    }
    assert {kind: count[("reduce_scatter", "blocks.3")] for kind, count in kinds.items()} == {
        "block": 1, "stack": 1
    }


def test_a_block_that_does_not_fit_its_own_output_is_refused() -> None:
    with pytest.raises(ScenarioError) as refused:
        scenario(MLP, uses=2)
    assert str(refused.value) == (
        "x.toml: model.uses: blocks.0 makes 5 features and blocks.0, which runs next, takes 8; "
        "give every block the same width"
    )


@pytest.mark.parametrize(("uses", "complaint"), [
    (0, "model.uses: expected at least 1 or a table, { key = value }, found 0"),
    ('{ times = 2, order = "twice" }',
     'model.uses.order: expected block or stack, found "twice"'),
])
def test_a_wrong_number_of_uses_is_named(uses: object, complaint: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        scenario(uses=uses)
    assert complaint in str(refused.value)


def test_a_trace_is_of_one_forward() -> None:
    with pytest.raises(ScenarioError) as refused:
        scenario('traced = "mine.json"', uses=2, forwards=2)
    assert "model.uses: expected 1 for a traced model, found 2" in str(refused.value)
    assert "batch.forwards: expected 1 for a traced model, found 2" in str(refused.value)
