"""DeepSpeed's ops in C++, which torch compiles where they are first loaded.

Ranks would be killed as hung meanwhile, and leave a lock for which every later load waits. So they
are refused until the ops are compiled.
"""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

from zreal.torch_private import extension_folder
from zsim.errors import BackendUnavailableError, listed
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES

LOCK = "lock"
"""The file in an op's folder that exists while a process compiles or loads it."""
UNFINISHED = ".ninja_lock"
"""The file there that ninja removes at the end of what it compiles."""
PATIENCE_S = 10.0
"""Seconds within which a lock of another rank that loads a compiled op is gone."""


def require_async_io(is_compatible: bool) -> None:
    """BackendUnavailableError where DeepSpeed cannot compile the op that reads and writes files."""
    if not is_compatible:
        raise BackendUnavailableError(
            where='offload.optimizer = "nvme"',
            expected="libaio and its headers, with which DeepSpeed compiles its op async_io",
            found="none", remedy='apt install libaio-dev, or use optimizer = "cpu"',
        )


def require_compiled(scenario: Scenario, *, device_type: str) -> None:
    """BackendUnavailableError where DeepSpeed would compile an op that the scenario needs, or wait
    for a lock on it."""
    if STRATEGIES[scenario.strategy].library != "deepspeed":
        return
    offload = scenario.offload
    for is_needed, where, builder, ops, how in (
        (offload.uses_drives, 'offload.optimizer = "nvme"', "AsyncIOBuilder",
         ("pin_memory", "async_io"), "with libaio-dev, for about ten minutes of CPU"),
        (offload.adam == "deepspeed", 'offload.adam = "deepspeed"', "CPUAdamBuilder",
         ("cpu_adam",), "for a minute or more of CPU"),
    ):
        if is_needed:
            _require(ops, where, device_type, f"run once, {how}: {command(builder, device_type)}")


def _require(ops: tuple[str, ...], where: str, device_type: str, remedy: str) -> None:
    home = _home()
    installed = _installed(home, device_type)
    folders = [Path(extension_folder(op)) for op in ops if op not in installed]
    lacking = [each for each in folders if not _is_compiled(each, str(home / "ops" / "csrc"))]
    patience = 0.0 if lacking else PATIENCE_S  # no rank holds a lock where all are refused
    locks = [str(each / LOCK) for each in folders if _stays(each / LOCK, patience)]
    if not (lacking or locks):
        return
    problem = f"the lock {listed(locks, 'and')} of a process that compiles or was killed"
    if lacking:
        names = listed([each.name for each in lacking], "or")
        problem = f"no {names} of this DeepSpeed in {lacking[0].parent}"
    if locks:
        remedy = f"delete {listed(locks, 'and')} unless a process compiles now, then {remedy}"
    raise BackendUnavailableError(
        where=where, found=problem, remedy=remedy,
        expected=f"{listed(ops, 'and')} of DeepSpeed compiled beforehand, as ranks would be killed "
                 "while they compile",
    )


def _home() -> Path:
    """The folder of the package deepspeed, which is not imported: that takes seconds."""
    spec = find_spec("deepspeed")
    assert spec is not None  # as its version is known
    return Path(str(spec.origin)).parent


def _installed(home: Path, device_type: str) -> set[str]:
    """The ops that were compiled as DeepSpeed was installed for this kind of device."""
    file = home / "git_version_info_installed.py"
    built = run_path(str(file)) if file.exists() else {}
    if built.get("accelerator_name") != device_type:
        return set()
    return {op for op, is_there in built["installed_ops"].items() if is_there}


def command(builder: str, device_type: str) -> str:
    """The line for a shell that compiles the ops of one of DeepSpeed's builders."""
    return (
        f"DS_ACCELERATOR={device_type} python -c "
        f'"from deepspeed.ops.op_builder import {builder}; {builder}().load()"'
    )


def _is_compiled(folder: Path, sources: str) -> bool:
    """True where an op is compiled from these sources; another environment's are compiled anew."""
    plan = folder / "build.ninja"
    return (
        (folder / f"{folder.name}.so").exists() and not (folder / UNFINISHED).exists()
        and plan.exists() and sources in plan.read_text()
    )


def _stays(lock: Path, seconds: float) -> bool:
    """True where a lock is there and still is after so many seconds."""
    end = time.monotonic() + seconds
    while lock.exists() and time.monotonic() < end:
        time.sleep(0.05)
    return lock.exists()
