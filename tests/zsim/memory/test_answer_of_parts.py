"""The waterfall, the advice and the least that fits where parts are frozen, unused or offloaded, or
a module is used again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from zsim.analysis.advice import Effect, advice, way_of
from zsim.analysis.alternatives import changes
from zsim.analysis.fit.fit import fit, ways
from zsim.autograd.lowering.lower_model import lower
from zsim.autograd.traced.model import TracedModel
from zsim.cli.main import main
from zsim.cli.reports.memory_report import print_advice
from zsim.errors import ScenarioError
from zsim.ir.ops import Free
from zsim.memory.fits import assess_program
from zsim.memory.inputs_and_buffers import belongings
from zsim.memory.waterfall import formula_bytes, formula_text, num_trained, state_bytes, waterfall
from zsim.scenario import plan
from zsim.scenario.checks.refusals import problems
from zsim.scenario.derived import derived
from zsim.scenario.plan import planned
from zsim.scenario.scenario import Scenario, parse

GPT = (
    'family = "gpt", sizes = { num_layers = 4, hidden_size = 16, num_heads = 4, vocabulary = 29, '
    'tied = false }'
)
STRATEGY = (
    'name = "ddp"', 'name = "ddp", find_unused_parameters = true',
    'name = "zero1", form = "all_reduce"', 'name = "zero2", granularity = "parameter"',
    'name = "zero3"', 'name = "fsdp2", forward_prefetch = 1',
    'name = "fsdp2", offload = true, sync = "last"',
    'name = "hsdp", dp_replicate = 2, dp_shard = 4, all_reduce = "last", sync = "last"',
    'name = "zero_redundancy", find_unused_parameters = true',
)
FEATURES: dict[str, dict[str, str]] = {
    "frozen": {"frozen": '["wte.*", "blocks.[01].*"]'},
    "frozen, wrapped": {"frozen": '["wte.*", "blocks.[01].*"]', "wrapping": "{ every = 2 }"},
    "unused": {"model": ', unused = ["blocks.1"]'},
    "unused and frozen": {"model": ', unused = ["blocks.1"]', "frozen": '["w?e.*", "blocks.1.*"]'},
    "wrapped apart": {"wrapping": '{ every = 2, ends = "apart" }'},
    "whole": {"wrapping": '{ every = "all" }'},
    "autocast": {"precision": '{ parameters = "fp32", autocast = "bf16" }'},
    "save_every": {"activation_checkpointing": '{ mode = "selective", save = ["linear"], '
                                               'save_every = 2 }'},
    "every second": {"activation_checkpointing": '{ mode = "full", every = 2 }'},
    "clip": {"optimizer": '{ name = "adamw", clip_norm = 1.0 }'},
    "uses": {"model": ', uses = { times = 2, order = "stack" }'},
    "forwards": {"batch": ", forwards = 2"},
}


def text(strategy: str, feature: str) -> str:
    of = FEATURES[feature]
    more = (
        f"{key} = {of[key]}\n"
        for key in ("frozen", "wrapping", "activation_checkpointing", "optimizer") if key in of
    )
    return f"""
model = {{ {GPT}{of.get("model", "")} }}
batch = {{ micro_batch = 2, sequence_length = 8{of.get("batch", "")} }}
cluster = {{ preset = "dgx-h100" }}
strategy = {{ {strategy} }}
precision = {of.get("precision", '{ parameters = "bf16", reduce = "fp32" }')}
{"".join(more)}"""


def scenario(strategy: str, feature: str) -> Scenario:
    return parse(text(strategy, feature).encode(), where="parts.toml")


def cases(*, whole: bool) -> Iterator[tuple[str, str]]:
    """Every strategy with every feature, or each feature with two strategies, where a scenario may
    have both."""
    for (i, strategy), (j, feature) in itertools.product(enumerate(STRATEGY), enumerate(FEATURES)):
        if not whole and (2 * i + j) % len(STRATEGY) > 1:
            continue
        try:
            scenario(strategy, feature)
        except ScenarioError as refused:
            assert feature.startswith("unused") or (feature == "clip" and "offload" in strategy), (
                refused
            )
            continue
        yield strategy, feature


PARTS = (
    "model", "batch", "mesh", "strategy", "options", "sync", "optimizer", "checkpointing",
    "wrapping", "expandable_segments",
)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_whatever_is_advised_or_tried_can_be_written_and_is_not_refused(whole: bool) -> None:
    seen = set()
    for strategy, feature in cases(whole=whole):
        case = scenario(strategy, feature)
        for name, other in (*((n, o) for n, o in changes(case) if not problems(o)), *ways(case)):
            written = parse(other.to_toml().encode(), where="parts.toml")
            for part in PARTS:
                assert getattr(written, part) == getattr(other, part), (
                    strategy, feature, name, part
                )
            seen.add(name)
    assert {
        "strategy zero1", "wrapping.every = 1: one param group per block",
        "fsdp2, reshard_after_forward = false",
    } <= seen


@pytest.mark.parametrize("feature", ["frozen", "save_every", "every second", "clip", "forwards"])
def test_what_is_advised_and_tried_of_fsdp1_can_be_written_and_is_not_refused(feature: str) -> None:
    options = 'sharding = "grad_op", use_orig_params = true'
    case = scenario(f'name = "fsdp1", dp_replicate = 2, dp_shard = 4, {options}', feature)
    seen = []
    for name, other in (*((n, o) for n, o in changes(case) if not problems(o)), *ways(case)):
        written = parse(other.to_toml().encode(), where="parts.toml")
        assert [getattr(written, part) for part in PARTS] == [
            getattr(other, part) for part in PARTS
        ], name
        seen += [name] if other.strategy == "fsdp1" else []
    assert {
        "dp_shard = 8: shard over all ranks", 'fsdp1, shard groups of 2, sharding = "full"'
    } <= set(seen)


def test_what_would_be_refused_is_not_advised() -> None:
    case = scenario('name = "fsdp2", sync = "last"', "unused")
    assert "half the micro-batch, twice the accumulation" in {name for name, _ in changes(case)}
    assert "half the micro-batch, twice the accumulation" not in {
        effect.change for effect in advice(way_of((), planned(case)))
    }


def test_a_step_up_keeps_the_options_that_both_strategies_have() -> None:
    (other,) = (
        other
        for name, other in changes(scenario('name = "zero2", granularity = "parameter"', "clip"))
        if "zero3" in name
    )
    assert other.options.granularity == "parameter"
    case = scenario('name = "hsdp", dp_replicate = 2, dp_shard = 4, offload = true', "frozen")
    (other,) = (other for name, other in changes(case) if "fsdp2" in name)
    assert other.options.offload


def test_every_second_block_may_become_every_block() -> None:
    (other,) = (
        o
        for name, o in changes(scenario('name = "zero3"', "every second"))
        if "checkpointing" in name
    )
    assert other.checkpointing.every == 1


@pytest.mark.parametrize(("strategy", "feature", "expected"), [
    ('name = "ddp"', "frozen", "2Ψ + 14Ψt"), ('name = "zero1"', "frozen", "2Ψ + 2Ψt + 12Ψt/8"),
    ('name = "zero2"', "frozen", "2Ψ + 14Ψt/8"), ('name = "zero3"', "frozen", "2Ψ/8 + 14Ψt/8"),
    ('name = "fsdp2"', "unused", "4Ψ/8 + 12Ψt/8"), ('name = "fsdp2"', "autocast", "16Ψ/8"),
    ('name = "ddp"', "clip", "16Ψ"),
])
def test_frozen_and_unused_parameters_count_as_parameters_alone(
    strategy: str, feature: str, expected: str
) -> None:
    case = scenario(strategy, feature)
    assert formula_text(case) == expected
    trained, whole = num_trained(case), case.model.num_parameters
    shards = 8 if "/8" in expected else 1
    assert (trained < whole) is ("Ψt" in expected)
    sizes = (
        part.replace("Ψt", f"*{trained}").replace("Ψ", f"*{whole}").replace("/", "//")
        for part in expected.split(" + ")
    )
    # what is cut is rounded up
    assert abs(formula_bytes(case) - sum(eval(size) for size in sizes)) <= 16 * shards


def held_between_steps(case: Scenario) -> int:
    """Parameters and optimizer states that live when a step is over."""
    live: dict[str, int] = {}
    program = plan.plan(case, device="cuda").of_rank(0)
    for event in (event for op in (*program.construction, *program.first) for event in op.memory):
        if isinstance(event, Free):
            live.pop(event.buffer, None)
        elif event.kind in ("parameters", "optimizer_states"):
            live[event.buffer] = event.nbytes
    return sum(live.values())


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
@pytest.mark.parametrize("feature", ["frozen", "unused and frozen"])
def test_the_formula_is_what_is_held_between_steps_but_for_gradients_and_padding(
    strategy: str, feature: str
) -> None:
    case = scenario(f'name = "{strategy}"', feature)
    gradient = state_bytes(case).gradient * num_trained(case)
    gradient = -(-gradient // 8) if strategy in ("zero2", "zero3", "fsdp2") else gradient
    padding = 0 if strategy == "ddp" else 16 * 8 * len(case.model.parameters)
    assert 0 <= held_between_steps(case) + gradient - formula_bytes(case) <= padding


def test_what_is_less_than_a_segment_is_not_called_elsewhere(
    capsys: pytest.CaptureFixture[str]
) -> None:
    effect = Effect(
        change="x", saved_bytes=0, saved_allocated_bytes=512, added_ns=0, step_time_ns=10,
        step_time_band_ns=(9, 12), needed_bytes=1, verdict="FITS", peak_at="backward root",
    )
    print_advice([
        effect, replace(effect, saved_allocated_bytes=-512),
        replace(effect, saved_allocated_bytes=0),
    ])
    written = capsys.readouterr()
    message = [
        line.partition("changes nothing: ")[2].partition(",")[0]
        for line in (written.out + written.err).splitlines() if "changes nothing: " in line
    ]
    assert message == ["512 B less in as many segments", "512 B more in as many segments"]
    assert "no effect on the peak" in written.out + written.err


def test_what_a_trace_does_not_cast_is_not_tried_under_strategies_that_cast() -> None:
    case = scenario('name = "ddp"', "frozen")
    model = TracedModel(
        name="traced", family="traced", modules=case.model.modules, units=case.model.units,
        lowered=lower(case.model, batch=case.batch, dtype="bfloat16"), dtype="bfloat16",
        batch=case.batch, casts_input=False,
    )
    tried = {other.strategy for _, other in ways(derived(case, model=model))}
    assert tried == {"ddp", "zero1", "zero2", "zero3"}
    assert "fsdp2" in {
        other.strategy for _, other in ways(derived(case, model=replace(model, casts_input=True)))
    }


def test_an_offloaded_part_is_said_to_be_on_the_host_only_where_there_is_another_memory() -> None:
    def reason(case: Scenario) -> str:
        verdict = assess_program(plan.plan(case, device=case.cluster.kind), case.cluster)
        return next(stage.reason for stage in waterfall(case, verdict) if stage.name == "states")

    offloaded = 'name = "fsdp2", offload = true'
    assert reason(scenario(offloaded, "frozen")) == "in host memory instead (CPUOffloadPolicy)"
    one_memory = text(offloaded, "frozen").replace(
        'preset = "dgx-h100"', 'preset = "cpu-gloo", ranks = 8'
    )
    assert reason(parse(one_memory.encode(), where="parts.toml")).startswith("padding")


@pytest.mark.parametrize(("strategy", "feature"), [
    ('name = "ddp", find_unused_parameters = true', "unused"),
    ('name = "fsdp2", offload = true', "frozen"),
    pytest.param(
        'name = "hsdp", dp_replicate = 2, dp_shard = 4, all_reduce = "last"', "forwards",
        marks=pytest.mark.slow,
    ),
    pytest.param('name = "zero2"', "uses", marks=pytest.mark.slow),
])
def test_waterfalls_add_up_and_something_fits(strategy: str, feature: str) -> None:
    case = scenario(strategy, feature)
    verdict = assess_program(plan.plan(case, device="cuda"), case.cluster, besides=belongings(case))
    stages = waterfall(case, verdict)
    total = 0
    for stage in stages:
        assert not stage.total or stage.nbytes == total
        total += 0 if stage.total else stage.nbytes
    assert all(
        effect.needed_bytes + effect.saved_bytes == verdict.needed.nbytes
        for effect in advice(way_of((), planned(case)))
    )
    assert fit(case).recommended is not None


def test_a_scenario_of_parts_is_shown_and_fitted_from_the_command_line(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "parts.toml"
    path.write_text(text('name = "fsdp2"', "frozen"))
    assert main(["show", str(path), "--memory"]) == 0
    assert "of which Ψt = " in " ".join("".join(capsys.readouterr()).split())
    assert main(["fit", str(path)]) == 0
