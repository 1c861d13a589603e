"""Folders for files in place of drives, and whose they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zreal.processes.rank_folder import make_folder, remove_folders

MAKES = (
    "import sys; from zreal.processes.rank_folder import make_folder; "
    "made = make_folder(); (made / 'states').write_bytes(bytes(8)); print(made, flush=True); "
    "sys.stdin.read()"
)


def test_a_folder_of_a_killed_process_that_nobody_watched_goes_as_the_next_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", MAKES], env=os.environ | {"TMPDIR": str(tmp_path)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]
    folders = [Path(rank.stdout.readline().strip()) for rank in ranks if rank.stdout]
    assert [folder.parent for folder in folders] == [tmp_path, tmp_path]
    ranks[0].kill()
    ranks[0].communicate()
    own = [make_folder(), make_folder()]
    assert sorted(tmp_path.iterdir()) == sorted([folders[1], *own])
    assert (folders[1] / "states").read_bytes() == bytes(8)
    ranks[1].communicate()  # ends by itself, and without removing it
    remove_folders(os.getpid())
    assert list(tmp_path.iterdir()) == [folders[1]]
    own = [make_folder()]
    assert list(tmp_path.iterdir()) == own
    remove_folders(os.getpid())
