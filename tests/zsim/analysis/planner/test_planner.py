"""Plans: bounds hold, what they rule out is on no front, goals choose what they say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zsim
from tests.support.cases.situations import cases
from tests.support.folders import ROOT
from zsim.analysis.assessed import drafted, of_planned
from zsim.analysis.fit import fit
from zsim.analysis.planner import plan as plan_module
from zsim.analysis.planner import search, space
from zsim.analysis.planner.bounds import bounds_of
from zsim.analysis.planner.goal import GOALS
from zsim.analysis.planner.option import dominates
from zsim.analysis.planner.table import Request
from zsim.cli.main import main
from zsim.scenario.checks import refusals
from zsim.scenario.plan import planned
from zsim.scenario.tables import in_line
from zsim.testing.strategies.tables import STRATEGIES

SMALL = zsim.Scenario(
    model={"preset": "llama-3-8b", "num_layers": 2},
    batch={"micro_batch": 1, "sequence_length": 2048}, cluster={"preset": "dgx-h100"},
    strategy={"name": "fsdp2"}, precision={"parameters": "bf16"},
)
FILES = ("llama-3-8b-8-h100", "zero2-llama-2-7b-8x8-a100", "hsdp-llama-3-8b-4x8-h100")


@pytest.fixture(scope="module")
def plan() -> zsim.Plan:
    return zsim.plan_for(SMALL, nodes=[1, 2], micro_batches=[1, 2], global_batch=32)


@pytest.mark.parametrize("name", FILES)
def test_bounds_are_below_what_is_simulated(name: str) -> None:
    scenario = zsim.load(ROOT / f"scenarios/published/{name}.toml")
    for candidate in zsim.fit(scenario).candidates:
        least = bounds_of(candidate.scenario)
        assert 0 < least.nbytes <= candidate.memory.allocated_bytes
        assert 0 < least.ns <= candidate.step_time_ns


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(STRATEGIES).flatmap(cases))
def test_bounds_of_random_scenarios_are_below_what_is_simulated(drawn) -> None:
    """Hypothesis drew 700 once, and none was beyond."""
    scenario, _ = drawn
    least, planned_case = bounds_of(scenario), drafted(planned(scenario))
    assert least.nbytes <= min(each.allocated for each in planned_case.ranks)
    floor, (memory, step) = planned_case.floor, of_planned(planned_case.case)
    assert step is not None
    assert floor.nbytes <= memory.needed.nbytes
    assert floor.low <= memory.needed.low
    assert least.ns <= floor.ns <= step.ns


def test_states_on_the_host_bound_nothing() -> None:
    offloaded = SMALL.with_(strategy={"offload": True})
    assert bounds_of(offloaded).nbytes == 0 < bounds_of(SMALL).nbytes
    on_host = SMALL.with_(strategy={"name": "zero2"}, offload={"optimizer": "cpu"})
    assert bounds_of(on_host).nbytes == 0


def test_candidates_are_those_of_fit_on_each_size(plan: zsim.Plan) -> None:
    same = SMALL.with_(batch={"accumulation": 4})
    ways = {name for name, case in fit.cases(same) if not refusals.problems(case)}
    there = {
        option.way for option in plan.options
        if option.gpus == 8 and option.scenario.batch.micro_batch == 1
    }
    ruled_out = {name for name, _ in plan.refused if name.startswith("8 GPUs, micro_batch = 1,")}
    assert ways == there | {name.removeprefix("8 GPUs, micro_batch = 1, ") for name in ruled_out}
    for option in plan.options:
        batch = option.scenario.batch
        assert batch.micro_batch * batch.accumulation * option.gpus == 32


def test_what_bounds_rule_out_changes_neither_front_nor_choice(plan, monkeypatch) -> None:
    ruled_out = [reason for _, reason in plan.refused if reason.startswith("OOM: states")]
    monkeypatch.setattr(search._Search, "_ruled_out", lambda *_: "")
    monkeypatch.setattr(search, "_no_better", lambda *_: "")
    whole = zsim.plan_for(SMALL, nodes=[1, 2], micro_batches=[1, 2], global_batch=32)
    assert len(whole.options) == len(plan.options) + len(plan.refused) - len(whole.refused)
    assert len(whole.options) >= len(plan.options) + len(ruled_out)
    assert [each.name for each in whole.front] == [each.name for each in plan.front]
    assert whole.recommended
    assert plan.recommended
    assert whole.recommended.name == plan.recommended.name


def test_a_small_device_rules_out_by_states_alone() -> None:
    plan = zsim.plan_for(
        SMALL.with_(model={"num_layers": 32}, strategy={"name": "zero1"}), micro_batches=[1],
        global_batch=8,
    )
    reasons = dict(plan.refused)
    assert "states alone are" in reasons["8 GPUs, micro_batch = 1, ddp"]


def test_where_all_are_out_of_memory_more_nodes_and_offloading_are_named() -> None:
    """All are ruled out by states alone, and yet one of `zsim fit` has room."""
    scenario = SMALL.with_(model={"preset": "llama-3-70b", "num_layers": 80})
    plan = zsim.plan_for(scenario, micro_batches=[1])
    assert plan.options == ()
    assert str(plan).splitlines()[-1] == (
        "nothing fits: try more nodes, or smaller micro-batches; `zsim fit` tries offloading too"
    )


def test_the_front_is_what_nothing_else_beats(plan: zsim.Plan) -> None:
    able = [each for each in plan.options if each.memory.verdict == "FITS"]
    for option in able:
        beaten = any(dominates(other, option) for other in able)
        assert beaten == (option not in plan.front)
        assert beaten == option.reason.startswith("no better than")


def test_every_option_but_the_recommended_has_one_reason(plan: zsim.Plan) -> None:
    without = [option for option in plan.options if not option.reason]
    assert without == [plan.recommended]
    assert all(reason for _, reason in plan.refused)


def test_goals_choose_what_they_say() -> None:
    told = {
        goal: zsim.plan_for(
            SMALL, nodes=[1, 2], micro_batches=[1], global_batch=32, goal=goal
        ) for goal in GOALS
    }
    chosen = {goal: plan.recommended for goal, plan in told.items()}
    able = [each for each in told["fastest"].options if each.memory.verdict == "FITS"]
    assert chosen["fastest"].step_time_ns <= 1.02 * min(each.step_time_ns for each in able)
    assert chosen["smallest"].gpus == min(each.gpus for each in able) == 8
    least = min(able, key=lambda each: each.gpus * each.step_time_ns)
    assert chosen["cheapest"].gpus == least.gpus
    assert chosen["cheapest"].step_time_ns <= 1.02 * least.step_time_ns
    other = next(each for each in told["cheapest"].front if each.gpus != least.gpus)
    assert " time, " in other.reason
    assert other.reason.endswith("% GPU hours")


def test_the_cheapest_is_no_dearer_one_on_fewer_gpus_that_trains_twice_as_long() -> None:
    """Two nodes have room for what one node has not, and cost 1.7 % less in half the time."""
    plan = zsim.plan_for(
        SMALL.with_(model={"num_layers": 32}, batch={"sequence_length": 8192},
                    optimizer={"implementation": "fused"}),
        nodes=[1, 2], micro_batches=[1], global_batch=128, goal="cheapest",
    )
    hours = {each.name: each.gpus * each.step_time_ns for each in plan.front}
    of_one_node = min(hours[each.name] for each in plan.front if each.gpus == 8)
    assert plan.recommended.gpus == 16
    assert 1 < of_one_node / hours[plan.recommended.name] < 1.02


def test_where_all_are_tight_one_that_releases_no_cache_is_taken() -> None:
    """Three sequences may just have room; four flush cached memory twice a step."""
    scenario = SMALL.with_(
        model={"preset": "llama-2-13b", "num_layers": 40}, batch={"sequence_length": 4096},
        cluster={"preset": "p4d"}, optimizer={"implementation": "fused"},
    )
    asked = {"vary": {"strategy.name": ["fsdp2"]}}
    (quiet, flushing) = (
        zsim.plan_for(scenario, micro_batches=[each], global_batch=8 * each, **asked).recommended
        for each in (3, 4)
    )
    assert {each.memory.verdict for each in (quiet, flushing)} == {"TIGHT"}
    assert (quiet.memory.running, flushing.memory.running) == (
        "", "flushing cached memory twice a steady step"
    )
    request = Request(tokens=None, days=None, price=None, budget=None, goal="fastest")
    faster = replace(flushing, step_time_ns=quiet.step_time_ns // 2)
    assert plan_module._taken([faster, quiet], request) is quiet


def test_days_leave_out_what_is_slower(plan: zsim.Plan) -> None:
    tokens = 1e12
    fastest = plan.recommended.days(tokens)[0]
    late = zsim.plan_for(
        SMALL, nodes=[1, 2], micro_batches=[1, 2], global_batch=32, tokens=tokens,
        days=1.1 * fastest, price=2.0, goal="smallest",
    )
    assert late.recommended.gpus == 16
    assert any(reason.endswith(" are asked") for _, reason in late.reasons)
    assert "at 2 an hour" in str(late)
    never = zsim.plan_for(
        SMALL, micro_batches=[1], global_batch=32, tokens=tokens, days=fastest / 9
    )
    assert never.recommended is None
    verdict, least = str(never).splitlines()[-2:]
    assert verdict == "nothing fits in time: try more nodes, or more days"
    assert least.startswith("   the quickest: ")
    assert least.endswith(" are asked")
    dear = zsim.plan_for(
        SMALL, micro_batches=[1], global_batch=32, tokens=tokens, price=2.0, budget=3.0
    )
    verdict, least = str(dear).splitlines()[-2:]
    assert verdict == "nothing fits in time and budget: try a larger budget"
    assert least.startswith("   the cheapest: ")


def test_sizes_that_do_not_divide_are_told() -> None:
    plan = zsim.plan_for(SMALL, micro_batches=[1, 3], global_batch=32)
    assert ("1 node, micro_batch = 3", "32 sequences are no multiple of 3 on each of 8 ranks") in (
        plan.refused
    )


def test_a_plain_module_is_planned_on_one_rank_and_on_several_what_trains_as_it_does() -> None:
    alone = SMALL.with_(
        model={"num_layers": 1}, cluster={"ranks": 1}, strategy={"name": "single"},
        precision={"parameters": "fp32", "autocast": "bf16"},
    )
    plan = zsim.plan_for(alone, micro_batches=[1])
    assert {option.scenario.strategy for option in plan.options} == {"single"}
    assert "1 sequence a step" in str(plan)
    sizes = space.space_of(alone, nodes=[1, 2], micro_batches=[1], global_batch=16)
    strategies = {case.scenario.strategy for case in space.cases(alone, sizes)
                  if isinstance(case, space.PlanCase) and case.gpus == 16}
    assert {"ddp", "zero1", "fsdp2"} <= strategies
    assert "single" not in strategies


def test_sizes_none_of_which_divide_are_told_in_the_last_line() -> None:
    plan = zsim.plan_for(SMALL, micro_batches=[3], global_batch=32)
    assert plan.recommended is None
    assert str(plan).endswith("32 sequences are no multiple of 3 on each of 8 ranks")
    assert "tensor and pipeline parallelism (tp, pp) are not varied" in str(plan)


@pytest.mark.parametrize(("asked", "message"), [
    ({"nodes": [0]}, "nodes: expected numbers from 1 on"),
    ({"micro_batches": ["a"]}, "micro_batches: expected numbers"),
    ({"nodes": range(1, 300), "micro_batches": [1]},
     "at most 256 combinations of nodes, micro-batches and varied keys, found 299"),
    ({"days": 3.0}, "days: expected tokens as well"), ({"tokens": -1}, "tokens: expected a number"),
    ({"goal": "best"}, "goal: expected fastest, cheapest or smallest"),
    ({"global_batch": 0}, "global_batch: expected numbers"),
])
def test_what_cannot_be_asked(asked, message: str) -> None:
    with pytest.raises(zsim.ArgumentError, match=message):
        zsim.plan_for(SMALL, **asked)


def test_the_command_prints_and_writes_what_to_take(tmp_path, capsys) -> None:
    file, out = tmp_path / "small.toml", tmp_path / "best.toml"
    file.write_text(SMALL.to_toml())
    asked = ["--micro-batch", "1,2", "--global-batch", "32", "--tokens", "1e11"]
    assert main(["plan", str(file), *asked, "-o", str(out)]) == 0
    told = capsys.readouterr().out
    assert "small: fastest way to train llama-3-8b, 32 sequences a step" in told
    assert "1e+11 tokens in" in told
    taken = zsim.load(out)
    assert taken.batch.micro_batch * taken.batch.accumulation == 4
    assert main(["plan", str(file), *asked, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["recommended"] in {option["name"] for option in plan["options"]}
    assert main(["plan", str(file), "--micro-batch", "two"]) == 2
    assert "--micro-batch" in capsys.readouterr().err


def test_what_to_take_is_written_in_another_folder_with_the_files_that_it_names(tmp_path) -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000,
              "n_positions": 2048}
    mine, out = tmp_path / "mine", tmp_path / "out" / "best.toml"
    mine.mkdir()
    (mine / "config.json").write_text(json.dumps(config))
    (mine / "a.toml").write_text(SMALL.to_toml().replace(
        'preset = "llama-3-8b", num_layers = 2', 'huggingface = "config.json"'
    ))
    assert main(["plan", str(mine / "a.toml"), "--micro-batch", "1", "-o", str(out)]) == 0
    assert zsim.load(out).tables["model"] == {"huggingface": "../mine/config.json"}


def test_other_keys_vary_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SMALL.with_(strategy={"name": "zero2"}).to_toml())
    asked = ["plan", str(path), "--micro-batch", "1", "--vary", "wrapping.every=1,2", "--json",
             "--vary", "offload.optimizer=cpu,nvme"]
    main(asked)
    plan = json.loads(capsys.readouterr().out)
    assert plan["space"]["vary"]["values"] == {
        "wrapping.every": [1, 2], "offload.optimizer": ["cpu", "nvme"],
    }
    two = [each for each in plan["options"] if "wrapping.every = 2" in each["name"]]
    assert two
    assert all(each["scenario"]["wrapping"]["every"] == 2 for each in two)
    names = [each["name"] for each in (*plan["options"], *plan["refused"])]
    assert any('offload.optimizer = "nvme"' in name for name in names)


def test_named_strategies_take_the_place_of_those_of_fit() -> None:
    names = ["fsdp1", "deepspeed2", "deepspeed3"]
    compared = zsim.plan_for(SMALL, micro_batches=[1], vary={"strategy.name": names})
    assert {option.scenario.strategy for option in compared.options} == set(names)
    assert {option.way.partition(",")[0] for option in compared.options} == set(names)
    assert compared.recommended in compared.options
    assert compared.recommended not in compared.alike


def test_what_a_candidate_cannot_keep_is_told() -> None:
    scenario = SMALL.with_(
        strategy={"name": "deepspeed3"}, checkpoint={"gather_16bit_weights": True},
        offload={"optimizer": "cpu", "parameters": "cpu", "adam": "deepspeed"},
    )
    weights = "checkpoint.gather_16bit_weights = true"
    plan = zsim.plan_for(scenario, micro_batches=[1])
    told = {each.scenario.strategy: each for each in space.cases(
        scenario, space.space_of(scenario, micro_batches=[1])
    ) if isinstance(each, space.PlanCase)}
    assert told["zero2"].dropped == ('offload.parameters = "cpu"', weights)
    assert (told["fsdp2"].dropped, told["fsdp2"].instead) == (
        ('offload.adam = "deepspeed"', weights), ("offload = true",)
    )
    shown = next(each for each in plan.options if each.scenario.strategy == "fsdp2")
    assert (shown.dropped, shown.instead) == (told["fsdp2"].dropped, told["fsdp2"].instead)
    assert f'% time; without offload.parameters = "cpu", {weights}' in str(plan)
    named = zsim.plan_for(
        scenario, micro_batches=[1], vary={"strategy.name": ["deepspeed2", "deepspeed3"]}
    )
    assert {(each.scenario.strategy, each.dropped) for each in named.options} == {
        ("deepspeed2", ('offload.parameters = "cpu"', weights)), ("deepspeed3", ()),
    }


@pytest.mark.parametrize(("strategy", "vary", "having"), [
    ({"name": "deepspeed3"}, {"strategy.leaf_module": ["none", "blocks"]}, {"deepspeed3"}),
    ({"name": "fsdp2"}, {"strategy.forward_prefetch": [0, 1, 2]}, {"fsdp2", "hsdp"}),
    ({"name": "fsdp2"}, {"strategy.reshard_after_forward": [True, False]}, {"fsdp2", "hsdp"}),
    ({"name": "zero2"}, {"strategy.granularity": ["unit", "parameter"]},
     {"zero1", "zero2", "zero3"}),
    ({"name": "hsdp", "dp_shard": 4, "dp_replicate": 2},
     {"strategy.dp_shard": [2, 4], "strategy.dp_replicate": [2, 4]}, set()),
    ({"name": "fsdp2"}, {"cluster.preset": ["dgx-h100", "dgx-a100"]}, None),
])
def test_a_candidate_stands_once_and_is_named_with_the_varied_keys_that_it_has(
    strategy, vary, having
) -> None:
    scenario = SMALL.with_(strategy=strategy)
    candidates = [
        each for each in space.cases(scenario, space.space_of(scenario, vary=vary))
        if isinstance(each, space.PlanCase)
    ]
    assert len({each.name for each in candidates}) == len(candidates)
    assert len({each.scenario.to_json() for each in candidates}) == len(candidates)
    key = next(iter(vary))
    said = {each.scenario.strategy for each in candidates if key in each.way}
    assert said == ({each.scenario.strategy for each in candidates} if having is None else having)
    option = key.removeprefix("strategy.")
    for value in vary[key] if having else ():
        meant = getattr(scenario.with_(strategy={option: value}).options, option)
        for each in candidates:
            if f"{key} = {in_line(value)}" in each.way:
                assert getattr(each.scenario.options, option) == meant


def test_candidates_without_the_varied_checkpointing_are_not_named_with_it() -> None:
    vary = {"activation_checkpointing.mode": ["full"], "activation_checkpointing.every": [2]}
    candidates = [
        each for each in space.cases(SMALL, space.space_of(SMALL, vary=vary))
        if isinstance(each, space.PlanCase)
    ]
    assert {("every = 2" in each.way) for each in candidates} == {True, False}
    for each in candidates:
        assert ("checkpointing.every = 2" in each.way) == (each.scenario.checkpointing.every == 2)


def test_a_budget_leaves_out_what_costs_more() -> None:
    asked = {"nodes": [1, 2], "micro_batches": [1], "global_batch": 32, "tokens": 1e9, "price": 2.0}
    free = zsim.plan_for(SMALL, **asked)
    costs = sorted(option.gpu_hours(1e9) * 2 for option in free.options)
    held = zsim.plan_for(SMALL, **asked, budget=(costs[0] + costs[-1]) / 2)
    dear = [option for option in held.options if option.reason.startswith("costs")]
    assert {option.name for option in dear} == {
        option.name for option in held.options
        if option.gpu_hours(1e9) * 2 > (costs[0] + costs[-1]) / 2
        and option.memory.verdict != "OOM"
    }
    assert dear


@pytest.mark.parametrize("text", ["wrapping.every", "wrapping.every=", "=1", "wrapping.every=[1"])
def test_a_varied_key_without_values_is_told(
    text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SMALL.to_toml())
    assert main(["plan", str(path), "--vary", text]) == 2
    assert "--vary: expected KEY=V1,V2" in capsys.readouterr().err


@pytest.mark.parametrize(("key", "said"), [
    ("strategy.tp", "zsim: vary: strategy.tp: tensor, pipeline, context and expert"),
    ("strategy.lookaehad", "zsim: vary: strategy.lookaehad: unknown key; known are dp_shard,"),
])
def test_a_key_that_no_candidate_can_have_is_an_error_of_one_line(
    key: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SMALL.to_toml())
    assert main(["plan", str(path), "--vary", f"{key}=1,2"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith(said)


@pytest.mark.parametrize(("asked", "message"), [
    ({"budget": 100}, "budget: expected price as well, found none"),
    ({"budget": 100, "price": 2}, "price: expected tokens as well, found none"),
])
def test_a_budget_needs_tokens_and_a_price(asked, message: str) -> None:
    with pytest.raises(zsim.ArgumentError, match=message):
        zsim.plan_for(SMALL, **asked)


@pytest.mark.parametrize(("key", "remedy"), [
    ("batch.micro_batch", "named apart"), ("cluster.nodes", "named apart"),
    ("batch.accumulation", "named apart"), ("batch", "named apart"),
    ("batch.sequence_length", "zsim sweep"), ("model.preset", "zsim sweep"),
    ("model", "zsim sweep"),
])
def test_sizes_models_and_sequences_are_not_varied_by_key(key: str, remedy: str) -> None:
    """A plan sets its sizes, and compares steps of as many tokens of one model."""
    with pytest.raises(zsim.ArgumentError, match=f"vary: expected keys .* found {key}; .*{remedy}"):
        zsim.plan_for(SMALL, vary={key: [1, 2]})


def test_a_price_gives_the_table_a_column_of_costs() -> None:
    plan = zsim.plan_for(SMALL, micro_batches=[1], tokens=1e12, price=3.0)
    lines = str(plan).splitlines()
    (taken,) = [line for line in lines if line.startswith("->")]
    assert lines[2].split()[-2:] == ["days", "cost"]
    assert f" {plan.recommended.gpu_hours(1e12) * 3:,.0f} " in taken


def test_the_smallest_cluster_in_time_is_sought_without_a_list_of_sizes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One command gives the answer of all sizes; its file expects nothing."""
    asked = {"micro_batches": [1], "global_batch": 64}
    days = 1.2 * zsim.plan_for(SMALL, nodes=[4], **asked).recommended.days(1e12)[0]
    path, out = tmp_path / "small.toml", tmp_path / "best.toml"
    path.write_text(SMALL.with_(expect={"peak_memory": "<= 1 GiB"}).to_toml())
    assert main([
        "plan", str(path), "--micro-batch", "1", "--global-batch", "64", "--goal", "smallest",
        "--tokens", "1e12", "--days", f"{days:.3f}", "-o", str(out), "--all",
    ]) == 0
    text = capsys.readouterr().out
    assert "more GPUs than" in text
    best = zsim.load(out)
    assert best.expect == ()
    every = zsim.plan_for(SMALL, nodes=[1, 2, 4, 8], tokens=1e12, days=days, **asked)
    in_time = [each for each in every.front if each.days(1e12)[0] <= days]
    assert best.world_size == min(each.gpus for each in in_time)


def test_the_smallest_cluster_may_be_of_any_number_of_nodes_that_divides_the_batch() -> None:
    """Three nodes are enough; of a batch that they do not divide, it is told that four are next."""
    asked = {"micro_batches": [1], "vary": {"strategy.name": ["fsdp2"]}}
    three = zsim.plan_for(SMALL, nodes=[3], global_batch=48, **asked).recommended
    within = {"tokens": 1e12, "days": 1.1 * three.days(1e12)[0], "goal": "smallest"}
    assert zsim.plan_for(SMALL, global_batch=48, **asked, **within).recommended.gpus == 24
    plan = zsim.plan_for(SMALL, global_batch=64, **asked, **within)
    assert plan.recommended.gpus == 32
    assert "no whole nodes between 16 and 32 GPUs divide 64 sequences" in str(plan)


def test_the_global_batch_is_one_that_all_nodes_divide() -> None:
    plan = zsim.plan_for(SMALL, nodes=[1, 3], micro_batches=[1])
    assert plan.space.global_batch == 24
    assert {option.gpus for option in plan.options} == {8, 24}


def test_what_is_too_slow_is_on_no_front() -> None:
    asked = {"nodes": [1, 2], "micro_batches": [1]}
    fastest = zsim.plan_for(SMALL, **asked).recommended
    plan = zsim.plan_for(SMALL, **asked, tokens=1e12, days=1.05 * fastest.days(1e12)[0])
    assert plan.front
    assert all(each.days(1e12)[0] <= plan.request.days for each in plan.front)
