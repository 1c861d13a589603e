"""Neither `import zsim` nor the command line's start loads torch or numpy."""

import subprocess
import sys

import pytest

PROBE = "import sys; print(*[name for name in ('torch', 'numpy', 'zreal') if name in sys.modules])"


def loaded(code: str) -> list[str]:
    """Which of torch, numpy and zreal a fresh interpreter has loaded after `code`."""
    done = subprocess.run([sys.executable, "-c", f"{code}\n{PROBE}"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()


@pytest.mark.parametrize(
    "code",
    [
        "import zsim",
        "import zsim.cli, zsim.commands, zsim.backends, zsim.simulator, zsim.report",
        "from zsim.cli import main; main(['--help'])",
        "from zsim.cli import main; main(['list', 'backends'])",
        "from zsim.cli import main; main(['list', 'models'])",
    ],
)
def test_torch_is_not_loaded_by(code):
    assert loaded(code) == []


@pytest.mark.quality
def test_the_probe_sees_what_is_loaded():
    """The meta-test: the same probe names a module called torch when there is one."""
    assert loaded("import sys, types; sys.modules['torch'] = types.ModuleType('torch')") == ["torch"]
    assert loaded("import sys, types; sys.modules['numpy'] = types.ModuleType('numpy')") == ["numpy"]


def test_help_loads_neither_pydantic_nor_rich_nor_simpy():
    probe = "print(*[name for name in ('pydantic', 'rich', 'simpy', 'networkx') if name in sys.modules])"
    code = f"from zsim.cli import main; main(['--help']); import sys; {probe}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""
