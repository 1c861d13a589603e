"""The pytest plugin's time: `python -m tests.benchmarks.plugin` measures it on this machine.

Sessions of pytest run in turn, as processes of their own: a normal test without the plugin and with
it, and a hundred scenario files. Seconds of computing and of the clock are shown. Each is the least
of several, as a shared machine only ever adds.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from tests.support.folders import PARITY, ROOT
from zsim.scenario.scenario import load

SCENARIOS, SESSIONS, SHORT_SESSIONS = 100, 5, 15
PLUGINS = ("-p", "zsim.testing.pytest_plugin", "-p", "zreal.testing.pytest_plugin")


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of computing, and of the clock."""

    computing: float
    clock: float

    def __str__(self) -> str:
        return f"{self.computing:7.3f} s of computing {self.clock:7.3f} s in all"


def session(folder: Path, *arguments: str) -> Seconds:
    """A session of pytest in a process of its own; it must pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    before = time.perf_counter()
    log = os.open(folder / "log.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    child = os.posix_spawn(
        sys.executable, command, environment,
        file_actions=[(os.POSIX_SPAWN_DUP2, log, descriptor) for descriptor in (1, 2)],
    )
    os.close(log)
    _, status, used = os.wait4(child, 0)
    assert status == 0, (folder / "log.txt").read_text()
    return Seconds(used.ru_utime + used.ru_stime, time.perf_counter() - before)


def least(taken: Iterator[Seconds]) -> Seconds:
    """The least computing of all, and the least time."""
    every = [*taken]
    return Seconds(*(min(getattr(each, name) for each in every) for name in Seconds.__slots__))


def write_scenarios(folder: Path) -> None:
    """A hundred files: those of the project that real runs have been compared with, in turn."""
    folder.mkdir()
    for number, file in enumerate(islice(cycle(sorted(PARITY.glob("*.toml"))), SCENARIOS)):
        (folder / f"{number:03}-{file.name}").write_text(load(file).with_(seed=number).to_toml())


def main() -> None:
    """Print a line for each kind of session, and what the unused plugin adds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
        write_scenarios(folder / "scenarios")
        nothing = str(folder / "test_nothing.py")
        pairs = [
            (session(folder, nothing), session(folder, *PLUGINS, nothing))
            for _ in range(SHORT_SESSIONS)
        ]
        without, beside = (least(iter(side)) for side in zip(*pairs, strict=True))
        many = least(
            session(folder, *PLUGINS, str(folder / "scenarios")) for _ in range(SESSIONS)
        )
    sys.stdout.write(
        f"a session of a normal test, without the plugin  {without}\n"
        f"the same with the plugin, unused                {beside}\n"
        f"    added                                       "
        f"{Seconds(beside.computing - without.computing, beside.clock - without.clock)}\n"
        f"a session of {SCENARIOS} simulated scenario files       {many}\n"
        f"on {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, "
        f"load {os.getloadavg()[0]:.2f}\n"
    )


if __name__ == "__main__":
    main()
