"""Places to write to: asked before a run, and never one of the files that are being read."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.folders import PARITY, ROOT
from zsim.cli.main import main
from zsim.io import files
from zsim.io.files import PlaceError

FSDP2 = str(PARITY / "fsdp2-mlp-2.toml")


def test_folders_that_are_not_there_are_made(tmp_path):
    target = tmp_path / "new" / "folder" / "run.json"
    files.require(target)
    files.write(target, "text")
    assert target.read_text() == "text"


def test_an_earlier_file_stays_whole_where_the_new_one_cannot_be(tmp_path, monkeypatch):
    target = tmp_path / "run.json"
    (tmp_path / "link.json").symlink_to(target)
    files.write(target, "first")
    files.write(tmp_path / "link.json", "second")
    assert target.read_text() == "second"
    assert (tmp_path / "link.json").is_symlink()

    def full(self, data):
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(PlaceError, match="No space left on device"):
        files.write(target, "third")
    assert target.read_text() == "second"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link.json", "run.json"]


def test_a_disk_without_room_is_told_in_bytes_and_keeps_no_half_file(tmp_path):
    """The limit on a file's size, in a process of its own, stands for a full disk."""
    target = tmp_path / "run.json"
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from zsim.io import files\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
        "try: files.write(Path(sys.argv[1]), 'x' * 5000)\n"
        "except files.PlaceError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(target)], capture_output=True, text=True, cwd=ROOT
    )
    assert f"{target}: expected room for 5,000 B, found File too large, " in done.stdout
    assert done.stdout.endswith(" B free; make room, or name another disk\n")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_refused_before_the_run(tmp_path):
    with pytest.raises(PlaceError, match="expected a file that can be written, found a folder"):
        files.require(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(PlaceError, match="file, which is a file"):
        files.require(tmp_path / "file" / "below")
    with pytest.raises(PlaceError, match="expected a file that can be written"):
        files.write(tmp_path, b"")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PlaceError, match="a pipe, which may never be read"):
        files.require(tmp_path / "pipe")


def test_a_file_that_is_read_is_refused_under_any_name(tmp_path):
    read = tmp_path / "config.json"
    read.touch()
    (tmp_path / "link.json").symlink_to(read)
    for name in ("config.json", "link.json", "new/../config.json"):
        with pytest.raises(PlaceError, match="--save: expected a file of its own"):
            files.require(tmp_path / name, option="--save", apart_from=[tmp_path / "other", read])
    files.require(tmp_path / "run.json", apart_from=[read])


@pytest.mark.parametrize("kind", sorted(files.BEGINNINGS))
def test_only_a_result_of_its_own_kind_is_replaced(tmp_path, kind):
    there = tmp_path / "there"
    there.write_bytes(files.BEGINNINGS[kind][0] + b"more")
    files.require(there, kind=kind)
    there.write_text("[project]\nname = 'mine'\n")
    with pytest.raises(PlaceError, match="which holds something else; name another"):
        files.require(there, option="--save", kind=kind)
    there.write_text("")
    files.require(there, kind=kind)


def test_every_kind_of_result_that_a_command_writes_has_its_first_bytes():
    texts = [path.read_text() for path in sorted((ROOT / "zsim").rglob("*.py"))]
    named = {kind for text in texts for kind in re.findall(r'kind="(an? [^"]+)"', text)}
    assert {"a report", "a snapshot"} <= named
    assert named <= set(files.BEGINNINGS)


def test_results_that_are_there_are_replaced_by_new_ones(tmp_path, capsys):
    names = {"--save": "run.json", "--trace": "trace.json.gz"}
    for _ in range(2):
        assert main([
            "run", FSDP2,
            *(
                word
                for option, name in names.items()
                for word in (option, str(tmp_path / name))
            ),
        ]) == 0
        assert main(["show", FSDP2, "--snapshot", str(tmp_path / "memory.pickle")]) == 0
    assert main(["run", FSDP2, "--trace", str(tmp_path / "run.json")]) == 2
    assert "--trace: expected a new file, or a trace to replace" in capsys.readouterr().err


def test_two_results_need_two_files(tmp_path):
    with pytest.raises(PlaceError, match="which this command reads or writes as well"):
        files.require(tmp_path / "x", option="--trace", apart_from=[tmp_path / "." / "x"])
