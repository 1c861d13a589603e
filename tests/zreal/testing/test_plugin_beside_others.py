"""The plugin beside others: installed and not used, and under xdist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.folders import ROOT

LOADED = """
import sys
import pytest
code = pytest.main(sys.argv[1:])
print(*sorted(name for name in sys.modules if name.partition('.')[0] in ('zsim', 'zreal', 'torch')))
"""
PLUGIN = ("-p", "zreal.testing.pytest_plugin")


def _session(folder: Path, *command: str) -> str:
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "",
    }
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_session_without_ranks_loads_two_small_modules(tmp_path: Path) -> None:
    (tmp_path / "test_user.py").write_text("def test_a(tmp_path): assert 1 == 1\n")
    told = _session(tmp_path, "-c", LOADED, *PLUGIN)
    own = ["zreal", "zreal.testing", "zreal.testing.options", "zreal.testing.pytest_plugin"]
    assert told.splitlines()[-1].split() == own


def test_tests_on_ranks_are_collected_without_torch(tmp_path: Path) -> None:
    (tmp_path / "test_user.py").write_text(
        "import pytest\n@pytest.mark.ranks([2, 4])\ndef test_a(rank): pass\n"
    )
    told = _session(tmp_path, "-c", LOADED, *PLUGIN, "--collect-only", "-q")
    assert "test_user.py::test_a[2-ranks]\ntest_user.py::test_a[4-ranks]\n" in told
    assert "torch" not in told.split()


@pytest.mark.gloo
def test_tests_on_ranks_run_under_xdist(tmp_path: Path) -> None:
    (tmp_path / "test_user.py").write_text("""
import os, pytest, torch, torch.distributed as dist

@pytest.mark.parametrize("x", range(2))
@pytest.mark.ranks(2)
def test_a(rank, x):
    total = torch.tensor(x)
    dist.all_reduce(total)
    assert total == 2 * x
    assert os.environ["PYTEST_XDIST_WORKER"] == "gw0"
""")
    told = _session(tmp_path, "-m", "pytest", *PLUGIN, "-p", "xdist", "-n", "1", "-q")
    assert "2 passed" in told
