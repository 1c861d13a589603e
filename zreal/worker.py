"""Command line of a rank under a cluster's launcher.

`torchrun --nproc-per-node 8 -m zreal.worker SCENARIO --save RUN.json` runs the scenario on every
rank that torchrun started; rank 0 saves the Run.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zreal.numerics_choice import choose_numerics
from zreal.rank_run import c10d_backend, interpreter_of, provenance, run_rank, slowest_step_time
from zsim.errors import ZsimError
from zsim.io import files
from zsim.ir.run import RankRun, RunRecord
from zsim.models.training_options import Device
from zsim.runs import saved
from zsim.runs.numerics_mode import NUMERICS_MODES
from zsim.scenario.scenario import Scenario, load


class LauncherError(ZsimError):
    """No launcher started this process, or it started another number of ranks."""


def main(arguments: list[str] | None = None) -> int:
    """Run a scenario on every rank that torchrun started; rank 0 saves the Run."""
    parser = argparse.ArgumentParser(prog="zreal.worker", description=main.__doc__)
    parser.add_argument("scenario")
    parser.add_argument("--save", required=True, type=Path)
    parser.add_argument("--interpreter", choices=("observer", "executor"))
    parser.add_argument("--numerics", choices=NUMERICS_MODES)
    parser.add_argument("--timeout", type=float, default=120.0)
    options = parser.parse_args(arguments)
    scenario = load(options.scenario)
    interpreter = interpreter_of(scenario, options.interpreter)
    rank = _launched_as(scenario)
    files.require(options.save, kind="a Run")
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(c10d_backend(scenario, device))
    choice = choose_numerics(
        scenario,
        asked=options.numerics,
        backend="zreal.worker",
        timeout_s=options.timeout,
        processes=int(os.environ.get("LOCAL_WORLD_SIZE", scenario.world_size)),
        device=device,
    )
    choices: list[Any] = [None] * scenario.world_size
    dist.all_gather_object(choices, choice)
    choice = max(choices, key=lambda each: NUMERICS_MODES.index(each.mode))
    own = run_rank(
        scenario, rank=rank, interpreter=interpreter, device=device, numerics=choice.mode
    )
    tables: list[Any] = [None] * scenario.world_size
    dist.all_gather_object(tables, saved.as_table(own))
    if rank == 0:
        ranks = tuple(saved.from_table(RankRun, table) for table in tables)
        run = _run_of(scenario, ranks, interpreter=interpreter, device=device)
        saved.save(replace(run, provenance=dict(run.provenance) | choice.provenance), options.save)
    dist.destroy_process_group()
    return 0


def _run_of(
    scenario: Scenario, ranks: tuple[RankRun, ...], *, interpreter: str, device: Device
) -> RunRecord:
    step_time_ns, method = slowest_step_time(ranks)
    return RunRecord(
        scenario=scenario.name, backend="nccl" if device == "cuda" else "gloo",
        interpreter=interpreter, world_size=scenario.world_size, mesh=scenario.mesh, ranks=ranks,
        step_time_ns=step_time_ns,
        provenance=provenance(scenario, device=device) | method | {"sees": "memory numerics"},
    )


def _launched_as(scenario: Scenario) -> int:
    """The rank that the launcher gave this process; LauncherError without a launcher, or where it
    started another number of ranks."""
    world_size = os.environ.get("WORLD_SIZE")
    numbers = ("WORLD_SIZE", "RANK", "MASTER_PORT")
    is_launched = (
        all(os.environ.get(name, "").isdecimal() for name in numbers)
        and "MASTER_ADDR" in os.environ
    )
    if world_size is None or not is_launched or not 0 < int(os.environ["MASTER_PORT"]) < 2**16:
        remedy = (
            f"torchrun --nproc-per-node {scenario.world_size} -m zreal.worker SCENARIO --save "
            f"RUN.json"
        )
        expected = "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from a launcher"
        raise LauncherError(where="zreal.worker", expected=expected, found="none", remedy=remedy)
    if int(world_size) != scenario.world_size:
        raise LauncherError(
            where=scenario.name, found=world_size,
            expected=f"{scenario.world_size} ranks, as the scenario's mesh has",
            remedy="start as many, or change the mesh",
        )
    rank = int(os.environ["RANK"])
    if rank >= scenario.world_size:
        raise LauncherError(
            where="zreal.worker", expected=f"a RANK below {scenario.world_size}", found=str(rank)
        )
    return rank


if __name__ == "__main__":
    try:
        code = main()
    except ZsimError as error:
        sys.stderr.write(f"{error}\n")
        code = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Python's own exit ends with SIGABRT while a thread of gloo still runs
