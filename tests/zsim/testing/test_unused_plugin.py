"""The plugin where it is installed and not used: it imports nothing of zsim's, and says nothing."""

import subprocess
import sys

from tests.support.folders import ROOT

pytest_plugins = ["pytester"]

LOADED = """
import sys
import pytest
code = pytest.main(sys.argv[1:])
print(*sorted(name for name in sys.modules if name.partition('.')[0] in ('zsim', 'zreal', 'torch',
    'pydantic', 'networkx', 'simpy', 'rich')))
"""
OWN = ["zsim", "zsim.testing", "zsim.testing.pytest_plugin", "zsim.version"]


def loaded(folder, *arguments):
    """Modules of zsim and of what it needs that a session of pytest has loaded at its end."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, "-p", "zsim.testing.pytest_plugin", "-p", "no:cacheprovider",
         *arguments],
        cwd=folder, capture_output=True, text=True, check=True,
        env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)},
    )
    return done.stdout.splitlines()[-1].split()


def test_a_session_without_its_tests_loads_one_small_module(tmp_path):
    (tmp_path / "test_user.py").write_text("def test_a(tmp_path): assert 1 == 1\n")
    (tmp_path / "pyproject.toml").write_text("[tool.x]\nmodel = 3\nbatch = 4\n")
    assert loaded(tmp_path, "--collect-only") == OWN
    assert loaded(tmp_path) == OWN


def test_a_failing_comparison_of_the_users_own_loads_nothing_either(tmp_path):
    (tmp_path / "test_user.py").write_text("def test_a(): assert [1] == [2]\n")
    assert loaded(tmp_path) == OWN


def test_a_file_that_was_not_asked_for_loads_only_the_look_at_it(tmp_path):
    (tmp_path / "test_user.py").write_text("def test_a(): pass\n")
    (tmp_path / "config.toml").write_text("model = 3\nbatch = 4\n")
    looked = ["zsim.testing.plugin", "zsim.testing.plugin.scenario_items"]
    assert loaded(tmp_path) == sorted([*OWN, *looked])


def test_its_options_and_its_marker_are_told(sessions):
    help_text = sessions.run("--help").stdout.str()
    names = ("backend", "require-backend", "update-golden", "compare", "fail-if", "artifacts",
             "timeout", "seed", "world-size")
    assert [name for name in names if f"--zero-{name}" not in help_text] == []
    inis = [f"zero_{name.replace('-', '_')}" for name in names if name != "update-golden"]
    assert [name for name in inis if f"  {name} (" not in help_text] == []
    sessions.run("--markers").stdout.fnmatch_lines(["@pytest.mark.zero(scenario=PATH, *"])
