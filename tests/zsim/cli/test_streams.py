"""Streams that go away: the exit code stays what it was, and nobody sees a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.folders import ROOT

FAILS = """
model = { preset = "mlp-tiny" }
batch = { micro_batch = 2 }
cluster = { preset = "cpu-gloo", ranks = 2 }
strategy = { name = "fsdp2", dp_shard = 2 }
[expect]
all_gathers = 99
"""


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`command` in bash with `zsim` as this Python's; the exit code is that of zsim, not of who
    reads from it."""
    zsim = (
        f'zsim() {{ "{sys.executable}" -m zsim "$@"; }}; set -o pipefail; cd "{folder}"; {command}'
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", "-c", zsim], capture_output=True, text=True, timeout=60, env=environment,
        check=False,
    )


@pytest.mark.parametrize(("command", "code"), [
    ("zsim run fails.toml --json | true", 1), ("zsim run nope.toml --json > /dev/full", 2),
    ("zsim run nope.toml 2> /dev/full", 2), ("zsim list models >&-", 0),
    ("zsim list models | head -1", 0), ("zsim list models > /dev/full", 2),
])
def test_who_stops_reading_loses_text_and_not_the_exit_code(
    tmp_path: Path, command: str, code: int
) -> None:
    (tmp_path / "fails.toml").write_text(FAILS)
    done = shell(command, tmp_path)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    "command", ["zsim run traced.toml", "zsim compare pipe pipe", "zsim run pipe"]
)
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(
    tmp_path: Path, command: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "traced.toml").write_text(FAILS.replace('preset = "mlp-tiny"', 'traced = "pipe"'))
    done = shell(command, tmp_path)
    assert done.returncode == 2
    assert "a pipe or a device" in done.stderr or "no such file" in done.stderr


def test_no_memory_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from zsim.cli import main
    from zsim.cli.commands.setup import listing

    def lacking(_: object) -> int:
        raise MemoryError

    monkeypatch.setattr(listing, "run", lacking)
    assert main.main(["list", "--json"]) == 2
    streams = capsys.readouterr()
    assert "expected enough memory, found none left" in streams.err
    assert '"exit_code": 2' in streams.out
