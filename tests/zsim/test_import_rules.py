"""The import rules hold on the tree, and each of them finds the import that it forbids."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.folders import ROOT

LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"
DEFECTS = {
    "torch in zsim": ("zsim/ir/mesh.py", "import torch", "neither torch nor zreal"),
    "zreal in zsim": ("zsim/ir/mesh.py", "import zreal.torch_private", "neither torch nor zreal"),
    "a package above": ("zsim/ir/mesh.py", "import zsim.engine.costs.op_costs", "inside zsim"),
    "a sibling": ("zsim/ir/mesh.py", "import zsim.models.spec", "inside zsim"),
    "zsim itself": ("zsim/ir/mesh.py", "import zsim", "front door"),
    "a public name": ("zsim/cli/reports/run_report.py", "from zsim import simulate", "front door"),
    "zreal upwards": ("zreal/modules/modules.py", "import zreal.backends", "inside zreal"),
}
"""File, seeded import, and the words of the contract that must break, by name."""


def broken(root: Path) -> list[str]:
    """Contracts that the code under `root` breaks."""
    done = subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache", "--no-logo"],
        cwd=root, capture_output=True, text=True,
    )
    contracts = re.findall(r"^(.*) BROKEN", done.stdout, re.MULTILINE)
    assert f"{len(contracts)} broken." in done.stdout, done.stdout + done.stderr
    assert done.returncode == (1 if contracts else 0)
    return contracts


def test_the_tree_keeps_every_rule() -> None:
    assert broken(ROOT) == []


@pytest.mark.quality
@pytest.mark.parametrize(("file", "line", "contract"), DEFECTS.values(), ids=DEFECTS)
def test_a_forbidden_import_breaks_its_rule(
    tmp_path: Path, file: str, line: str, contract: str
) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in ("zsim", "zreal"):
        ignored = shutil.ignore_patterns("__pycache__", "*.toml")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    seeded = tmp_path / file
    seeded.write_text(f"{seeded.read_text()}\n{line}\n")
    assert [contract in name for name in broken(tmp_path)] == [True]
