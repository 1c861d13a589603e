"""hypothesis knows zsim.Scenario, whichever of the two is imported first. It loads a small
module for that, and nothing else of zsim."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.folders import ROOT

DRAWS = "print(type(st.from_type(zsim.Scenario).example()).__name__)"
ORDERS = {
    "hypothesis first": f"from hypothesis import strategies as st; import zsim; {DRAWS}",
    "zsim first": f"import zsim; from hypothesis import strategies as st; {DRAWS}",
    "its type first": "import zsim; zsim.Scenario; from hypothesis import strategies as st; "
                      + DRAWS,
}
LOADED = (
    "import hypothesis, sys; print(*sorted(name for name in sys.modules if "
    "name.partition('.')[0] in ('zsim', 'zreal', 'torch', 'pydantic', 'networkx', 'simpy')))"
)


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment in which the entry points of pyproject.toml are installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entries = project["entry-points"]["hypothesis"]
    folder = tmp_path / "zsim_entries-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: zsim-entries\nVersion: 1\n")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (folder / "entry_points.txt").write_text("\n".join(["[hypothesis]", *lines]))
    return {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}


def printed(code: str, environment: dict[str, str], folder: Path) -> str:
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("order", ORDERS)
def test_a_scenario_is_drawn_by_its_type(
    order: str, installed: dict[str, str], tmp_path: Path
) -> None:
    assert printed(ORDERS[order], installed, tmp_path) == "Scenario"


def test_hypothesis_loads_one_small_module_of_zsim(
    installed: dict[str, str], tmp_path: Path
) -> None:
    assert printed(LOADED, installed, tmp_path).split() == [
        "zsim", "zsim.testing", "zsim.testing.hypothesis_plugin", "zsim.version"
    ]
