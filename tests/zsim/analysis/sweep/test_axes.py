"""Axes of a sweep and its file: every combination once, and clear refusals."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.folders import PARITY
from zsim.analysis.sweep import sweep
from zsim.analysis.sweep.axes import Axes, SweepError, axes_of, changes_of, read
from zsim.errors import ZsimError
from zsim.scenario.scenario import load

LISTS = st.dictionaries(
    st.sampled_from(["batch.micro_batch", "batch.accumulation", "cluster.nodes", "steps"]),
    st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1,
)


@given(LISTS)
def test_points_are_every_combination_in_order(lists) -> None:
    axes = axes_of(lists, where="axes")
    points = [tuple(point.values()) for point in axes.points()]
    assert points == list(product(*lists.values()))
    assert len(points) == axes.num_points


@given(LISTS)
def test_dotted_and_nested_keys_are_the_same_axes(lists) -> None:
    nested: dict = {}
    for key, values in lists.items():
        table, _, name = key.rpartition(".")
        (nested.setdefault(table, {}) if table else nested)[name] = values
    dotted, tables = (axes_of(each, where="axes").values for each in (lists, nested))
    assert dict(dotted) == dict(tables)


def test_tables_are_values_and_keys_of_one_table_go_together() -> None:
    point = {"strategy": {"name": "fsdp2"}, "strategy.forward_prefetch": 1, "steps": 2}
    assert changes_of(point) == {
        "strategy": {"name": "fsdp2", "forward_prefetch": 1}, "steps": 2
    }


@pytest.mark.parametrize(("table", "found"), [
    ({}, "{}"), ({"steps": 3}, "3"), ({"steps": []}, r"\[\]"), ({"batch": {"steps": "a"}}, '"a"'),
    (None, "null"),
])
def test_what_is_no_list_is_refused(table, found: str) -> None:
    with pytest.raises(SweepError, match=f"found {found}"):
        axes_of(table, where="axes")


def test_a_sweep_of_a_billion_points_is_refused_with_its_size() -> None:
    many = {f"batch.key{i}": list(range(1000)) for i in range(3)}
    with pytest.raises(SweepError, match=r"found 1,000,000,000 \(1,000 x 1,000 x 1,000\)"):
        axes_of(many, where="axes")


def test_a_file_names_its_scenario_and_its_axes(tmp_path) -> None:
    (tmp_path / "base.toml").write_text((PARITY / "zero3-mlp-4.toml").read_text())
    file = tmp_path / "sweep.toml"
    file.write_text(
        'scenario = "base.toml"\n[axes]\nbatch.micro_batch = [4, 8]\n'
        'strategy = [{ name = "ddp" }]\n'
    )
    scenario, axes = read(file)
    assert scenario.name == "base"
    assert axes == Axes({"batch.micro_batch": (4, 8), "strategy": ({"name": "ddp"},)})


@pytest.mark.parametrize(("text", "found"), [
    ("axes = {}", "found none"), ('scenario = "a.toml"\nother = 1', "the key"),
    ('scenario = "a.toml"\n[axes]\nsteps = [1]', "no such file"), ("scenario = [", "TOML"),
    ("scenario = 3", "found 3"),
])
def test_a_file_that_makes_no_sweep_is_refused(tmp_path, text: str, found: str) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(text)
    with pytest.raises(ZsimError, match=found):
        read(file)
    with pytest.raises(SweepError, match="a sweep's file"):
        read(tmp_path / "missing.toml")


def test_a_key_that_no_scenario_has_is_refused_before_any_point_is_computed():
    scenario = load(PARITY / "fsdp2-mlp-4.toml")
    with pytest.raises(SweepError, match=r"^axes\.batch\.mcro: expected a key of scenarios"):
        sweep(scenario, {"batch.mcro": [1, 2]})
    rows = sweep(scenario, {"strategy.name": ["ddp", "zero3"], "strategy.lookahead": [1]}).rows
    assert [row["status"] for row in rows] == ["refused", "ok"]
