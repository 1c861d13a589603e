"""Wrapping policies: every parameter in one unit, what is refused, what is warned of, and the
Program that follows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.folders import PUBLISHED
from zsim.analysis.alternatives import changes
from zsim.analysis.scenario_warnings import caveats
from zsim.autograd.lowering import lower_model, lower_module
from zsim.autograd.traced import traced_file
from zsim.cli import main
from zsim.errors import ScenarioError
from zsim.ir.ops import COLLECTIVES
from zsim.models.families import gpt, llama, mlp
from zsim.models.spec import ROOT, ModelSpec, Parameter, ParamGroup
from zsim.models.training_options import Batch
from zsim.models.wrapping import SHARED, Wrapping, problems, wrapped
from zsim.runs.backend import RunOptions
from zsim.runs.figures.metrics import figures
from zsim.runs.simulator import SimBackend
from zsim.scenario.derived import derived
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse

TRACED = PUBLISHED / "nanotron-micro-batch-1.json"


def cautions(scenario: Scenario) -> tuple[str, ...]:
    """The texts of a scenario's caveats."""
    return tuple(caveat.text for caveat in caveats(scenario))


def language_model(family: str, num_layers: int, *, tied: bool) -> ModelSpec:
    if family == "gpt":
        sizes = gpt.GptSizes(
            num_layers=num_layers, hidden_size=8, num_heads=2, vocabulary=13, tied=tied
        )
        return gpt.build(sizes, name="g", sequence_length=4)
    wide = llama.LlamaSizes(
        num_layers=num_layers, hidden_size=8, num_heads=2, feed_forward=11, vocabulary=13, tied=tied
    )
    return llama.build(wide, name="l", sequence_length=4)


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    family, layers = draw(st.sampled_from(["mlp", "gpt", "llama"])), draw(st.integers(0, 9))
    if family == "mlp":
        return mlp.build(
            mlp.MlpSizes(dims=(5,) * (layers + 1), hidden=7, num_classes=3), name="m",
            sequence_length=1,
        )
    return language_model(family, layers, tied=draw(st.booleans()))


@st.composite
def policies(draw: st.DrawFn) -> Wrapping:
    return Wrapping(
        every=draw(st.sampled_from([1, 2, 3, 4, 7, 9, "all"])),
        ends=draw(st.sampled_from(["root", "apart"])),
    )


def parameters(model: ModelSpec) -> Iterator[Parameter]:
    """Parameters in the order of `named_parameters()`, the root's own last."""
    return (
        p
        for unit in sorted(model.units, key=lambda unit: unit.fqn == ROOT)
        for p in unit.parameters
    )


def scenario(
    wrapping: str, *, model: str = 'preset = "gpt-tiny"', strategy: str = 'name = "fsdp2"'
) -> Scenario:
    text = f"""
model = {{ {model} }}
batch = {{ micro_batch = 2, sequence_length = {1 if "mlp" in model else 8} }}
cluster = {{ preset = "cpu-gloo", ranks = 4 }}
strategy = {{ {strategy} }}
wrapping = {{ {wrapping} }}
"""
    return parse(text.encode(), where="wrap.toml", folder=Path())


UNTIED = (
    'family = "gpt", sizes = { num_layers = 5, hidden_size = 8, num_heads = 2, vocabulary = 13, '
    'tied = false }'
)


@given(models(), policies())
def test_every_parameter_is_in_exactly_one_unit_in_its_order_and_every_operator_still_runs(
    model: ModelSpec, asked: Wrapping
) -> None:
    if any(problems(asked, model)):
        return
    cut = wrapped(model, asked)
    order = {p: i for i, p in enumerate(parameters(model))}
    assert sorted(parameters(cut), key=order.__getitem__) == list(order)
    for unit in cut.units:
        assert [order[p] for p in unit.parameters] == sorted(order[p] for p in unit.parameters)
    assert [op.name for m in cut.modules for op in m.operators] == [
        op.name for m in model.modules for op in m.operators
    ]
    names = [unit.fqn for unit in cut.units]
    assert len(set(names)) == len(names)
    assert set(cut.wrapped_by.values()) <= {*names, ROOT}
    sizes = [
        sum(by == name for m, by in cut.wrapped_by.items() if m in {b.fqn for b in model.blocks})
        for name in names
    ]
    limit = len(model.blocks) if asked.every == "all" else asked.every
    assert max(sizes, default=0) <= limit
    assert (ROOT in names) is (asked.ends == "root")


@given(models(), policies(), policies())
def test_wrapping_again_forgets_how_a_model_was_wrapped(
    model: ModelSpec, first: Wrapping, second: Wrapping
) -> None:
    if first.ends == second.ends and not any((*problems(first, model), *problems(second, model))):
        assert wrapped(wrapped(model, first), second) == wrapped(model, second)
    assert wrapped(model, Wrapping()) == model


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_model_in_parts_does_the_same_work_and_is_lowered_as_if_each_module_were_traced(
    family: str
) -> None:
    model, batch = language_model(family, 6, tied=False), Batch(micro_batch=2, sequence_length=4)
    apart = wrapped(model, Wrapping(every=4, ends="apart"))
    whole, parts = (
        lower_model.lower(spec, batch=batch, dtype="float32") for spec in (model, apart)
    )
    assert parts == lower_module.lower_each(apart, batch=batch, dtype="float32")
    assert [k for m in parts for k in m.forward.kernels] == [
        k for m in whole for k in m.forward.kernels
    ]
    assert [k for m in parts[::-1] for k in m.backward.kernels] == [
        k for m in whole[::-1] for k in m.backward.kernels
    ]


def test_a_unit_is_gathered_before_its_first_module_and_reduced_after_its_backward() -> None:
    """Five blocks in twos, embedding and head apart; units are resharded after forward, and each
    prefetches the one before it."""
    ops = plan(scenario('every = 2, ends = "apart"', model=UNTIED), device="cpu").ranks[0].steady
    kinds = ("all_gather", "forward", "backward", "reduce_scatter")
    order = [f"{op.kind} {op.unit}" for op in ops if op.kind in kinds]
    embed, head, pairs = (
        "wte..wpe", "ln_f..lm_head", ["blocks.0..blocks.1", "blocks.2..blocks.3", "blocks.4"],
    )
    blocks = [f"blocks.{i}" for i in range(5)]
    assert order == [
        *(f"all_gather {embed}", "forward wte", "forward wpe"),
        *(f"all_gather {pairs[0]}", "forward blocks.0", "forward blocks.1"),
        *(f"all_gather {pairs[1]}", "forward blocks.2", "forward blocks.3"),
        *(f"all_gather {pairs[2]}", "forward blocks.4"),
        *(f"all_gather {head}", "forward ln_f", "forward lm_head", "forward root"),
        *("backward root", f"all_gather {head}", f"all_gather {pairs[2]}"),
        *("backward lm_head", "backward ln_f", f"reduce_scatter {head}"),
        *(f"all_gather {pairs[1]}", "backward blocks.4", f"reduce_scatter {pairs[2]}"),
        *(
            f"all_gather {pairs[0]}", "backward blocks.3", "backward blocks.2",
            f"reduce_scatter {pairs[1]}",
        ),
        *(
            f"all_gather {embed}", "backward blocks.1", "backward blocks.0",
            f"reduce_scatter {pairs[0]}",
        ),
        *("backward wpe", "backward wte", f"reduce_scatter {embed}"),
    ]
    assert {op.unit for op in ops if op.kind == "free"} >= {embed, head, *pairs}
    assert not {op.unit for op in ops if op.kind in COLLECTIVES} & set(blocks[:4])


@pytest.mark.parametrize(("wrapping", "model", "complaint"), [
    ('ends = "apart"', 'preset = "gpt-tiny"',
     "wrapping.ends: expected every parameter in one group, found wte.weight in wte..wpe "
     f'and ln_f..lm_head; torch refuses it: the parameter "is {SHARED}"; use ends = "root", or '
     "untie it"),
    ('every = "all", ends = "apart"', UNTIED,
     'wrapping.ends: with every = "all" the whole model is one group, which leaves '
     'nothing apart; use "root", or a number'),
    ("every = 6", UNTIED, 'wrapping.every: expected 1 to 5, the model\'s blocks, or "all", '
                          'found 6'),
    ("every = 0", UNTIED, 'wrapping.every: expected at least 1 or "all", '
                          'found 0'),
    ("every = 2", f'traced = "{TRACED}"',
     "wrapping: a traced model keeps the units it was traced with; trace it again with "
     "others, and leave this out"),
    ("evry = 2", UNTIED, "wrapping.evry: unknown key, did you mean every?"),
])
def test_what_cannot_be_is_refused_with_its_key(wrapping: str, model: str, complaint: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        scenario(wrapping, model=model)
    assert f"wrap.toml: {complaint}" in caught.value.problems


def test_a_traced_model_keeps_its_own_units() -> None:
    model = traced_file.load(TRACED)
    assert wrapped(model, Wrapping()) is model
    assert list(problems(Wrapping(), model)) == []


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_one_unit_for_the_whole_model_is_warned_of_with_its_figures(strategy: str) -> None:
    case = scenario('every = "all"', model='preset = "mlp-tiny"', strategy=f'name = "{strategy}"')
    run = SimBackend().run(case, options=RunOptions())
    step = figures(run, case)
    assert step.exposed_communication_ns == step.communication_ns
    whole = run.ranks[0].phases["steady"].collectives[0].nbytes
    (text,) = cautions(case)
    by_block = scenario("every = 1", model='preset = "mlp-tiny"', strategy=f'name = "{strategy}"')
    ops = plan(by_block, device="cpu").ranks[0].steady
    sizes = {op.unit: op.nbytes for op in ops if op.kind == "all_gather"}
    fqns = [*(block.fqn for block in by_block.model.blocks), ROOT]
    neighbours = [sizes[fqn] + sizes[after] for fqn, after in pairwise(fqns)]
    held = (
        max(neighbours)
        if strategy == "zero3"
        else sizes[ROOT] + max(sizes[fqn] for fqn in fqns[:-1])
    )
    assert text == (
        f"the whole model is one param group: {whole:,} B of parameters are gathered before "
        f"anything computes, and nothing hides "
        f"that or the reduction of gradients; with wrapping.every = 1, one group per block, at "
        f"most {held:,} B are gathered at a time, while others compute"
    )
    assert cautions(by_block) == ()


@pytest.mark.parametrize(
    "strategy",
    ['name = "ddp"', 'name = "zero1"', 'name = "zero2"', 'name = "zero3", granularity = "1 KiB"'],
)
def test_nothing_is_warned_of_where_no_unit_is_gathered_whole(strategy: str) -> None:
    assert cautions(scenario('every = "all"', strategy=strategy)) == ()


def test_a_traced_model_of_one_unit_is_warned_of_too() -> None:
    text = f"""
model = {{ traced = "{TRACED}" }}
batch = {{ micro_batch = 1, sequence_length = 4096 }}
cluster = {{ preset = "dgx-h100" }}
strategy = {{ name = "zero3" }}
precision = {{ parameters = "bf16", reduce = "bf16" }}
"""
    case = parse(text.encode(), where="traced.toml", folder=Path())
    root = ParamGroup(fqn=ROOT, parameters=tuple(parameters(case.model)))
    whole = derived(case, model=replace(case.model, units=(root,)))
    assert cautions(case) == ()
    assert cautions(whole) == (
        f"the whole model is one param group: {2 * root.numel:,} B of parameters are gathered "
        f"before anything computes, and "
        "nothing hides that or the reduction of gradients; trace it again with units",
    )


def test_units_of_several_blocks_are_advised_against_where_memory_is_sought() -> None:
    case = scenario("every = 4", model='preset = "gpt-tiny"')
    by_block = scenario("every = 1", model='preset = "gpt-tiny"')
    advised = dict(changes(case))["wrapping.every = 1: one param group per block"]
    assert (advised.model, advised.wrapping) == (by_block.model, by_block.wrapping)
    assert "wrapping.every = 1: one param group per block" not in dict(changes(by_block))


def test_the_warning_goes_to_standard_error_and_into_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = scenario('every = "all"', model='preset = "mlp-tiny"')
    file = tmp_path / "whole.toml"
    file.write_text(case.to_toml())
    assert main.main(["run", str(file), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["warnings"] == list(cautions(case))
    assert said.err == f"warning: whole: {cautions(case)[0]}\n"
