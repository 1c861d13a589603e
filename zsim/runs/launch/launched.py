"""A backend whose ranks a cluster's own launcher starts: a job step for each scenario.

The launcher's command has {worker} where each rank's command belongs, and {nodes}, {ranks} and
{ranks_per_node} for what the scenario's cluster has. Ranks write their results into a folder that
all nodes see. A scenario whose ranks are all there from an earlier run is not run again. It is
where numerics, torch or the source of the user's module are others now. The command "gather" starts
nothing: it joins what ranks that others started have written.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from string import Formatter
from typing import Any, cast

from zsim.errors import ArgumentError, RankError, listed
from zsim.io import files
from zsim.io.system.locks import alone_in
from zsim.io.system.signals import undisturbed
from zsim.ir.run import InterruptedRunError, RunRecord
from zsim.models.training_options import Device
from zsim.runs import registry
from zsim.runs.backend import (
    MOST_SECONDS,
    Capabilities,
    ModuleBackend,
    RunOptions,
    require_seconds,
)
from zsim.runs.launch import rank_results
from zsim.runs.launch.launched_failure import UNFINISHED, told_in
from zsim.runs.launch.launcher_guard import END_S, guarded
from zsim.runs.launch.stopped_processes import StoppedProcesses
from zsim.scenario.scenario import Scenario
from zsim.version import __version__

START_S = 120.0
"""Seconds that a launcher may take to start and to end its ranks, beyond the ranks' own limit. They
count from the first rank's start."""
POLL_S = 0.25
"""Seconds between two looks at the launcher."""
WORKER = "{worker}"
PLACES = ("nodes", "ranks", "ranks_per_node", "worker")
LOG = "launcher.log"
GATHER = "gather"
ASKED, MOST_ASKED = "asked.json", 10_000
"""The file of what a run was asked for beside its scenario, and the bytes of it that are read."""
ROOM = 2**16
"""Bytes that ranks' files and the log need at least."""


@dataclass(slots=True, kw_only=True)
class LaunchedBackend:
    """The backend `name` on ranks that the command `launch` starts.

    `folder`: results of each scenario, in a folder of its name. `queue_s`: seconds that a launcher
    may take until the first rank starts, as its job waits in a queue. ArgumentError for a command
    without {worker}, or with other names in braces.
    """

    name: str
    device: str
    launch: str
    folder: Path
    queue_s: float = MOST_SECONDS

    def __post_init__(self) -> None:
        if self.launch != GATHER:
            _tokens(self.launch, dict.fromkeys(PLACES[:-1], "1"))
        require_seconds(self.queue_s, where="--queue-timeout")

    def capabilities(self) -> Capabilities:
        """Capabilities of the backend, wherever its devices are."""
        return Capabilities(
            memory=True, numerics=True, time=False, spans=True, device=self.device
        )

    def with_module(
        self, scenario: Scenario, module: str, *, timeout_s: float, device: Device | None = None
    ) -> Scenario:
        """The scenario with the user's own module, traced here for the backend's device."""
        own = cast(ModuleBackend, registry.find(self.name))
        return own.with_module(scenario, module, timeout_s=timeout_s, device=device)

    def run(self, scenario: Scenario, *, options: RunOptions) -> RunRecord:
        """The Run of all ranks, or the one that is there already; IncompleteRunError with what
        ranks had ended where one failed."""
        own = self.folder / scenario.name
        if self.launch == GATHER:
            return rank_results.gather(own, scenario)
        wanted = {"backend": self.name, "zsim": __version__} | (
            {"interpreter": options.interpreter} if options.interpreter else {}
        ) | ({"module": options.module} if options.module else {})
        request, there = _asked(options), rank_results.finished(own, scenario, like=wanted)
        if there is not None:
            differing = _differing(own, request)
            if not differing:
                return replace(there, provenance=dict(there.provenance) | {"resumed": str(own)})
            options.progress(f"{scenario.name}: made anew, since {differing} was another before")
        with alone_in(own):
            return self._run_anew(scenario, own, request, options)

    def _run_anew(
        self, scenario: Scenario, own: Path, request: dict[str, str], options: RunOptions
    ) -> RunRecord:
        """The Run of ranks that the launcher starts now, whose results go to the folder `own`."""
        rank_results.forget(own)
        files.write(own / ASKED, json.dumps(request))
        text = scenario.with_(expect=None).to_toml()
        files.write(own / "scenario.toml", text)
        worker = _worker(scenario, own, options, device=self.device)
        try:
            ended = _launched(
                _tokens(self.launch, _numbers(scenario), worker), own,
                limit_s=options.timeout_s + START_S, queue_s=self.queue_s,
                tell=lambda text: options.progress(f"{scenario.name}: {text}"),
            )
        except KeyboardInterrupt as stop:
            raise InterruptedRunError(rank_results.there_is(own, scenario)) from stop
        try:
            return rank_results.gather(own, scenario)
        except RankError as error:
            error.remedy = "; ".join(filter(None, (ended, _hint(error, own), f"see {own / LOG}")))
            raise


def _asked(options: RunOptions) -> dict[str, str]:
    """Facts that decide a result beside the scenario: the numerics asked for, torch, and the source
    of the user's module."""
    request: dict[str, str] = {"numerics": options.numerics} if options.numerics else {}
    with suppress(PackageNotFoundError):
        request["torch"] = version("torch")
    module = sys.modules.get((options.module or "").partition(":")[0])
    file: str | None = getattr(module, "__file__", None)
    if file:
        with suppress(OSError):
            request["module's source"] = sha256(Path(file).read_bytes()).hexdigest()[:12]
    return request


def _differing(own: Path, request: Mapping[str, str]) -> str:
    """The names of what is asked for and was not when the results in `own` were made."""
    try:
        before = json.loads((own / ASKED).read_bytes()[:MOST_ASKED])
    except (OSError, ValueError, RecursionError):
        before = None
    earlier = before if isinstance(before, dict) else {}
    return " and ".join(key for key, value in request.items() if earlier.get(key) != value)


def _hint(error: RankError, own: Path) -> str:
    """Words of the disk or the launcher's log on ranks that told nothing; "" for none."""
    free = files.free_nbytes(own)
    if free is not None and free < ROOM:
        return f"the disk of {own} is full, {free:,} B free"
    silent = UNFINISHED in error.found or error.found == "none"
    line = told_in(own / LOG) if silent else ""
    return f"its log: {line}" if line else ""


def _worker(
    scenario: Scenario, own: Path, options: RunOptions, *, device: str
) -> tuple[str, ...]:
    """The command of each rank, as words."""
    folder = Path(scenario.folder or ".").resolve()
    chosen = {
        "--interpreter": options.interpreter, "--numerics": options.numerics,
        "--module": options.module,
        "--timeout": f"{options.timeout_s:g}",
    }
    return (
        sys.executable, "-m", "zreal.worker", str((own / "scenario.toml").resolve()),
        "--results", str(own.resolve()), "--folder", str(folder), "--name", scenario.name,
        "--device", device,
        *(word for key, value in chosen.items() if value is not None for word in (key, value)),
    )


def _numbers(scenario: Scenario) -> dict[str, str]:
    cluster = scenario.cluster
    per_node = min(cluster.devices_per_node, cluster.num_ranks)
    return {
        "nodes": str(-(-cluster.num_ranks // per_node)), "ranks": str(cluster.num_ranks),
        "ranks_per_node": str(per_node),
    }


def _tokens(
    launch: str, numbers: dict[str, str], worker: Sequence[str] = ()
) -> list[str]:
    """The launcher's command as words, {worker} being several; ArgumentError for another one."""
    remedy = "as 'srun -N {nodes} --ntasks-per-node {ranks_per_node} {worker}'"
    try:
        parts = shlex.split(launch)
        fields = [field for word in parts for field in Formatter().parse(word)]
    except ValueError as error:
        raise ArgumentError(
            where="--launch", expected="a command", found=str(error), remedy=remedy
        ) from None
    names = [f"{name}{'!' if kind else ''}{kind or ''}{':' if form else ''}{form}"
             for _, name, form, kind in fields if name is not None]
    if unknown := [name for name in names if name not in PLACES]:
        raise ArgumentError(
            where="--launch", expected=f"{listed(f'{{{name}}}' for name in PLACES)} in braces",
            found=f"{{{unknown[0][:40]}}}", remedy=f"{remedy}; {{{{ and }}}} are literal braces",
        )
    if WORKER not in parts:
        raise ArgumentError(
            where="--launch", expected="{worker} as a word of its own", found=launch[:80],
            remedy=remedy,
        )
    first = parts.index(WORKER)
    before, after = parts[:first], parts[first + 1 :]
    fill: dict[str, Any] = {**numbers, "worker": shlex.join(worker)}
    return [
        *(word.format(**fill) for word in before), *worker, *(word.format(**fill) for word in after)
    ]


def _launched(
    command: Sequence[str], own: Path, *, limit_s: float, queue_s: float,
    tell: Callable[[str], None],
) -> str:
    """The end of the launcher as text, whose output goes to a log in `own`.

    It is ended with all that it started, at `queue_s` before the first rank starts or at `limit_s`
    after that.
    """
    with (own / LOG).open("wb") as output, ExitStack() as stack:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ArgumentError(
                where="--launch", expected="a launcher that can be started",
                found=f"{command[0]}: {error.strerror}", remedy="install it, or give its path",
            ) from None
        stack.enter_context(guarded(process.pid))
        stopped = StoppedProcesses(process.pid)
        try:
            reason = _watched(process, stopped, own, limit_s=limit_s, queue_s=queue_s, tell=tell)
        except BaseException:
            with undisturbed():
                _end(process, stopped)
            raise
        if reason:
            _end(process, stopped)
    reason = reason or f"the launcher ended with code {process.returncode}"
    return "; ".join(filter(None, (str(stopped), reason)))


def _watched(
    process: subprocess.Popen[bytes], stopped: StoppedProcesses, own: Path, *, limit_s: float,
    queue_s: float, tell: Callable[[str], None],
) -> str:
    """The limit that the launcher has reached, as text; "" once it has ended by itself."""
    begin, started_at = time.monotonic(), 0.0
    while True:
        try:
            process.wait(timeout=POLL_S)
            return ""
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        stopped.end()
        if not started_at and rank_results.has_started(own):
            started_at = now
        if not started_at:
            tell(f"no rank has started yet, {now - begin:.0f} s")
            if now - begin > queue_s:
                return (
                    f"the launcher was ended after {queue_s:g} s in which no rank had started "
                    f"(--queue-timeout)"
                )
        elif now - started_at > limit_s:
            return (
                f"the launcher was ended {limit_s:g} s after the first rank had started, "
                f"--timeout and {START_S:g} s"
            )


def _end(process: subprocess.Popen[bytes], stopped: StoppedProcesses) -> None:
    """End the launcher and all that it started."""
    process.terminate()  # launchers pass SIGTERM on to their ranks
    limit = time.monotonic() + END_S
    while time.monotonic() < limit:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=POLL_S)
            break
        stopped.end()
    with suppress(ProcessLookupError):  # it has left none
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
