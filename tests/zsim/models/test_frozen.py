"""Frozen patterns and unused blocks in a scenario: what is refused, and what is left to train."""

from __future__ import annotations

import pytest

from zsim.analysis.fit.fit import ways
from zsim.errors import ScenarioError
from zsim.scenario.scenario import Scenario, parse


def scenario(
    more: str, *, model: str = 'preset = "gpt-tiny"', strategy: str = "fsdp2", rest: str = ""
) -> Scenario:
    text = f"""
frozen = {more}
model = {{ {model} }}
batch = {{ micro_batch = 2, sequence_length = {1 if "mlp" in model else 8}, accumulation = 2 }}
cluster = {{ preset = "cpu-gloo", ranks = 2 }}
strategy = {{ name = "{strategy}" {rest} }}
precision = {{ parameters = "bf16", reduce = "fp32" }}
"""
    return parse(text.encode(), where="part.toml")


def test_patterns_freeze_what_they_match_and_unused_blocks_are_not_trained() -> None:
    model = scenario(
        '["blocks.*.weight", "w?e.*", "ln_f.*"]', model='preset = "gpt-tiny", unused = ["blocks.1"]'
    ).model
    assert {p.fqn for p in model.parameters if p.fqn.endswith("weight")} <= model.frozen
    assert model.unused == {"blocks.1"}
    assert model.trained == {
        p.fqn for p in model.parameters if p.fqn not in model.frozen and "blocks.1." not in p.fqn
    }
    assert [module.fqn for module in model.modules] == [
        "embed", "blocks.0", "blocks.2", "blocks.3", "head"
    ]


@pytest.mark.parametrize(("frozen", "more", "complaint"), [
    ('["embeding.*"]', {}, 'frozen: "embeding.*" matches no parameter'),
    ('["blocks.0.atn.q.weight"]', {}, "did you mean blocks.0.attn.q.weight?"),
    ('["*"]', {}, "frozen: nothing is left to train; leave a parameter out of it"),
    ("[]", {"model": 'preset = "gpt-tiny", unused = ["blocks.9"]'},
     'model.unused: the model has no block "blocks.9"'),
    ("[]", {"model": 'preset = "mlp-uneven", unused = ["blocks.0"]'}, "blocks.0 changes the width"),
    ("[]", {"model": 'preset = "gpt-tiny", unused = ["blocks.1"]', "strategy": "ddp"},
     'frozen = ["blocks.1.*"]'),
    ("[]", {"model": 'preset = "gpt-tiny", unused = ["blocks.1"]', "strategy": "ddp"},
     "use find_unused_parameters = true"),
    ("[]", {"model": 'preset = "gpt-tiny", unused = ["blocks.1"]', "rest": ', sync = "last"'},
     "torch 2.13 raises AttributeError (_unsharded_param)"),
])
def test_what_matches_nothing_or_cannot_be_trained_is_refused(
    frozen: str, more: dict[str, str], complaint: str
) -> None:
    with pytest.raises(ScenarioError) as caught:
        scenario(frozen, **more)
    assert complaint in str(caught.value)


def test_frozen_parts_are_those_of_the_units_that_wrapping_makes() -> None:
    text = scenario('["blocks.[01].*", "wte.*"]').to_toml() + "wrapping = { every = 2 }\n"
    model = parse(text.encode(), where="part.toml").model
    assert [unit.fqn for unit in model.units] == [
        "root", "blocks.0..blocks.1", "blocks.2..blocks.3"
    ]
    assert model.unused == frozenset()
    assert model.trained == {p.fqn for p in model.parameters} - model.frozen


def test_fit_has_ddp_find_what_forward_passes_by_and_leaves_out_what_cannot() -> None:
    case = scenario("[]", model='preset = "gpt-tiny", unused = ["blocks.1"]')
    assert "ddp" in {name for name, _ in ways(scenario("[]"))}
    assert "ddp" in {
        name
        for name, _ in ways(
            scenario('["blocks.1.*"]', model='preset = "gpt-tiny", unused = ["blocks.1"]')
        )
    }
    assert next(name for name, _ in ways(case)) == "ddp, find_unused_parameters = true"
    assert {other.strategy for _, other in ways(case)} == {
        "ddp", "zero1", "zero2", "zero3", "fsdp2"
    }
    waits = scenario(
        "[]", model='preset = "gpt-tiny", unused = ["blocks.1"]', strategy="zero3",
        rest=', sync = "last"',
    )
    assert {other.strategy for _, other in ways(waits)} == {"ddp", "zero1", "zero2", "zero3"}
