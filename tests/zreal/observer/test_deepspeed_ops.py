"""Ops that DeepSpeed compiles are refused until they are: folders as torch and ninja leave them."""

import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from threading import Timer

import pytest

import zsim
from tests.measured import deepspeed_drives
from tests.measured.deepspeed import adam_grid
from zreal.observer.subjects.deepspeed_ops import require_async_io, require_compiled
from zsim.errors import BackendUnavailableError
from zsim.scenario.scenario import Scenario

DRIVES = deepspeed_drives.scenario(1280)
ADAM = Scenario(**adam_grid()[0])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package deepspeed, where the one that is installed is not seen."""
    package = tmp_path / "environment" / "deepspeed"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    monkeypatch.syspath_prepend(str(package.parent))
    return package


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that TORCH_EXTENSIONS_DIR names, in which nothing is compiled."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    return tmp_path / "extensions"


def compiled(root: Path, home: Path, *ops: str) -> None:
    for op in ops:
        (root / op).mkdir(parents=True, exist_ok=True)
        (root / op / f"{op}.so").touch()
        (root / op / "build.ninja").write_text(f"build {op}.o: compile {home}/ops/csrc/{op}.cpp\n")


def refusal(scenario: Scenario = DRIVES, device_type: str = "cpu") -> str:
    with pytest.raises(BackendUnavailableError) as error:
        require_compiled(scenario, device_type=device_type)
    return str(error.value)


def test_without_libaio_a_real_run_is_refused_with_the_package_that_has_it() -> None:
    with pytest.raises(BackendUnavailableError) as error:
        require_async_io(False)
    assert "expected libaio and its headers" in str(error.value)
    assert 'apt install libaio-dev, or use optimizer = "cpu"' in str(error.value)
    require_async_io(True)


def test_ops_that_are_not_compiled_are_refused_with_the_line_that_compiles_them(
    root: Path, home: Path
) -> None:
    started = time.monotonic()
    told = refusal(device_type="cuda")
    assert time.monotonic() - started < 60  # to compile them takes ten minutes
    assert f"found no pin_memory or async_io of this DeepSpeed in {root}; run once" in told
    assert told.endswith(
        'DS_ACCELERATOR=cuda python -c "from deepspeed.ops.op_builder import AsyncIOBuilder; '
        'AsyncIOBuilder().load()"'
    )
    compiled(root, home, "pin_memory")
    assert "found no async_io of this DeepSpeed" in refusal()
    compiled(root, home, "async_io")
    require_compiled(DRIVES, device_type="cpu")


def test_adam_for_the_host_has_a_line_of_its_own(root: Path, home: Path) -> None:
    assert "import CPUAdamBuilder; CPUAdamBuilder().load()" in refusal(ADAM)
    compiled(root, home, "cpu_adam")
    require_compiled(ADAM, device_type="cpu")


def test_a_lock_is_named_where_an_op_is_not_compiled(root: Path, home: Path) -> None:
    compiled(root, home, "async_io")
    (root / "pin_memory").mkdir()
    (root / "pin_memory/lock").touch()
    told = refusal()
    assert "found no pin_memory of this DeepSpeed" in told
    assert f"; delete {root}/pin_memory/lock unless a process compiles now, then run once" in told


def test_a_lock_beside_a_compiled_op_is_refused_once_it_has_stayed(
    root: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(root, home, "pin_memory", "async_io")
    lock = root / "async_io/lock"
    lock.touch()
    release = Timer(0.3, lock.unlink)  # as another rank does that has loaded it
    release.start()
    require_compiled(DRIVES, device_type="cpu")
    release.join()
    lock.touch()
    monkeypatch.setattr("zreal.observer.subjects.deepspeed_ops.PATIENCE_S", 0.2)
    told = refusal()
    assert f"found the lock {lock} of a process that compiles or was killed" in told
    assert f"; delete {lock} unless a process compiles now, then run once" in told


def test_ops_of_another_environment_or_half_compiled_ones_are_none(
    root: Path, home: Path, tmp_path: Path
) -> None:
    compiled(root, tmp_path / "other/deepspeed", "pin_memory", "async_io")
    assert "found no pin_memory or async_io of this DeepSpeed" in refusal()
    compiled(root, home, "pin_memory", "async_io")
    (root / "async_io/.ninja_lock").touch()
    assert "found no async_io of this DeepSpeed" in refusal()


def test_ops_that_were_compiled_at_the_installation_need_no_folder(root: Path, home: Path) -> None:
    (home / "git_version_info_installed.py").write_text(
        "installed_ops = {'pin_memory': True, 'async_io': True, 'cpu_adam': False}\n"
        "accelerator_name = 'cpu'\n"
    )
    require_compiled(DRIVES, device_type="cpu")
    assert "found no cpu_adam" in refusal(ADAM)
    assert "found no pin_memory or async_io" in refusal(device_type="cuda")


def test_states_on_the_host_and_other_strategies_need_no_op(root: Path, home: Path) -> None:
    own = {"strategy": {"name": "zero3"}, "optimizer": {}, "precision": {}}
    for tables in ({"offload": {"optimizer": "cpu", "adam": "torch"}}, own):
        require_compiled(Scenario(**adam_grid()[0] | tables), device_type="cpu")
    assert not os.path.lexists(root)


@pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed: zsim[real,deepspeed]"
)
@pytest.mark.gloo
def test_a_real_run_is_refused_before_its_ranks_start(root: Path) -> None:
    with pytest.raises(BackendUnavailableError, match=r"AsyncIOBuilder\(\)\.load\(\)"):
        zsim.validate(DRIVES, against="gloo")
    assert not any(root.rglob("lock"))
