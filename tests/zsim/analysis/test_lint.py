"""Lint: one seeded mistake for each rule, its cost by two simulations, and ways to be silent."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path
from typing import Any

import pytest

import zsim
from tests.support.folders import ROOT
from zsim.analysis.lint.rules import RULES, lint
from zsim.analysis.scenario_warnings import caveats
from zsim.cli.main import main

GPT = {"family": "gpt", "sizes": {"num_layers": 4, "hidden_size": 64, "num_heads": 4,
                                  "vocabulary": 96}}
WIDE = {"preset": "llama-3-8b", "num_layers": 8}
ONE_NODE = {"preset": "dgx-h100"}
CPUS = {"preset": "cpu-gloo", "ranks": 4}


def scenario(**tables: Any) -> zsim.Scenario:
    """A scenario in which the lint finds nothing, but for what `tables` say."""
    calm = {
        "model": WIDE, "batch": {"micro_batch": 1, "sequence_length": 4096}, "cluster": ONE_NODE,
        "strategy": {"name": "fsdp2"}, "precision": {"parameters": "bf16"},
    }
    return zsim.Scenario(**{**calm, **tables})


MISTAKES: dict[str, tuple[zsim.Scenario, dict[str, Any]]] = {
    "one-unit": (scenario(wrapping={"every": "all"}), {"wrapping": {"every": None}}),
    "tiny-units": (
        scenario(model=GPT, batch={"micro_batch": 2, "sequence_length": 16}),
        {"wrapping": {"every": 4}},
    ),
    "padded-shards": (
        scenario(
            model={"family": "mlp", "sizes": {"dims": [3, 3, 3], "hidden": 5, "num_classes": 2}},
            batch={"micro_batch": 2},
        ),
        {},
    ),
    "empty-shards": (
        scenario(
            model={"family": "mlp",
                   "sizes": {"dims": [64, 64, 64], "hidden": 64, "num_classes": 3}},
            batch={"micro_batch": 2},
        ),
        {"strategy": {"name": "hsdp", "dp_replicate": 4, "dp_shard": 2}},
    ),
    "large-root": (
        scenario(model={"preset": "llama-3-8b", "num_layers": 2}), {"wrapping": {"ends": "apart"}},
    ),
    "flat-mesh": (
        scenario(
            model={**WIDE, "num_layers": 16},
            strategy={"name": "hsdp", "dp_replicate": 1, "dp_shard": 8},
        ),
        {"strategy": {"name": "fsdp2"}},
    ),
    "held-gradients": (
        scenario(
            batch={"micro_batch": 1, "sequence_length": 512, "accumulation": 4},
            strategy={"name": "fsdp2", "sync": "last"},
        ),
        {"strategy": {"sync": "every"}},
    ),
    "idle-prefetch": (
        scenario(strategy={"name": "zero3", "lookahead": 3}), {"strategy": {"lookahead": None}},
    ),
    "one-bucket": (
        scenario(strategy={"name": "ddp", "bucket_cap_mb": 100_000.0},
                 model={"preset": "llama-3-8b", "num_layers": 3}),
        {"strategy": {"bucket_cap_mb": None}},
    ),
    "idle-keys": (
        scenario(
            model=GPT, cluster=CPUS, batch={"micro_batch": 2, "sequence_length": 16},
            allocator={"expandable_segments": True},
        ),
        {"allocator": None},
    ),
}
"""Scenarios by the rule of their mistake, with the tables that mend it."""


def test_every_rule_has_a_seeded_mistake() -> None:
    assert set(MISTAKES) == set(RULES)


@pytest.mark.quality
@pytest.mark.parametrize("rule", MISTAKES)
def test_a_seeded_mistake_is_found_and_mended(rule: str) -> None:
    """The remedy of a finding ends it."""
    mistaken, remedy = MISTAKES[rule]
    assert rule in [finding.rule for finding in lint(mistaken)]
    if remedy:
        assert rule not in [finding.rule for finding in lint(mistaken.with_(**remedy))]


def test_the_page_runs_and_has_every_rule() -> None:
    page = ROOT / "zsim" / "analysis" / "lint" / "README.md"
    failed, attempted = doctest.testfile(str(page), module_relative=False)
    assert (failed, attempted > 0) == (0, True)
    assert set(re.findall(r"^\| `([a-z-]+)` \|", page.read_text(), re.M)) == set(RULES)


def test_a_common_scenario_has_no_finding() -> None:
    assert lint(zsim.load("scenarios/published/llama-3-8b-128-h100.toml")) == ()


@pytest.mark.parametrize("rule", ["large-root", "held-gradients", "flat-mesh", "tiny-units"])
def test_costs_are_those_of_two_simulated_runs(rule: str) -> None:
    mistaken, remedy = MISTAKES[rule]
    (finding,) = [each for each in lint(mistaken) if each.rule == rule]
    before, after = zsim.simulate(mistaken), zsim.simulate(mistaken.with_(**remedy))
    assert before.step_time is not None
    assert after.step_time is not None
    assert finding.cost_ns == before.step_time - after.step_time
    assert finding.cost_bytes == before.peak_memory - after.peak_memory


def test_padding_is_counted_by_hand() -> None:
    """Each of the parameters, of 2 to 5 rows, is padded to the 8 rows of 8 ranks."""
    mistaken, _ = MISTAKES["padded-shards"]
    (finding,) = [each for each in lint(mistaken) if each.rule == "padded-shards"]
    block, root = 5 * 3 + 5 + 3 * 5 + 3, 2 * 3 + 2
    padded_block, padded_root = 8 * 3 + 8 + 8 * 5 + 8, 8 * 3 + 8
    gathers = 2 * 2  # two blocks, each in forward and in backward; the root once
    assert zsim.simulate(mistaken).collectives["all_gather"].count == gathers + 1
    padding = gathers * (padded_block - block) + padded_root - root
    assert finding.gathered_bytes == 2 * padding
    share = padding / (padding + gathers * block + root)
    assert finding.fact.startswith(f"{share:.0%} of what is gathered is padding, as ")


@pytest.mark.quality
def test_ranks_that_hold_nothing_are_named_with_the_padding() -> None:
    """The head, 3 rows of 64 and a bias of 3, is the root; flat buffers fill every rank."""
    mistaken, _ = MISTAKES["empty-shards"]
    (finding,) = [each for each in lint(mistaken) if each.rule == "empty-shards"]
    assert finding.fact == "ranks 3 to 7 of 8 hold nothing of unit root (390 B)"
    assert finding.gathered_bytes == 5 * (64 + 1) * 2  # once, as the root stays gathered
    flat = mistaken.with_(strategy={"name": "zero3"})
    assert "empty-shards" not in [each.rule for each in lint(flat)]


@pytest.mark.parametrize(("name", "held"), [
    ("hsdp", "hooks and buffers of sharding"), ("zero2", "buffers of sharding"),
])
def test_replicas_of_what_is_not_sharded_are_found_and_a_flat_zero_is_not(
    name: str, held: str
) -> None:
    def facts(replicas: int, shards: int) -> list[str]:
        mesh = {"dp_replicate": replicas, "dp_shard": shards}
        case = scenario(model=GPT, strategy={"name": name, **mesh})
        return [each.fact for each in lint(case) if each.rule == "flat-mesh"]

    assert facts(8, 1) == [f"dp_shard = 1: each of 8 ranks holds a whole copy, with the {held}"]
    assert len(facts(1, 8)) == (name == "hsdp")
    assert facts(4, 2) == []


def test_shards_that_are_mostly_padding_are_mended_by_the_strategys_own_mesh() -> None:
    sizes = {"dims": [3, 3, 3], "hidden": 1, "num_classes": 1}
    case = scenario(
        model={"family": "mlp", "sizes": sizes}, batch={"micro_batch": 2},
        strategy={"name": "zero3"},
    )
    remedies = {each.rule: each.remedy for each in lint(case)}
    assert remedies["padded-shards"].startswith("shard over fewer ranks (a smaller dp_shard), or ")
    mended = case.with_(strategy={"dp_shard": 1})
    assert "padded-shards" not in [each.rule for each in lint(mended)]


@pytest.mark.parametrize("name", ["deepspeed1", "deepspeed2", "deepspeed3", "zero1", "zero2"])
@pytest.mark.parametrize("model", [
    {"preset": "llama-3-8b", "num_layers": 2},
    {"family": "mlp", "sizes": {"dims": [64, 64, 64], "hidden": 64, "num_classes": 3}},
], ids=["of a large root", "of a small root"])
def test_buffers_that_are_gathered_after_the_step_are_no_units(
    name: str, model: dict[str, Any]
) -> None:
    """DeepSpeed gathers parameters of all units at once, and a root that is whole stays so."""
    batch = {"micro_batch": 1} | ({} if "family" in model else {"sequence_length": 4096})
    case = scenario(model=model, strategy={"name": name}, batch=batch)
    rules = {each.rule for each in lint(case)}
    assert not rules & {"padded-shards", "empty-shards", "large-root"}


def test_rules_are_ignored_by_argument_and_by_the_scenario() -> None:
    mistaken, _ = MISTAKES["flat-mesh"]
    rules = [finding.rule for finding in lint(mistaken)]
    assert lint(mistaken, ignore=rules) == ()
    assert lint(mistaken.with_(lint={"ignore": rules})) == ()
    assert mistaken.with_(lint={"ignore": rules}).fingerprint == mistaken.fingerprint


def test_a_name_that_is_no_rule_is_refused() -> None:
    mistaken, _ = MISTAKES["flat-mesh"]
    with pytest.raises(zsim.ArgumentError, match='ignore: expected rules of one.* found "flat"'):
        lint(mistaken, ignore=["flat"])
    with pytest.raises(zsim.ScenarioError, match='lint.ignore: expected rules of .* found "flat"'):
        lint(mistaken.with_(lint={"ignore": ["flat"]}))


def test_a_warning_of_a_run_is_silent_where_the_lint_is() -> None:
    mistaken, _ = MISTAKES["one-unit"]
    assert len(caveats(mistaken)) == 1
    assert caveats(mistaken.with_(lint={"ignore": ["one-unit"]})) == ()


def test_the_command_prints_findings_and_ends_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistaken, remedy = MISTAKES["flat-mesh"]
    (tmp_path / "flat.toml").write_text(mistaken.to_toml())
    (tmp_path / "mended.toml").write_text(mistaken.with_(**remedy).to_toml())
    assert main(["lint", str(tmp_path)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == [
        "flat: 1 finding", "  flat-mesh: dp_replicate = 1: there is one copy, so this is fsdp2"
    ]
    assert out[-1] == "mended: no finding"
    assert main(["lint", str(tmp_path), "--ignore", "flat-mesh", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [each["findings"] for each in printed["scenarios"]] == [[], []]
    assert main(["lint", str(tmp_path), "--ignore", "flat"]) == 2


def test_a_file_that_is_no_scenario_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad, broken = (tmp_path / f"{name}.toml" for name in ("good", "bad", "broken"))
    good.write_text(scenario().to_toml())
    bad.write_text('model = { preset = "gpt-tny" }\nspeed = 3\n')
    broken.write_text("model =\n")
    assert main(["lint", str(broken), str(bad), str(good)]) == 2
    told = capsys.readouterr().out
    assert told.startswith("good: 1 finding\n")
    assert f"{broken}: not linted: not TOML: " in told
    lines = [line for line in told.splitlines() if line.startswith(f"{bad}: not linted: ")]
    assert len(lines) > 1
    assert any("speed: unknown key" in line for line in lines)
    assert main(["lint", str(bad), str(good), "--json"]) == 2
    table = json.loads(capsys.readouterr().out)
    assert [each["scenario"] for each in table["scenarios"]] == ["good"]
    assert [each["scenario"] for each in table["errors"]] == [str(bad)]
