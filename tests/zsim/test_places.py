"""Places to write to: asked before a run, and never one of the files that are being read."""

import os

import pytest

from zsim import places
from zsim.places import PlaceError


def test_folders_that_are_not_there_are_made(tmp_path):
    target = tmp_path / "new" / "folder" / "run.json"
    places.require(target)
    places.write(target, "text")
    assert target.read_text() == "text"


def test_what_cannot_be_written_is_refused_before_the_run(tmp_path):
    with pytest.raises(PlaceError, match="expected a file that can be written, found a folder"):
        places.require(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(PlaceError, match="file, which is a file"):
        places.require(tmp_path / "file" / "below")
    with pytest.raises(PlaceError, match="expected a file that can be written"):
        places.write(tmp_path, b"")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PlaceError, match="a pipe, which may never be read"):
        places.require(tmp_path / "pipe")


def test_a_file_that_is_read_is_refused_under_any_name(tmp_path):
    read = tmp_path / "config.json"
    read.touch()
    (tmp_path / "link.json").symlink_to(read)
    for name in ("config.json", "link.json", "new/../config.json"):
        with pytest.raises(PlaceError, match="--save: expected a file of its own"):
            places.require(tmp_path / name, option="--save", apart_from=[tmp_path / "other", read])
    places.require(tmp_path / "run.json", apart_from=[read])


def test_two_results_need_two_files(tmp_path):
    with pytest.raises(PlaceError, match="which this command reads or writes as well"):
        places.require(tmp_path / "x", option="--trace", apart_from=[tmp_path / "." / "x"])
