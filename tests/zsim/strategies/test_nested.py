"""Units in units: the owners of parameters, the order of gathers, and what is refused."""

from __future__ import annotations

import pytest

from zsim.analysis.advice import changes
from zsim.analysis.alternatives import moved
from zsim.analysis.fit.fit import ways
from zsim.errors import ScenarioError
from zsim.models.wrapping import Wrapping, wrapped
from zsim.scenario.checks.refusals import problems
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse
from zsim.strategies.building.parameters import named_parameters

GPT = 'family = "gpt", sizes = { num_layers = 3, hidden_size = 8, num_heads = 2, vocabulary = 13 }'
MLP = 'family = "mlp", sizes = { dims = [6, 6, 6], hidden = 7, num_classes = 3 }'


def scenario(
    wrapping: str, *, model: str = GPT, strategy: str = 'name = "fsdp2"', more: str = ""
) -> Scenario:
    text = f"""
model = {{ {model} }}
batch = {{ micro_batch = 2, sequence_length = {1 if "mlp" in model[:15] else 4} }}
cluster = {{ preset = "cpu-gloo", ranks = 2 }}
strategy = {{ {strategy} }}
wrapping = {{ {wrapping} }}
{more}
"""
    return parse(text.encode(), where="nested.toml")


def units(case: Scenario) -> dict[str, set[str]]:
    return {
        unit.fqn: {p.fqn.removeprefix(f"{unit.fqn}.").split(".")[0] for p in unit.parameters}
        for unit in case.model.units
    }


def issued(case: Scenario) -> list[str]:
    """The collectives of the steady step, "+" for an all-gather and "-" for a reduce-scatter."""
    signs = {"all_gather": "+", "reduce_scatter": "-"}
    return [
        f"{signs[op.kind]}{op.unit}" for op in plan(case, device="cpu").of_rank(0).steady
        if op.kind in signs
    ]


def test_a_block_owns_what_the_units_in_it_do_not() -> None:
    owners = units(scenario('nested = ["mlp", "attn"]'))
    assert owners == {
        "root": {"wte", "wpe", "ln_f"},
        **{fqn: names for i in range(3) for fqn, names in {
            f"blocks.{i}": {"ln_1", "ln_2"}, f"blocks.{i}.attn": {"q", "k", "v", "proj"},
            f"blocks.{i}.mlp": {"fc", "proj"},
        }.items()},
    }


def test_the_outer_unit_is_gathered_first_and_backward_prefetches_what_ended_before() -> None:
    """The hook of a unit on the block's output comes before the block's own. So the unit is
    gathered before the block."""
    case = scenario('nested = ["fc1"]', model=MLP, strategy='name = "fsdp2", '
                                                            'reshard_after_forward = true')
    b0, b1 = "blocks.0", "blocks.1"
    assert issued(case) == [
        "+root", f"+{b0}", f"+{b0}.fc1", f"+{b1}", f"+{b1}.fc1",
        "+root", f"+{b1}", f"+{b1}.fc1", f"+{b0}", f"-{b1}.fc1", f"-{b1}", f"+{b0}.fc1", "-root", f"-{b0}", f"-{b0}.fc1",  # noqa: E501
    ]  # fmt: skip
    last = issued(scenario('nested = ["fc2"]', model=MLP))
    assert last[5:8] == [f"+{b1}", f"+{b1}.fc2", f"+{b0}"]


def test_groups_of_blocks_hold_units_too_and_parameters_keep_the_order_of_the_module() -> None:
    case = scenario('every = 2, nested = ["mlp"]')
    assert [unit.fqn for unit in case.model.units] == [
        "root", "blocks.0..blocks.1", "blocks.0.mlp", "blocks.1.mlp", "blocks.2", "blocks.2.mlp",
    ]  # fmt: skip
    assert [unit.fqn for unit in case.model.inside_out] == [
        "blocks.0.mlp", "blocks.1.mlp", "blocks.0..blocks.1", "blocks.2.mlp", "blocks.2",
    ]  # fmt: skip
    order = list(dict.fromkeys(
        ".".join(p.fqn.split(".")[:3]) for p in named_parameters(case.model)
        if p.fqn.startswith("blocks")
    ))
    assert order == [
        f"blocks.{i}.{name}" for i in range(3) for name in ("ln_1", "attn", "ln_2", "mlp")
    ]


@pytest.mark.parametrize("more", ["", ", uses = 2"])
def test_a_model_that_was_wrapped_is_wrapped_anew_as_if_it_had_not_been(more: str) -> None:
    nested = scenario('nested = ["mlp", "attn"]', model=GPT + more).model
    plain = scenario("", model=GPT + more).model
    assert wrapped(nested, Wrapping()) == plain
    assert wrapped(plain, Wrapping(nested=("mlp", "attn"))) == nested


def test_a_block_that_forward_passes_by_is_wrapped_anew_too() -> None:
    model = scenario('every = 2, nested = ["mlp"]', model=f'{GPT}, unused = ["blocks.1"]').model
    by_block = wrapped(model, Wrapping())
    assert [unit.fqn for unit in by_block.units] == ["root", "blocks.0", "blocks.1", "blocks.2"]
    assert (model.unused, by_block.unused) == ({"blocks.1.mlp"}, {"blocks.1"})
    assert model.waits_for_idle == {"blocks.0..blocks.1"}
    assert by_block.trained == model.trained


@pytest.mark.parametrize(("wrapping", "more", "complaint"), [
    ('nested = ["ff"]', {},
     'wrapping.nested: blocks.0 has no module "ff" with parameters; '
     "it has ln_1, attn, ln_2 and mlp"),
    ('nested = ["attn", "attn.q"]', {},
     "wrapping.nested: expected modules apart from each other, found attn.q in attn; take "
     "one of the two"),
    (
        'nested = ["mlp"]',
        {
            "strategy": 'name = "fsdp1", dp_shard = 2, dp_replicate = 1',
            "more": 'activation_checkpointing = { mode = "full" }',
        },
        "activation_checkpointing: expected no units in a block that fsdp1 recomputes, found "
        "wrapping.nested; use `recompute`, "
        "or leave one of them out",
    ),
])
def test_what_cannot_be_a_unit_in_a_unit_is_named(
    wrapping: str, more: dict[str, str], complaint: str
) -> None:
    with pytest.raises(ScenarioError) as caught:
        scenario(wrapping, **more)
    assert caught.value.problems == (f"nested.toml: {complaint}",)


def test_selective_checkpointing_of_casts_that_were_found_is_refused_in_torchs_words() -> None:
    save = (
        'precision = { autocast = "bf16" }\nactivation_checkpointing = { mode = "selective", save '
        '= ["linear"] }'
    )
    scenario("", more=save)
    with pytest.raises(ScenarioError, match="encountered during backward but not found in storage"):
        scenario("", model=f"{GPT}, uses = 2", more=save)


@pytest.mark.parametrize("strategy", ["ddp", "zero_redundancy"])
def test_where_there_are_no_units_nested_ones_are_nothing(strategy: str) -> None:
    nested, plain = (
        scenario(wrapping, strategy=f'name = "{strategy}"')
        for wrapping in ('nested = ["attn.q", "mlp"]', "")
    )
    assert nested.model == plain.model
    assert plan(nested, device="cpu") == plan(plain, device="cpu")


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_flat_buffers_of_units_in_blocks_are_buffers_apart(strategy: str) -> None:
    """ZeRO-3 gathers a block's before the block runs, one after another; buckets of bytes are as
    they were, of the same order."""
    case = scenario('nested = ["attn", "mlp"]', strategy=f'name = "{strategy}"')
    ops = plan(case, device="cpu").of_rank(0).steady
    reduced = [
        op.unit for op in ops
        if op.kind in ("reduce_scatter", "all_reduce") and op.unit.startswith("blocks.2")
    ]
    assert set(reduced) == {"blocks.2", "blocks.2.attn", "blocks.2.mlp"}
    assert case.model.unused == frozenset()
    gathered = [op.unit for op in ops if op.kind == "all_gather"]
    assert strategy != "zero3" or gathered[1:4] == ["blocks.0", "blocks.0.attn", "blocks.0.mlp"]


def test_another_strategy_makes_of_units_in_blocks_what_they_are_to_it() -> None:
    case = scenario('nested = ["mlp"]')
    for name in ("ddp", "zero3", "fsdp2"):
        other = scenario('nested = ["mlp"]', strategy=f'name = "{name}"')
        assert moved(case, name).model == other.model
        assert moved(other, "fsdp2").model == case.model


def test_advice_and_fit_know_units_in_units() -> None:
    case = scenario('nested = ["mlp"]')
    assert {other.strategy for _, other in ways(case)} == {
        "ddp", "zero1", "zero2", "zero3", "fsdp2"
    }
    assert any(
        other.checkpointing.mode == "full" for _, other in changes(case) if not problems(other)
    )


def recomputed(case: Scenario) -> list[str]:
    """Recomputations of the steady step's backward, and its all-gathers with a "+"."""
    ops = plan(case, device="cpu").of_rank(0).steady
    start = next(op.index for op in ops if op.kind == "backward")
    signs = {"all_gather": "+", "recompute": ""}
    return [
        f"{signs[op.kind]}{op.unit} {'.'.join(op.reads)}".strip() for op in ops[start:]
        if op.kind in signs
    ]


FULL = 'activation_checkpointing = { mode = "full" }'


def test_a_unit_recomputed_with_its_block_is_gathered_once_for_that_and_its_backward() -> None:
    """The feed-forward's backward asks for the block's recomputation, which calls attention: it
    waits for what was prefetched."""
    gathers = recomputed(scenario('nested = ["attn", "mlp"]', more=FULL))
    inner = [name for i in (2, 1, 0) for name in (
        f"blocks.{i}.mlp blocks.{i}", f"blocks.{i}.mlp blocks.{i}.attn", f"blocks.{i}.mlp blocks.{i}", f"blocks.{i}.mlp blocks.{i}.mlp"  # noqa: E501
    )]  # fmt: skip
    assert [name for name in gathers if name[0] != "+"] == inner
    assert [name for name in gathers if name[0] == "+"] == [
        f"+blocks.{i}{name}" for i in (2, 1, 0) for name in ("", ".mlp", ".attn")
    ][1:]  # the root's hook has gathered the last block before


def test_what_was_not_prefetched_is_gathered_while_the_block_is_recomputed() -> None:
    """Hooks of backward have prefetched only the second of two units before the one that asks."""
    gathers = recomputed(scenario('nested = ["ln_1", "attn"]', more=FULL))
    assert gathers[:5] == [
        "+blocks.2.attn", "+blocks.2.ln_1", "blocks.2 blocks.2.ln_1", "blocks.2 blocks.2.attn", "blocks.2 blocks.2"  # noqa: E501
    ]  # fmt: skip


SAVE = 'activation_checkpointing = { mode = "selective", save = ["linear"] }'


@pytest.mark.parametrize(("nested", "uses", "strategy", "refused"), [
    ('["attn", "mlp"]', "", "", False), ('["mlp"]', ", uses = 2", "", False),
    ('["attn", "mlp"]', ", uses = 2", "", False), ('["attn"]', "", "", True),
    ('["ln_1", "attn"]', "", "", True), ('["ln_1", "attn", "mlp"]', "", "", True),
    # the second run finds them gathered
    ('["attn", "mlp"]', ", uses = 2", ", reshard_after_forward = false", True),
    ('["attn", "mlp"]', ", uses = 2", ", forward_prefetch = 1", True),
])
def test_hooks_that_call_more_when_outputs_are_kept_are_refused_in_torchs_words(
    nested: str, uses: str, strategy: str, refused: bool
) -> None:
    asked = {"model": GPT + uses, "strategy": f'name = "fsdp2"{strategy}', "more": SAVE}
    if not refused:
        plan(scenario(f"nested = {nested}", **asked), device="cuda")
        return
    with pytest.raises(
        ScenarioError,
        match=r"record_function_enter_new … encountered during backward but not found in storage",
    ):
        scenario(f"nested = {nested}", **asked)


def test_parameters_come_in_the_order_of_registration_where_units_lie_deep_in_blocks() -> None:
    case = scenario(
        'ends = "apart", nested = ["attn.q", "attn.v"]', model=GPT[:-2] + ", tied = false }"
    )
    names = [p.fqn for p in named_parameters(case.model)]
    assert [name for name in names if name.endswith("weight")][:10] == [
        "wte.weight", "wpe.weight",
        *(f"blocks.0.{name}.weight" for name in ("ln_1", "attn.k", "attn.proj", "attn.q", "attn.v", "ln_2", "mlp.fc", "mlp.proj")),  # noqa: E501
    ]  # fmt: skip
