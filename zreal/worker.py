"""Command line of a rank under a cluster's launcher: torchrun, srun, mpirun.

`torchrun --nproc-per-node 8 -m zreal.worker SCENARIO --save RUN.json` runs the scenario on every
rank that torchrun started; rank 0 saves the Run. With `--results FOLDER` each rank writes a file of
its own, also when it fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from zsim.errors import ScenarioError, ZsimError, visible
from zsim.io import files
from zsim.ir.gc_pause import uncollected
from zsim.ir.run import RankRun, RunRecord
from zsim.models.training_options import Device
from zsim.runs import fault_support, saved
from zsim.runs.backend import MOST_SECONDS
from zsim.runs.launch import rank_results
from zsim.runs.launch.launched_failure import BEFORE, LAST, OUTSIDE, SEPARATOR
from zsim.runs.launch.planned_collectives import number_of
from zsim.runs.modes import NUMERICS_MODES
from zsim.scenario.scenario import Scenario, load, parse
from zsim.version import __version__

with uncollected():  # which would take a fifth of the time
    import torch
    import torch.distributed as dist

    from zreal.cluster import last_words
    from zreal.cluster.launcher import LaunchedRank, LauncherError, launched_rank
    from zreal.cluster.meeting import meet, store_of
    from zreal.processes.host_memory import require_device_memory
    from zreal.processes.progress import KEPT
    from zreal.processes.rank_device import present_nbytes, start_group, take_device
    from zreal.processes.rank_settings import settle
    from zreal.processes.rank_status import BUILDING, MOVES_OF_A_RUN, NO_COLLECTIVE, RECENT_S
    from zreal.processes.reports.error_line import error_line
    from zreal.processes.reports.stacks import main_frame
    from zreal.rank.choice import NumericsChoice, choose_numerics
    from zreal.rank.run import (
        RENDEZVOUS_S,
        c10d_backend,
        interpreter_of,
        provenance,
        run_rank,
        slowest_step_time,
    )
    from zreal.tracing.own_scenario import with_module

SHARE_OF_MEETING = 0.5
"""Most of the timeout that ranks may take to meet, so that those missing are named before it."""


@dataclass(slots=True)
class WorkerRun:
    """The run of this rank: its scenario, where it stands, and the file of its result."""

    scenario: Scenario
    launched: LaunchedRank
    device: Device
    interpreter: str
    results: Path | None
    choice: NumericsChoice = field(default_factory=lambda: NumericsChoice(mode="none"))
    recent: deque[str] = field(default_factory=partial(deque, [NO_COLLECTIVE], maxlen=KEPT))
    """The collectives that it has entered lately."""
    moved_at: float = 0.0
    so_far: RankRun | None = None
    has_failed: bool = False
    """True once an error is on its way out: the code is then anywhere, and hangs nowhere."""

    @property
    def text(self) -> str:
        """The run as text, the same on all its ranks and another where results go elsewhere."""
        return str(self.results or "")

    def write(self, *, failure: str = "", outside: str = "") -> None:
        """Write this rank's result so far, which is complete once it has a step time.

        `failure`: the reason of its end, `outside`: its place in the code, unless that is torch's.
        """
        if self.results is None:
            return
        own = self.so_far or RankRun(rank=self.launched.rank, phases={})
        run = self.record((own,))
        *before, last = self.recent
        end = {LAST: last, BEFORE: SEPARATOR.join(before)} if failure else {}
        end |= {OUTSIDE: outside} if outside else {}
        complete = own.step_time_ns is not None and not failure
        with _WRITING:
            rank_results.write(
                self.results, replace(
                    run, complete=complete, failure=failure, provenance={**run.provenance, **end}
                )
            )

    def keep(self, own: RankRun) -> None:
        """Note and write the phases that have ended."""
        self.so_far = own
        self.write()

    def note(self, collective: str) -> None:
        """Note the collective that this rank enters."""
        self.recent.append(collective)
        self.moved_at = time.monotonic()

    def gets_on(self) -> bool:
        """True where this rank is past its first collectives, and entered another a moment ago."""
        is_recent = time.monotonic() - self.moved_at < RECENT_S
        return number_of(self.recent[-1]) >= MOVES_OF_A_RUN and is_recent

    def record(self, ranks: tuple[RankRun, ...]) -> RunRecord:
        """The Run of some ranks of this world."""
        step_time_ns, method = slowest_step_time(ranks)
        per_node, launched = self.launched.local_world_size, self.launched
        return RunRecord(
            scenario=self.scenario.name, backend="nccl" if self.device == "cuda" else "gloo",
            interpreter=self.interpreter, world_size=self.scenario.world_size,
            mesh=self.scenario.mesh, ranks=ranks, step_time_ns=step_time_ns,
            provenance=provenance(self.scenario, device=self.device) | method
            | self.choice.provenance
            | {"sees": "memory numerics", "launcher": launched.launcher, "zsim": __version__,
               "nodes": str(-(-launched.world_size // per_node))},
        )


_WRITING = threading.Lock()
"""Held while a result is written, since last words may interrupt."""


def main(arguments: list[str] | None = None) -> int:
    """Run a scenario on every rank that a launcher started."""
    options = _parser().parse_args(arguments)
    if options.save is None and options.results is None:
        raise LauncherError(
            where="zreal.worker", expected="--save FILE or --results FOLDER", found="neither"
        )
    scenario = _scenario(options)
    fault_support.require(scenario, (), backend="zreal.worker")
    interpreter = interpreter_of(scenario, options.interpreter)
    launched = launched_rank(os.environ)
    if options.results is not None:
        rank_results.mark_started(options.results, rank=launched.rank)
    device = _device(options.device)
    if device == "cpu":
        settle()
    _require_fit(scenario, launched, device=device)
    if options.save is not None:
        files.require(options.save, kind="a Run")
    run = WorkerRun(scenario, launched, device, interpreter, options.results)
    last_words.end_with_torchrun()
    last_words.start(
        options.timeout, last_collective=lambda: run.recent[-1],
        gets_on=run.gets_on, say=lambda reason: _say(run, reason),
    )
    try:
        own = _trained(run, options)
    except BaseException as error:
        run.has_failed = True
        with suppress(files.PlaceError):  # the error may be of a full disk
            run.write(failure=_first_line(error))
        raise
    run.keep(own)
    if options.save is not None:
        _save(run, own, options.save)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zreal.worker", description=main.__doc__)
    parser.add_argument("scenario")
    parser.add_argument("--save", type=Path, help="rank 0 writes the Run of all ranks")
    parser.add_argument("--results", type=Path, help="each rank writes its own into this folder")
    parser.add_argument("--folder", type=Path, help="the folder of the files that it names")
    parser.add_argument("--name", help="the scenario's name, if not its file's")
    parser.add_argument("--interpreter", choices=("observer", "executor"))
    parser.add_argument("--numerics", choices=NUMERICS_MODES)
    parser.add_argument(
        "--module", metavar="PACKAGE.MODULE:FUNCTION", help="your own module, in place of the model"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one")
    parser.add_argument("--timeout", type=_seconds, default=120.0, metavar="S")
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MOST_SECONDS:
        expected = f"seconds up to {MOST_SECONDS}"
        raise argparse.ArgumentTypeError(f"expected {expected}, found {text[:40]!r}")
    return seconds


def _scenario(options: argparse.Namespace) -> Scenario:
    if options.folder is None and options.name is None:
        return load(options.scenario)
    path = Path(options.scenario)
    name = f"{options.name or path.stem}.toml"
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ScenarioError((f"{path}: cannot be read: {error.strerror}",)) from None
    return parse(text, where=name, folder=options.folder or path.parent)


def _device(choice: Device | None) -> Device:
    if choice == "cuda" and not torch.cuda.is_available():
        raise LauncherError(
            where="zreal.worker", expected="a CUDA device (--device cuda)", found="none",
            remedy="leave --device out, or take --device cpu",
        )
    return choice or ("cuda" if torch.cuda.is_available() else "cpu")


def _require_fit(scenario: Scenario, launched: LaunchedRank, *, device: Device) -> None:
    """LauncherError where the launcher started another number of ranks than the scenario has, or
    of other ranks on a node than its GPUs."""
    if launched.world_size != scenario.world_size:
        raise LauncherError(
            where=scenario.name, found=str(launched.world_size),
            expected=f"{scenario.world_size} ranks, as the scenario's mesh has",
            remedy="start as many, or change the mesh",
        )
    cluster, per_node = scenario.cluster, launched.local_world_size
    expected = min(cluster.devices_per_node, cluster.num_ranks)
    whole = cluster.num_ranks % expected == 0
    if device == "cuda" and cluster.kind == "cuda" and whole and per_node != expected:
        raise LauncherError(
            where=scenario.name, found=f"{per_node} by {launched.launcher}",
            expected=f"{expected} ranks on a node, as its cluster {cluster.name} has",
            remedy="start as many on each node, or name the cluster that it runs on",
        )


def _trained(run: WorkerRun, options: argparse.Namespace) -> RankRun:
    """Meet the other ranks, then train; returns this rank's record."""
    launched, device = run.launched, run.device
    deadline = time.monotonic() + options.timeout
    own = take_device(device, local_rank=launched.local_rank)
    patience_s = min(RENDEZVOUS_S, SHARE_OF_MEETING * options.timeout)
    if options.module:
        run.note(f"{BUILDING} {options.module}")
        try:
            run.scenario = with_module(run.scenario, options.module, device=device)
        except Exception as error:
            _tell_others(run, error, timeout_s=patience_s)
            raise
        run.note(NO_COLLECTIVE)
    scenario = run.scenario
    if device == "cuda":
        require_device_memory(scenario, backend="nccl", present_nbytes=present_nbytes(own))
    wanted = choose_numerics(
        scenario, requested=options.numerics, backend="zreal.worker", device=device,
        processes=launched.local_world_size, timeout_s=options.timeout,
    )
    store = store_of(launched, run.text, timeout_s=patience_s)
    claims = {
        "fingerprint of scenario and module": scenario.fingerprint, "interpreter": run.interpreter,
        "device": device, "version of zsim": __version__, "version of torch": torch.__version__,
    }
    wishes = meet(
        store, launched, claims, f"{wanted.mode}: {wanted.reason}", timeout_s=patience_s
    )
    run.choice = _least(wishes)
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()) + RENDEZVOUS_S)
    start_group(
        c10d_backend(scenario, device), store=store, rank=launched.rank,
        world_size=launched.world_size, device=own, timeout=left,
    )
    return run_rank(
        scenario, rank=launched.rank, interpreter=run.interpreter, device=device,
        numerics=run.choice.mode, progress=run.note, keep=run.keep,
    )


def _tell_others(run: WorkerRun, error: Exception, *, timeout_s: float) -> None:
    """Have the other ranks, which wait for this one, end with the reason that it has."""
    run.write(failure=_first_line(error))
    with suppress(ZsimError):  # its own error says more
        store = store_of(run.launched, run.text, timeout_s=timeout_s)
        meet(store, run.launched, {}, "", timeout_s=timeout_s, failure=_first_line(error))


def _least(wishes: list[str]) -> NumericsChoice:
    """The numerics for which every rank's machine has room."""
    choices = [wish.partition(": ") for wish in wishes]
    mode = max(NUMERICS_MODES, key=lambda mode: any(each == mode for each, _, _ in choices) * (
        1 + NUMERICS_MODES.index(mode)
    ))
    return NumericsChoice(mode=mode, reason=next(why for each, _, why in choices if each == mode))


def _save(run: WorkerRun, own: RankRun, path: Path) -> None:
    """Gather the records of all ranks on rank 0, which saves the Run."""
    tables: list[Any] = [None] * run.scenario.world_size
    dist.all_gather_object(tables, saved.as_table(own))
    if run.launched.rank == 0:
        saved.save(run.record(tuple(saved.from_table(RankRun, table) for table in tables)), path)


def _say(run: WorkerRun, reason: str) -> None:
    sys.stderr.write(f"zreal.worker: rank {run.launched.rank}: {reason}\n")
    frame = main_frame()
    run.write(failure=reason, outside="" if run.has_failed or frame.waits else str(frame))


def _first_line(error: BaseException) -> str:
    text = error_line(str(error))[:400]
    if isinstance(error, ZsimError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    raised_at = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{raised_at}"


def run_command(command: Callable[[], int]) -> int:
    """The exit code of `command`, however it ends; errors of ours are printed as one line."""
    try:
        return command()
    except ZsimError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.write(f"{visible(error.details)}\n" if error.details else "")
        return error.exit_code
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    code = run_command(main)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Python's own exit takes seconds, or ends with SIGABRT, as gloo's threads run
