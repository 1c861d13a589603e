"""A folder that one run at a time works in."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from zsim.io.files import PlaceError
from zsim.io.system import locks
from zsim.io.system.locks import alone_in

OTHER = (
    "import sys; from pathlib import Path; from zsim.io.system.locks import alone_in\n"
    "with alone_in(Path(sys.argv[1])):\n"
    "    print(flush=True); sys.stdin.read()\n"
)


def test_a_folder_in_which_another_process_works_is_refused_until_that_is_gone(
    tmp_path: Path
) -> None:
    folder = tmp_path / "results"
    command = [sys.executable, "-c", OTHER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(PlaceError) as error, alone_in(folder):
            pass
        other.kill()
    assert str(error.value) == (
        f"{folder}: expected results of a single run at a time, found another one that is at work "
        f"there; name another folder, or wait"
    )
    for _ in range(2):
        with alone_in(folder):
            pass


def test_a_file_system_without_locks_grants_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with alone_in(tmp_path):
        assert (tmp_path / locks.LOCK).exists()
