"""Notebooks run from their first cell to their last, and show what a notebook shows."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import zsim
from tests.support.folders import PARITY, SCENARIOS
from zsim.errors import ZsimError
from zsim.io.notebook.html_table import html_table

NOTEBOOKS = sorted((SCENARIOS / "notebooks").glob("*.ipynb"))


def results(notebook: Path) -> list[Any]:
    """The values of the last expressions of a notebook's cells, run one after another."""
    names: dict[str, Any] = {"__name__": "__main__"}
    values = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, str(notebook), "exec"), names)
        if isinstance(last, ast.Expr):
            values.append(eval(compile(ast.Expression(last.value), str(notebook), "eval"), names))
    return values


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_objects_show_short_tables(notebook, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    values = [value for value in results(notebook) if value is not None]
    kinds = [type(value).__name__ for value in values]
    assert kinds == [
        "Scenario", "Run", "Figure", "Figure", "Series", "Fit", "Plan", "Sweep", "DataFrame",
        "Comparison",
    ]
    tables = [value._repr_html_() for value in values if type(value).__module__.startswith("zsim")]
    assert all(table.startswith("<table>") and len(table) < 6000 for table in tables)
    assert "critical path" in capsys.readouterr().out


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") for cell in cells)
    assert len({cell["id"] for cell in cells}) == len(cells)


def test_names_in_tables_of_notebooks_are_escaped():
    scenario = zsim.Scenario(
        model={"preset": "mlp-tiny"}, batch={"micro_batch": 2, "sequence_length": 1},
        cluster={"preset": "cpu-gloo", "ranks": 2}, strategy={"name": "ddp"}, name="<b>&",
    )
    for shown in (scenario, zsim.simulate(scenario)):
        assert "<b>" not in shown._repr_html_()
        assert "&lt;b&gt;&amp;" in shown._repr_html_()


def test_a_long_table_says_how_many_rows_are_left_out():
    table = html_table("many", ("number",), [[number] for number in range(30)])
    assert table.count("<tr>") == 21
    assert table.endswith("<p>and 10 more rows</p>")


def test_pictures_are_of_the_rank_that_is_asked_for_and_of_nothing_else():
    pytest.importorskip("matplotlib")
    run = zsim.simulate(zsim.load(PARITY / "fsdp2-mlp-4.toml"), all_ranks=True)
    (axes,) = run.plot_memory(rank=3).axes
    assert axes.get_title().endswith("rank 3")
    assert max(axes.lines[0].get_ydata()) <= run.peak_memory / 2**30
    streams = {span.stream for span in run.ranks[1].spans if span.end_ns}
    (axes,) = run.plot_timeline(rank=1).axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [*dict.fromkeys(
        span.stream for span in run.ranks[1].spans if span.stream in streams
    )]
    with pytest.raises(ZsimError, match="expected 0, 1, 2 or 3, found 9"):
        run.plot_timeline(rank=9)
