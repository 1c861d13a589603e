"""The cluster's own launcher: torchrun runs the worker on every rank, rank 0 saves a Run that the
simulator agrees with."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys

import pytest

from tests.support.folders import ROOT
from zreal.worker import LauncherError
from zreal.worker import main as main_of_worker
from zsim.errors import ZsimError

pytestmark = pytest.mark.gloo

SCENARIO = str(ROOT / "scenarios/parity/fsdp2-mlp-2.toml")


def worker(*arguments: str, ranks: int) -> subprocess.CompletedProcess[str]:
    """The worker under torchrun on `ranks` ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {
        "OMP_NUM_THREADS": "1"
    }
    command = [sys.executable, *launcher, "-m", "zreal.worker", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_another_number_of_ranks_than_the_scenarios_is_refused_by_each():
    done = worker(SCENARIO, "--save", "x.json", ranks=1)
    assert done.returncode == 1  # torchrun itself answers 1 for any failed rank
    assert "fsdp2-mlp-2: expected 2 ranks, as the scenario's mesh has, found 1" in done.stderr


def test_a_start_without_a_launcher_is_a_usage_error_that_names_one(monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["worker", SCENARIO, "--save", "x.json"])
    monkeypatch.setattr(os, "_exit", sys.exit)  # which would end pytest
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "zreal/worker.py"), run_name="__main__")
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert (
        "expected RANK and WORLD_SIZE, or the variables of srun or mpirun, found none" in said
    )
    assert "torchrun --nproc-per-node 2" in said


@pytest.mark.parametrize(("arguments", "message"), [
    (["nowhere.toml", "--save", "x.json"], "nowhere.toml: "),
    ([SCENARIO, "--save", "x.json", "--interpreter", "executor"],
     "interpreter: expected observer for fsdp2, found executor"),
])
def test_a_wrong_start_says_what_is_wrong(arguments, message):
    with pytest.raises(ZsimError) as error:
        main_of_worker(arguments)
    assert message in str(error.value)
    assert error.value.exit_code == 2


def test_a_port_that_is_none_is_refused(monkeypatch):
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "99999"
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LauncherError, match="MASTER_PORT: a number from 1 to 65535, found '99999'"):
        main_of_worker([SCENARIO, "--save", "x.json"])
