"""`zsim validate --launch` on two nodes with two ranks each, by torchrun over a testbed: agreement,
a rank that is killed, and one that hangs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.folders import PARITY, ROOT
from zreal.testbed.network import network
from zsim.cli.main import main
from zsim.cluster.testbed import layout
from zsim.errors import BackendUnavailableError
from zsim.runs import saved

pytestmark = pytest.mark.gloo

SCENARIO = "zero3-mlp-4"
TWO_NODES = f"{sys.executable} {ROOT / 'tests/support/launchers/two_nodes.py'} 2"
FAULT = """
import os, signal, subprocess, sys, time
rank = subprocess.Popen(sys.argv[3:])
if os.environ["RANK"] == "3":
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.001)
    rank.send_signal(int(sys.argv[2]))
signal.signal(signal.SIGTERM, lambda number, frame: (rank.terminate(), rank.send_signal(18)))
sys.exit(rank.wait() and 1)
"""
"""A rank in a parent, which sends rank 3 a signal once its first phase is in its file."""


@pytest.fixture(scope="module", autouse=True)
def _allowed() -> None:
    try:
        with network(layout("2x1gbit")):
            pass
    except BackendUnavailableError as error:
        pytest.skip(str(error))


def validated(folder: Path, *more: str, fault: int | None = None) -> int:
    """The exit code of `zsim validate --launch`; `fault` is the signal that rank 3 gets."""
    worker = "{worker}"
    if fault is not None:
        parent = folder / "parent.py"
        parent.write_text(FAULT)
        first = folder / SCENARIO / "rank-3.json"
        worker = f"{sys.executable} {parent} {first} {fault} {{worker}}"
    return main([
        "validate", str(PARITY / f"{SCENARIO}.toml"), "--launch", f"{TWO_NODES} {worker}",
        "--save", str(folder), *more,
    ])


@pytest.mark.slow  # test_examples.py has two nodes, beside one another on this machine
def test_ranks_on_two_nodes_agree_with_the_simulator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, printed = validated(tmp_path), capsys.readouterr()
    # both nodes share this machine's cores, of which assumed constants know nothing
    agreed, differs = "agrees in order, bytes, memory and numerics", "DIFFERS: step time\n"
    verdict = agreed if ended == 0 else differs
    assert verdict in printed.out, printed.err
    run = saved.load(tmp_path / f"{SCENARIO}.measured.json")
    told = {key: run.provenance[key] for key in ("launcher", "nodes")}
    assert (told, run.world_size) == ({"launcher": "torchrun", "nodes": "2"}, 4)


@pytest.mark.slow  # test_launched.py has it on one node
def test_a_rank_killed_on_the_second_node_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validated(tmp_path, fault=9) == 1
    error = capsys.readouterr().err
    assert "rank 3: expected every rank to finish, found no end, and" in error
    assert "marked incomplete" in error


@pytest.mark.slow
def test_a_rank_stopped_on_the_second_node_holds_the_others_up_to_the_limit_and_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validated(tmp_path, "--timeout", "30", fault=19) == 1
    error = capsys.readouterr().err
    log = (tmp_path / SCENARIO / "launcher.log").read_text()
    assert "no end within 30 s: a hang, last collective: " in log
    assert "a hang, last collective: " in error
    assert "marked incomplete" in error
