"""A new strategy, model, collective, cluster, subject or law is a file and a line of a table. This
finds a missing line."""

from __future__ import annotations

import ast
import tomllib
from typing import get_args

import pytest

from tests.support.folders import ROOT
from zreal.observer.subjects.table import SUBJECTS
from zsim.autograd.aten.operator_calls import _ELSEWHERE, _OWN
from zsim.cluster import cluster_presets
from zsim.cluster.collectives import LIBRARIES
from zsim.ir.laws import program_laws, run_laws
from zsim.memory.formulas import ZeroStage
from zsim.models import families, operators
from zsim.models.families import FAMILIES
from zsim.scenario.keys.options import strategy_table
from zsim.strategies import LADDER, STRATEGIES


def modules_with(folder: str, function: str) -> set[str]:
    """The modules and packages of `folder` that define or import a public function called
    `function`: what their table is made of."""
    modules = set()
    for file in (ROOT / folder).rglob("*.py"):
        if file.stem == "__init__":
            continue
        tree = ast.parse(file.read_text())
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        imported = {
            alias.asname or alias.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        assigned = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        if function in defined | imported | assigned:
            inside = file.relative_to(ROOT / folder).parent.name
            modules.add(inside or file.stem)
    return modules


@pytest.mark.parametrize(
    ("folder", "function", "table"),
    [
        ("zsim/strategies", "STRATEGY", STRATEGIES),
        ("zsim/models/families", "build", FAMILIES),
        ("zsim/cluster/collectives", "duration_ns", LIBRARIES),
    ],
)
def test_each_file_is_in_its_table(folder, function, table):
    assert modules_with(folder, function) == set(table)


def test_each_subject_is_in_its_table():
    files = modules_with("zreal/observer/subjects", "build")
    assert files == {build.__module__.rpartition(".")[2] for build in SUBJECTS.values()}
    assert set(SUBJECTS) <= set(STRATEGIES)


def test_each_preset_is_listed_and_loads():
    files = {file.stem for file in (ROOT / "zsim/presets/models").iterdir()}
    assert files == set(families.presets())
    clusters = {file.stem for file in (ROOT / "zsim/presets/clusters").iterdir()}
    assert clusters == set(cluster_presets.clusters())
    for name in families.presets():
        assert families.preset(name).source
    for name in cluster_presets.clusters():
        assert cluster_presets.load_cluster(name).name == name


def figures(table: dict[str, object]) -> list[dict[str, object]]:
    """Every figure of a preset, however deep."""
    inner = [part for part in table.values() if isinstance(part, dict)]
    return [table] if "value" in table else [figure for part in inner for figure in figures(part)]


def test_each_figure_of_a_cluster_has_its_provenance_and_source():
    for file in (ROOT / "zsim/presets/clusters").iterdir():
        numbers = figures(tomllib.loads(file.read_text()))
        assert len(numbers) > 10
        assert all(figure["provenance"] and figure["source"] for figure in numbers), file.name


def test_each_kind_of_operator_has_its_calls():
    assert set(operators.OperatorKind.__args__) - {"traced"} == {*_OWN, *_ELSEWHERE}


@pytest.mark.parametrize(
    ("name", "table"),
    [("run_laws.py", run_laws.RUN_LAWS), ("program_laws.py", program_laws.PROGRAM_LAWS)],
)
def test_each_law_is_in_its_table(name, table):
    tree = ast.parse((ROOT / "zsim/ir/laws" / name).read_text())
    laws = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and ast.unparse(node.returns) == "Iterator[str]"
    }
    assert {law.__name__ for law in table.values()} == laws


def test_analyses_and_reports_ask_for_no_strategy_by_name():
    """Each strategy declares itself what of it can vary."""
    named = [
        f"{file.name}:{node.lineno} {node.value}"
        for folder in ("analysis", "cli", "memory")
        for file in (ROOT / "zsim" / folder).glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant)
        and node.value in set(STRATEGIES) - set(get_args(ZeroStage))
    ]
    assert named == []


@pytest.mark.parametrize("name", LADDER)
def test_what_fit_varies_are_options_of_the_strategy(name):
    strategy = STRATEGIES[name]
    declared = (*strategy.keeps_gathered, *strategy.frees_after_forward, *strategy.for_left_out)
    assert all(value.is_set(value.set_in(strategy.options())) for value in declared)


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_strategy_has_a_schema_of_its_own_options(name):
    keys = set(strategy_table(name).model_fields)
    assert {"name", *(["sync"] if STRATEGIES[name].syncs else [])} <= keys
    assert set(STRATEGIES[name].axes) <= keys
