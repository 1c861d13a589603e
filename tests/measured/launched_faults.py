"""Faults of ranks that torchrun starts, and of what lies around ranks: the port, the disk, and the
controller of either launcher. Rows are those of tests.measured.faults."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.faulty.faults import Fault
from tests.support.folders import PARITY, ROOT
from zsim.errors import RankError
from zsim.ir.run import IncompleteRunError
from zsim.runs import saved
from zsim.runs.backend import RunOptions
from zsim.runs.launch.launched import LaunchedBackend
from zsim.scenario.scenario import Scenario

TORCHRUN = f"{sys.executable} -m torch.distributed.run --no-python --nproc-per-node {{ranks}}"
MARK = "ZSIM_FAULT_OF"
"""Environment variable by which processes of a run are found."""
GONE_S = 30.0
"""Longest wait for processes of a run that is over: a fork server ends by Python's own exit."""
LONG = "steps = 400"
"""Steps that are not over when the controller's signal comes."""
CONTROLLERS = {"controller SIGTERM": signal.SIGTERM, "controller SIGKILL": signal.SIGKILL}
LAUNCHERS = ("forkserver", "torchrun")


def fail_launched(
    scenario: Scenario, fault: Fault, *, folder: Path, limit_s: float, port: int | None = None
) -> dict[str, Any]:
    """The row of one run of `scenario` by torchrun with `fault`; `port` is torchrun's, else free.
    """
    folder.mkdir(parents=True)
    told, stamp = folder / "fault.json", folder / "moment"
    told.write_text(json.dumps(replace(fault, stamp=str(stamp)).table()))
    where = "--standalone" if port is None else f"--master-port {port}"
    rank = f"{sys.executable} -m tests.support.faulty.faulty_worker {told} {{worker}}"
    backend = LaunchedBackend(
        name="gloo", device="cpu", folder=folder, launch=f"{TORCHRUN} {where} {rank}"
    )
    error: RankError | None = None
    with _marked(str(folder)):
        began = time.time()
        try:
            backend.run(scenario, options=RunOptions(timeout_s=limit_s, numerics="none"))
        except RankError as caught:
            error = caught
        ended = time.time()
    failed = float(stamp.read_text()) if stamp.is_file() and stamp.read_text() else None
    row: dict[str, Any] = {
        "launcher": "torchrun", "scenario": scenario.name, "kind": fault.kind,
        "ranks": scenario.world_size, "rank": fault.rank, "at": fault.at,
        "blamed": error.where if error else "",
        "right": bool(error) and error.where == f"rank {fault.rank}",
        "verdict_s": None if failed is None else round(ended - failed, 2),
        "at_the_limit": failed is not None and ended - failed >= limit_s - START_OF_RANKS_S,
        "wall_s": round(ended - began, 2), "left": len(left_of(str(folder))),
    }
    if error is not None:
        row["found"] = f"{error.found}; {error.remedy}".replace(str(folder), "FOLDER")
    if isinstance(error, IncompleteRunError):
        row["kept"] = [sorted(rank.phases) for rank in error.run.ranks]
        row["marked"] = not error.run.complete
    return row


START_OF_RANKS_S = 8.0
"""Most seconds between a rank's start, when its limit begins, and its fault."""


def port_taken(scenario: Scenario, *, folder: Path, limit_s: float) -> dict[str, Any]:
    """The row of a run by torchrun at a port at which another process listens."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        nobody = Fault(kind="port taken", rank=scenario.world_size)
        row = fail_launched(scenario, nobody, folder=folder, limit_s=limit_s, port=port)
    row["right"] = "address already in use" in row["found"] and str(port) in row["found"]
    return row | {"rank": None, "verdict_s": row["wall_s"]}


def full_disk_of_the_controller(name: str, *, folder: Path) -> dict[str, Any]:
    """The row of `zsim validate --save` whose files may have 16 KiB each.

    That is less than a Run's, and more than the memory that ranks share with it, a file too.
    """
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (16_384, 16_384))
    command = _command(PARITY / f"{name}.toml", folder / "results", "forkserver")
    began = time.time()
    done = subprocess.run(
        command, cwd=ROOT, env=_environment(folder), capture_output=True, text=True,
        preexec_fn=limit,
    )
    target = folder / "results" / f"{name}.predicted.json"
    files = [file for file in folder.rglob("*") if file.is_file()]
    said = done.stderr.strip().splitlines()[-1]
    return {
        "launcher": "forkserver", "scenario": name, "kind": "full disk",
        "ranks": int(name.rpartition("-")[2]), "rank": None, "exit": done.returncode,
        "blamed": str(target).replace(str(folder), "FOLDER"),
        "right": str(target) in said and " B, found File too large" in said,
        "verdict_s": None, "at_the_limit": False,
        "wall_s": round(time.time() - began, 2), "left": len(left_of(str(folder))),
        "found": said.replace(str(folder), "FOLDER"), "half_files": len(files),
        "kept": ["the verdict"] if "agrees in order, bytes" in done.stdout else [],
        "marked": not files,
    }


def controller_ended(name: str, kind: str, launcher: str, *, folder: Path) -> dict[str, Any]:
    """The row of a `zsim validate` that a signal ends while its ranks train."""
    folder.mkdir(parents=True)
    scenario, results = folder / "long.toml", folder / "results"
    scenario.write_text((PARITY / f"{name}.toml").read_text().replace("steps = 3", LONG))
    ranks = int(name.rpartition("-")[2])
    with (folder / "error").open("w") as errors:
        controller = subprocess.Popen(
            _command(scenario, results, launcher), cwd=ROOT, env=_environment(folder),
            stdout=subprocess.DEVNULL, stderr=errors,
        )
    _wait_for_ranks(ranks, folder, results, launcher)
    sent = time.time()
    controller.send_signal(CONTROLLERS[kind])
    controller.wait()
    ended, error = time.time(), (folder / "error").read_text()
    while (left := left_of(str(folder))) and time.time() - ended < GONE_S:
        time.sleep(0.05)
    gone, measured = time.time(), results / "long.measured.json"
    kept = [measured] if measured.is_file() else sorted(results.glob("long/rank-*.json"))
    runs = [saved.load(file) for file in kept]
    said = "ended by SIGTERM" in error if kind == "controller SIGTERM" else not error.strip()
    return {
        "launcher": launcher, "scenario": name, "kind": kind, "ranks": ranks, "rank": None,
        "exit": controller.returncode, "blamed": error.strip().splitlines()[-1] if error else "",
        "right": said, "verdict_s": round(ended - sent, 2), "at_the_limit": False,
        "gone_s": round(gone - sent, 2), "left": len(left),
        "kept": [sorted(rank.phases) for run in runs for rank in run.ranks],
        "marked": all(not run.complete for run in runs),
    }


def _command(scenario: Path, results: Path, launcher: str) -> list[str]:
    launch = ["--launch", f"{TORCHRUN} --standalone {{worker}}"] if launcher == "torchrun" else []
    return [
        sys.executable, "-m", "zsim", "validate", str(scenario), "--numerics", "none", "--save",
        str(results), *launch,
    ]


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, MARK: str(folder), "ZSIM_NO_CALIBRATE": "1", "PYTHONPATH": str(ROOT)}


def _wait_for_ranks(ranks: int, folder: Path, results: Path, launcher: str) -> None:
    """Return once all ranks are at work: by their files, or a while after their processes."""
    while launcher == "torchrun" and len(list(results.glob("long/rank-*.json"))) < ranks:
        time.sleep(0.05)
    servers = 3  # the controller, its fork server and its tracker of resources
    while launcher == "forkserver" and len(left_of(str(folder))) < ranks + servers:
        time.sleep(0.05)
    time.sleep(2.0)


@contextmanager
def _marked(text: str) -> Iterator[None]:
    """Context manager whose new processes, and theirs, have a mark."""
    os.environ[MARK] = text
    try:
        yield
    finally:
        del os.environ[MARK]


def left_of(mark: str) -> list[int]:
    """Processes that run with this mark, but for the present one."""
    marked = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in environment and folder.name != str(os.getpid()):
            marked.append(int(folder.name))
    return marked
