"""Backends by name, found through the entry-point group `zsim.backends`; and the simulator, which
is one of them.

Anybody's package can add a backend. Listing them imports none of them, and so no torch.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from importlib.metadata import EntryPoint, entry_points
from typing import get_args

from zsim.errors import BackendUnavailableError, ZsimError, listed
from zsim.io.arguments import described
from zsim.io.system.raising import is_users, raising_frame
from zsim.ir.program import PHASES
from zsim.ir.run import RunRecord
from zsim.models.training_options import Device
from zsim.runs import saved
from zsim.runs.backend import Backend, Capabilities, RunOptions
from zsim.runs.simulator import SimBackend
from zsim.scenario.scenario import Scenario

__all__ = [
    "BackendError", "SimBackend", "UnknownBackendError", "ask", "capabilities", "find", "names"
]

GROUP = "zsim.backends"
DEFECT = "a defect; please report it"
YOURS = f"{DEFECT}, unless it is of that line"
BUILT_IN = EntryPoint(name="sim", value="zsim.runs.registry:SimBackend", group=GROUP)


class UnknownBackendError(ZsimError):
    """A backend's name that no installed package offers."""


class BackendError(ZsimError):
    """A backend that broke down in a way of its own, or that answers what no backend may."""

    exit_code = 1


def names() -> dict[str, str]:
    """Every backend's name and where it comes from, as "package.module:Class". Imports none of
    them."""
    return {name: entry.value for name, entry in sorted(_entries().items())}


def find(name: str, *, where: str = "backend") -> Backend:
    """The backend called `name`; UnknownBackendError for no such name, BackendUnavailableError when
    not importable. Messages name the argument `where`."""
    # other packages take 5 ms to be looked through
    entries = {name: BUILT_IN} if name == BUILT_IN.name else _entries()
    if not isinstance(name, str) or name not in entries:
        near = difflib.get_close_matches(str(name), entries, n=1)
        remedy = (
            f"did you mean {near[0]}?"
            if near
            else "`zsim list backends` names those that are installed"
        )
        expected = listed(sorted(entries))
        raise UnknownBackendError(
            where=where, expected=expected, found=described(name), remedy=remedy
        )
    entry = entries[name]
    try:
        with _on_standard_error():
            backend: Backend = entry.load()()
            missing = [
                part for part in ("name", "capabilities", "run") if not hasattr(backend, part)
            ]
    except (Exception, SystemExit) as error:  # whatever another package does when it is loaded
        failure = (
            f"no {error.name}"
            if isinstance(error, ImportError) and error.name
            else f"{type(error).__name__}: {error}"
        )
        own = entry.dist is None or entry.dist.name == "zsim"
        raise BackendUnavailableError(
            where=f"backend {name} ({entry.value})",
            expected="a class that can be imported and made without arguments", found=failure,
            remedy="pip install 'zsim[real]'"
            if own
            else f"ask those who make {entry.dist.name if entry.dist else entry.value}",
        ) from error
    if missing:
        raise BackendUnavailableError(
            where=f"backend {name} ({entry.value})",
            expected="a zsim.runs.backend.Backend: name, capabilities() and run()",
            found=f"no {missing[0]}",
        )
    return backend


def capabilities(backend: Backend) -> Capabilities:
    """The backend's Capabilities; BackendError where it breaks down or returns something else."""
    answer: object = None
    with _broken_down(backend, "its capabilities"), _on_standard_error():
        answer = backend.capabilities()
    if not isinstance(answer, Capabilities):
        raise BackendError(
            where=f"backend {backend.name}", expected="zsim.runs.backend.Capabilities",
            found=type(answer).__name__,
        )
    devices = get_args(Device)
    if answer.device not in devices:
        where = f"backend {backend.name}: capabilities.device"
        raise BackendError(
            where=where, expected=f"{listed(devices)}, which plan() knows",
            found=repr(answer.device)[:60],
        )
    return answer


def ask(backend: Backend, scenario: Scenario, *, options: RunOptions) -> RunRecord:
    """The backend's Run; BackendError where it breaks down or returns something else than a whole
    Run."""
    record: object = None
    with _broken_down(backend, "a Run"), _on_standard_error():
        record = backend.run(scenario, options=options)
    if not isinstance(record, RunRecord):
        raise BackendError(
            where=f"backend {backend.name}", expected="a Run", found=type(record).__name__
        )
    if not isinstance(backend, SimBackend):
        _require_whole(backend, record)
    return record


def _require_whole(backend: Backend, run: RunRecord) -> None:
    """BackendError where parts of the Run are of other types, do not fit one another, or are not
    there."""
    problem = (
        saved.problem(run) or ("" if run.ranks else "one without ranks") or _missing_phase(run)
    )
    if problem:
        raise BackendError(
            where=f"backend {backend.name}", expected="a whole Run", found=problem, remedy=DEFECT
        )


def _missing_phase(run: RunRecord) -> str:
    """The phase that some rank of a complete Run does not have, or ""."""
    short = (
        (rank.rank, phase) for rank in run.ranks for phase in PHASES if phase not in rank.phases
    )
    rank, phase = next(short, (0, ""))
    return (
        f"one that says it is complete, whose rank {rank} has no {phase} phase"
        if phase and run.complete
        else ""
    )


@contextmanager
def _broken_down(backend: Backend, expected: str) -> Iterator[None]:
    """Turns what another package raises inside, an exit of the program too, into a BackendError
    with file and line."""
    try:
        yield
    except (ZsimError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        frame = raising_frame(error)
        raised_at = f" ({frame.filename}, line {frame.lineno})" if frame else ""
        raise BackendError(
            where=f"backend {backend.name}", expected=expected,
            found=f"{type(error).__name__}: {str(error)[:300]}{raised_at}",
            remedy=YOURS if frame and is_users(frame.filename) else DEFECT,
        ) from error


@contextmanager
def _on_standard_error() -> Iterator[None]:
    """Sends what this process and its children print inside to standard error: standard output is
    the report's."""
    kept = -1
    with suppress(OSError, ValueError, AttributeError):  # either may be closed
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if kept >= 0:
            os.dup2(kept, 1)
            os.close(kept)


def _entries() -> dict[str, EntryPoint]:
    return {BUILT_IN.name: BUILT_IN} | {entry.name: entry for entry in entry_points(group=GROUP)}
