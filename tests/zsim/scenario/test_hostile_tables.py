"""Errors of values of any kind at any key of a scenario have file and key. Values from Python
become what a file can hold, or are refused by key."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest

import zsim
from zsim.models.families import FAMILIES
from zsim.scenario import scenario, tables
from zsim.scenario.expect import FIGURES
from zsim.scenario.keys.fault_tables import FAULT_TABLES
from zsim.scenario.keys.options import sizes_table, strategy_table
from zsim.scenario.keys.table import MAX_NAME, MAX_NAMES
from zsim.scenario.keys.tables import TABLES as FIXED
from zsim.scenario.keys.tables import ScenarioTable
from zsim.strategies import STRATEGIES

BASE: dict[str, Any] = {
    "model": {"preset": "gpt-tiny"},
    "batch": {"micro_batch": 2, "sequence_length": 64},
    "cluster": {"preset": "dgx-h100"},
    "strategy": {"name": "fsdp2"},
}
FAULT: dict[str, Any] = {
    "rank": 0, "node": 0, "nic": 0, "at": "forward root", "factor": 2.0, "mean": "1 us",
    "by": "1 us", "bandwidth": "1 Gbit/s",
}
"""Keys of all kinds of faults."""
HOSTILE = ("x", "", "1e999 s", "9" * 30 + " GiB", "\u202egpj", "[", "*" * 250)
FREE = {"description"}
"""Keys that may have any text."""


def changes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each key of the schema, with the tables in which it is the only change; "?" stands for its
    value."""
    for name in ScenarioTable.model_fields:
        if name not in FIXED:
            yield name, {name: "?"}
    for table, kind in FIXED.items():
        yield from ((f"{table}.{key}", {table: {key: "?"}}) for key in kind.model_fields)
    for name in STRATEGIES:
        for key in strategy_table(name).model_fields:
            yield f"strategy.{key}", {"strategy": {"name": name} | {key: "?"}}
    for family in FAMILIES:
        for key in sizes_table(family).model_fields:
            sizes = {"family": family, "sizes": {key: "?"}}
            yield f"model.sizes.{key}", {"model": sizes}
    yield from ((f"expect.{name}", {"expect": {name: "?"}}) for name in FIGURES)
    for kind, schema in FAULT_TABLES.items():
        own = {key: value for key, value in FAULT.items() if key in schema.model_fields}
        for key in schema.model_fields:
            yield f"faults[0].{key}", {"faults": [own | {"kind": kind, key: "?"}]}


def filled(table: Any, value: object) -> Any:
    """`table` with `value` for "?"."""
    if isinstance(table, dict):
        return {key: filled(inner, value) for key, inner in table.items()}
    if isinstance(table, list):
        return [filled(inner, value) for inner in table]
    return value if table == "?" else table


def complaints_of(changed: dict[str, Any]) -> tuple[str, ...]:
    """The problems of a file with these changes of `BASE`."""
    whole = tables.merged(BASE, changed)
    text = "".join(f"{key} = {tables.in_line(value)}\n" for key, value in whole.items())
    try:
        scenario.parse(text.encode(), where="x.toml")
    except zsim.ScenarioError as error:
        return error.problems
    return ()


@pytest.mark.parametrize(("key", "change"), list(changes()), ids=lambda part: str(part)[:60])
def test_any_text_at_any_key_is_accepted_or_refused_with_file_and_key(
    key: str, change: dict[str, Any]
) -> None:
    for value in (*HOSTILE, ["x"], [["x"]], {"x": "x"}, 1e300, -1, True):
        complaints = complaints_of(filled(change, value))
        assert all(problem.startswith("x.toml: ") for problem in complaints)
        assert not any("Input should be" in line or "quantity" in line for line in complaints)
        wanted = (f"x.toml: {key}", f"x.toml: {key.partition('.')[0]}: ")
        if value == "x" and key not in FREE:
            assert any(problem.startswith(wanted) for problem in complaints), complaints


def test_a_duration_hides_no_other_problem() -> None:
    execution = {"step_overhead": "x", "issue_kernel": "2 h"}
    complaints = complaints_of({"execution": execution, "steps": 0})
    assert complaints == (
        'x.toml: execution.step_overhead: expected a number of ns, us, µs, ms or s (as "5 '
        'us"), found "x"',
        'x.toml: execution.issue_kernel: expected a number of ns, us, µs, ms or s (as "5 '
        'us"), found "2 h"',
        "x.toml: steps: expected at least 1, found 0",
    )


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"strategy": 5}, "strategy: expected a table, { key = value }, found 5"),
        ({"expect": [1]}, "expect: expected a table, { key = value }, found [1]"),
        ({"frozen": [1]}, "frozen[0]: expected text, found 1"),
        ({"optimizer": {"clip_norm": True}}, "optimizer.clip_norm: expected a number, found true"),
        ({"optimizer": {"clip_norm": -1}}, "optimizer.clip_norm: expected at least 0, found -1"),
        ({"model": {"uses": {"times": "x"}}}, 'model.uses.times: expected a whole number, found '
                                              '"x"'),
        ({"model": {"uses": {"time": 2}}}, "model.uses.times: expected a value, found nothing"),
        ({"model": {"uses": 99}}, "model.uses: expected at most 64 or a table, { key = value }, "
                                  "found 99"),
        ({"model": {"family": "mlp", "sizes": {"dims": [1, "a"], "hidden": 1, "num_classes": 1}}},
         'model.sizes.dims[1]: expected a whole number, found "a"'),
        ({"faults": [{"kind": "slow_link", "bandwith": "1 GB/s"}]},
         "faults[0].bandwith: unknown key, did you mean bandwidth?"),
        ({"faults": [{"kind": "slow_lnk"}]},
         "faults[0].kind: expected slow_rank, jitter, late_start, failure, skipped_collective, "
         'reordered_collective, slow_link or lost_link, found "slow_lnk", did you mean '
         "slow_link?"),
        ({"faults": [{"kind": "failure", "rank": 0, "at": "all_gather"}]},
         'faults[0].at: expected the kind and unit of an op, as "backward blocks.1", found '
         '"all_gather"'),
        ({"faults": [{"kind": "skipped_collective", "rank": 0, "at": "forward x"}]},
         'faults[0].at: expected the kind and unit of an op, as "all_gather blocks.1", found '
         '"forward x"'),
        ({"faults": [{"kind": "late_start", "rank": 99, "by": "1 us"}]},
         "faults[0].rank: expected 0 to 7, found 99"),
        ({"faults": [{"kind": "jitter", "mean": "1 us"}, {"kind": "jitter", "mean": "2 us"}]},
         "faults[1]: expected each fault once, found jitter again"),
        ({"faults": [
            {"kind": "skipped_collective", "rank": 0, "at": "all_gather root"},
            {"kind": "reordered_collective", "rank": 0, "at": "all_gather root"},
         ]}, "faults[1]: expected a single fault at all_gather root of rank 0, found "
             "reordered_collective after skipped_collective"),
        ({"faults": [{"kind": "lost_link", "node": 1, "nic": 0}]},
         "faults[0].node: expected 0 to 0, found 1"),
        ({"faults": [{"kind": "late_start", "rank": 0, "by": "0 ns"}]},
         'faults[0].by: expected more than 0 ns, found "0 ns"'),
        ({"faults": [{"kind": "jitter", "mean": "0 us"}]},
         'faults[0].mean: expected more than 0 ns, found "0 us"'),
        ({"faults": [{"kind": "slow_link", "node": 0, "nic": 0, "bandwidth": "48 GB/s"}]},
         "faults[0].bandwidth: expected 1 Mbit/s to less than the others' 48.0 GB/s, found 48.0 "
         "GB/s"),
        ({"expect": {"ends": False}},
         "expect.ends: expected true of a step without [[faults]], found false"),
        ({"faults": [{"kind": "late_start", "rank": 0, "by": "1 us"}],
          "expect": {"ends": False, "mfu": "> 1 %"}},
         "expect.mfu: expected none of a step that does not end, found mfu"),
        ({"expect": {"at_fault": 1}}, "expect.at_fault: expected in [[faults]] one of a rank, "
                                      "found none"),
        ({"faults": [{"kind": "lost_link", "node": 0, "nic": 0}], "expect": {"at_fault": 1}},
         "expect.at_fault: expected in [[faults]] one of a rank, found none"),
        ({"faults": [{"kind": "late_start", "rank": 0, "by": "1 us"}], "expect": {"at_fault": 8}},
         "expect.at_fault: expected 0 to 7, found 8"),
        ({"cluster": {"nic_bandwidth": "x"}}, "cluster.nic_bandwidth: expected a number of B/s"),
    ],
)
def test_a_problem_is_told_in_the_words_of_scenario_files(
    change: dict[str, Any], wanted: str
) -> None:
    complaints = complaints_of(change)
    assert any(line.startswith(f"x.toml: {wanted}") for line in complaints), complaints


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("frozen", {"frozen": "?"}), ("model.unused", {"model": {"unused": "?"}}),
        ("wrapping.nested", {"wrapping": {"nested": "?"}}),
        ("activation_checkpointing.save", {"activation_checkpointing": {"save": "?"}}),
        ("activation_checkpointing.recompute", {"activation_checkpointing": {"recompute": "?"}}),
    ],
)
def test_lists_of_names_have_an_end(key: str, change: dict[str, Any]) -> None:
    entries = f"x.toml: {key}: expected at most {MAX_NAMES:,} entries, found {MAX_NAMES + 1:,}"
    assert complaints_of(filled(change, ["x"] * (MAX_NAMES + 1))) == (entries,)
    length = f"x.toml: {key}[0]: expected at most {MAX_NAME} characters, found {MAX_NAME + 1}"
    assert complaints_of(filled(change, ["x" * (MAX_NAME + 1)])) == (length,)


def test_patterns_without_a_match_are_one_problem() -> None:
    assert complaints_of({"frozen": ["wtf*", "x", "y"]}) == (
        'x.toml: frozen: "wtf*" matches no parameter (2 others match none either)',
    )


@pytest.mark.parametrize(
    ("change", "written"),
    [
        ({"execution": {"step_overhead": zsim.ms(3)}}, {"execution": {"step_overhead": "3000000 "
                                                                                       "ns"}}),
        ({"strategy": {"name": "zero2", "granularity": zsim.MiB(25)}},
         {"strategy": {"name": "zero2", "granularity": "26214400 B"}}),
        ({"expect": {"peak_memory": zsim.GiB(3), "step_time": zsim.ms(3)}},
         {"expect": {"peak_memory": "== 3221225472 B", "step_time": "== 3000000 ns"}}),
        ({"frozen": ("wte*",)}, {"frozen": ["wte*"]}),
    ],
)
def test_quantities_and_tuples_of_python_are_written_as_files_have_them(
    change: dict[str, Any], written: dict[str, Any]
) -> None:
    made = zsim.Scenario(**tables.merged(BASE, change))
    assert tomllib.loads(made.to_toml()) == BASE | written == made.tables
    assert scenario.parse(made.to_toml().encode(), where="scenario.toml") == made
    assert zsim.Scenario(**BASE).with_(**change) == made


@pytest.mark.parametrize("value", [Decimal(2), 2j, b"2", {2}, range(2), print])
def test_any_other_value_of_python_is_refused_by_key(value: object) -> None:
    for key, change in (("batch.micro_batch", {"batch": BASE["batch"] | {"micro_batch": value}}),
                        ("steps", {"steps": value}), ("model.preset", {"model": {"preset": value}}),
                        ("frozen", {"frozen": value})):
        with pytest.raises(zsim.ScenarioError) as caught:
            zsim.Scenario(**BASE | change)
        assert any(problem.startswith(f"Scenario: {key}") for problem in caught.value.problems)


@pytest.mark.parametrize("strategy", ["fsdp2", "hsdp"])
def test_resharding_to_one_rank_is_none_and_not_pythons_true(strategy: str) -> None:
    """1 equals True in Python, and so did the scenarios: caches gave the Program of the other."""
    made = {
        value: zsim.Scenario(
            model={"preset": "mlp-tiny"}, batch={"micro_batch": 2},
            cluster={"preset": "cpu-gloo", "ranks": 2},
            strategy={"name": strategy, "reshard_after_forward": value}
            | ({"dp_replicate": 1, "dp_shard": 2} if strategy == "hsdp" else {}),
        )
        for value in ("auto", False, 2)
    }
    alone = made[2].with_(strategy={"reshard_after_forward": 1})
    everywhere = made[2].with_(strategy={"reshard_after_forward": True})
    assert alone == made[False]
    assert alone != everywhere
