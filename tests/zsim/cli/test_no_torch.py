"""Neither `import zsim` nor the command line's start loads torch or numpy."""

import os
import subprocess
import sys

import pytest

from tests.support.folders import ROOT

PROBE = "import sys; print(*[name for name in ('torch', 'numpy', 'zreal') if name in sys.modules])"


def loaded(code: str) -> list[str]:
    """Packages among torch, numpy and zreal that a fresh interpreter has loaded after `code`."""
    return ended(f"{code}\n{PROBE}").split()


def ended(code: str) -> str:
    """The last line that a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


STEPS = (
    "import zsim",
    "import zsim.cli.main, zsim.cli.commands.runs.run, zsim.runs.registry, zsim.runs.simulator, "
    "zsim.cli.reports.run_report",
    "from zsim.cli.main import main; main(['--help'])", "main(['list', 'backends'])",
    "main(['list', 'models'])",
)


def test_torch_is_not_loaded_by_importing_zsim_nor_by_help_nor_by_lists():
    probes = [f"{step}\nfound.append([n for n in NAMES if n in sys.modules])" for step in STEPS]
    code = ["import sys; NAMES = 'torch', 'numpy', 'zreal'; found = []", *probes, "print(found)"]
    assert ended("\n".join(code)) == str([[] for _ in STEPS])


@pytest.mark.quality
def test_the_probe_sees_what_is_loaded():
    """The meta-test: the same probe names modules called torch and numpy when there are some."""
    fakes = "; ".join(f"sys.modules['{n}'] = types.ModuleType('{n}')" for n in ("torch", "numpy"))
    assert loaded(f"import sys, types; {fakes}") == ["torch", "numpy"]


def test_help_of_any_command_and_completion_load_no_package_but_zsim_and_nothing_of_its_work():
    code = """
import sys
before = set(sys.modules)
from zsim.cli.main import main
from zsim.cli.options import COMMANDS
for arguments in [["--help"], *([name, "--help"] for name in COMMANDS)]:
    assert main(arguments) == 0
from zsim.cli.parser import parser
assert set(parser().commands()) == set(COMMANDS)
print(*sorted(
    name for name in set(sys.modules) - before
    if name.partition(".")[0] not in ("zsim", *sys.stdlib_module_names)
    or name.startswith(("zsim.cli.commands.", "zsim.scenario", "zsim.cluster", "zsim.models"))
))"""
    assert ended(code) == ""


def test_a_command_is_the_only_one_that_is_imported():
    probe = "print(*[name for name in sys.modules if name.startswith('zsim.cli.commands.')])"
    code = f"from zsim.cli.main import main; main(['fit', 'none.toml']); import sys; {probe}"
    assert ended(code) == "zsim.cli.commands.analysis zsim.cli.commands.analysis.fit"


def test_what_fits_is_shown_without_rich_networkx_other_strategies_and_processes():
    probe = (
        "print(*[name for name in ('rich', 'networkx', 'zsim.strategies.ddp', "
        "'concurrent.futures.process') if name in sys.modules], file=sys.stderr)"
    )
    command = ["show", str(ROOT / "scenarios/parity/fsdp2-mlp-4.toml"), "--memory", "--json"]
    code = f"from zsim.cli.main import main; main({command}); import sys; {probe}"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stderr.strip() == ""


@pytest.mark.parametrize(("command", "raised", "message"), [
    (["run", "--backend", "fake"], "ModuleNotFoundError(\"No module named 'sympy'\")",
     "ModuleNotFoundError: No module named 'sympy'"),
    (["run", "--backend", "nccl"], "ImportError('no c10\\nand more')", "ImportError: no c10"),
    (["validate", "--against", "gloo"],
     "OSError('libcudart.so.12: cannot open shared object file')",
     "OSError: libcudart.so.12: cannot open shared object file"),
])
def test_a_torch_that_cannot_be_imported_is_a_backend_that_is_not_there(
    tmp_path, command, raised, message
):
    broken = tmp_path / "torch.py"
    broken.write_text(f"raise {raised}\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    arguments = [command[0], "scenarios/parity/fsdp2-mlp-2.toml", *command[1:]]
    done = subprocess.run(
        [sys.executable, "-m", "zsim", *arguments], cwd=ROOT, env=environment, capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == (
        f"zsim: backend {command[-1]}: expected a torch that can be imported, found one at "
        f"{broken} that cannot: {message}; "
        "install it anew, pip install --force-reinstall 'zsim[real]', or take what shadows it "
        "off the path"
    )
