"""Scenario files as tests: an item for each file and backend, with `[expect]` as its assertions.

Nothing of zsim is imported here before a file is known to be one that was asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from zsim.errors import ZsimError
    from zsim.runs.run import Run
    from zsim.runs.unended import UnendedRun
    from zsim.scenario.scenario import Scenario
    from zsim.testing.plugin.settings import SessionOptions

ESSENTIAL = frozenset({"model", "batch", "cluster", "strategy"})
"""Tables that every scenario has; a file with two of them is meant to be one."""
MOST_READ = 64 * 1024
_TOP = re.compile(r"^[ \t]*(\[)?\[?[ \t]*\"?(\w+)[^\n\]]*(\]?)", re.MULTILINE)


def is_scenario(path: Path) -> bool:
    """True for a TOML file whose first 64 KiB have two of the tables that a scenario needs.

    A file that cannot be read counts, so that a test says why.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MOST_READ).decode("utf-8", "replace")
    except OSError:
        return True
    keys, below_a_header = set(), False
    for opening, key, closing in _TOP.findall(text):
        is_header = bool(opening and closing)
        if is_header or not below_a_header:
            keys.add(key)
        below_a_header = below_a_header or is_header
    return len(keys & ESSENTIAL) >= 2


def left_out(
    file: Path, paths: list[str], patterns: list[str], *, everywhere: bool
) -> str | None:
    """The reason why a file is no test, "" where nobody asked for it; None for one that is.

    A file that is named is a test, whatever it holds; one that is no TOML fails wherever it is
    asked for. `everywhere`: --zero-backend is given.
    """
    if str(file) in paths:
        return None
    asked_for = is_asked_for(file, paths, patterns)
    if not is_scenario(file):
        if asked_for and not _is_toml(file):
            return None
        expected = f"expected two of the tables {', '.join(sorted(ESSENTIAL))}, found fewer"
        return f"{expected}; name the file itself to see its mistakes" if asked_for else ""
    if asked_for or everywhere:
        return None
    if str(file.parent) in paths:
        return ("a scenario beside tests in Python is a test with --zero-backend=sim, or where the "
                "file itself is named")
    return ""


def _is_toml(file: Path) -> bool:
    """False for a file that nothing can read as TOML; a very large one is not tried."""
    import tomllib

    from zsim.errors import ZsimError
    from zsim.io import limits

    try:
        data = file.read_bytes()
        if len(data) <= limits.MAX_BYTES:
            tomllib.loads(limits.check_text(data, where=str(file)))
    except (ZsimError, OSError, ValueError, OverflowError, RecursionError):
        return False
    return True


def named(config: pytest.Config) -> list[str]:
    """Files and folders that the command line names; none where it leaves them to pytest."""
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        return []
    folder = config.invocation_params.dir
    paths = (argument.partition("::")[0] for argument in config.args)
    return [os.path.abspath(folder / path) for path in paths]


def is_asked_for(file: Path, paths: list[str], patterns: list[str]) -> bool:
    """True for a file that is one of `paths`, or lies in one that is a folder without tests in
    Python."""
    for path in map(Path, paths):
        if path == file:
            return True
        if path in file.parents and not _has_python_tests(path, tuple(patterns)):
            return True
    return False


@cache
def _has_python_tests(folder: Path, patterns: tuple[str, ...]) -> bool:
    for _, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        if any(fnmatch(name, pattern) for name in files for pattern in patterns):
            return True
    return False


class ScenarioFile(pytest.File):
    """A scenario's file: an item for each backend, or one that fails where it cannot be read."""

    settings: SessionOptions

    def collect(self) -> Iterator[pytest.Item]:
        """The items, named by their backends."""
        from zsim.errors import ZsimError
        from zsim.scenario.scenario import load

        try:
            scenario = load(self.path)
        except ZsimError as error:
            yield UnreadableItem.from_parent(self, name="unreadable", error=error)
            return
        for backend in self.settings.backends:
            yield ScenarioItem.from_parent(self, name=backend, scenario=scenario)


class ScenarioFailedError(Exception):
    """Problems of a scenario: of its file, of its expectations, of its real Run."""


class _Item(pytest.Item):
    """An item whose failures are told without a traceback, since none of their code is the
    user's."""

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *_: Any) -> Any:
        """Text of what failed."""
        from zsim.errors import ZsimError

        if isinstance(excinfo.value, ScenarioFailedError):
            return str(excinfo.value)
        if isinstance(excinfo.value, ZsimError):
            return "\n".join(filter(None, (str(excinfo.value), excinfo.value.details)))
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """File and name, as the heading of a failure has them."""
        return self.path, 0, f"{self.path.name}: {self.name}"


class UnreadableItem(_Item):
    """The one item of a file that is no scenario."""

    def __init__(self, *, error: ZsimError, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.error = error

    def runtest(self) -> None:
        """Fail with every problem of the file."""
        name = os.path.relpath(self.path, self.config.invocation_params.dir)
        raise ScenarioFailedError(str(self.error).replace(f"{self.path}: ", f"{name}: "))


class ScenarioItem(_Item):
    """A scenario on a backend, which is its name."""

    parent: ScenarioFile

    def __init__(self, *, scenario: Scenario, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scenario = scenario
        self.add_marker("zero")

    def runtest(self) -> None:
        """Run it; ScenarioFailedError lists the expectations that fail, and all differences."""
        from zsim.errors import ZsimError
        from zsim.runs import unended
        from zsim.testing.case import SIM, BackendCase
        from zsim.testing.plugin.zero import Zero, predicted_against

        settings = self.parent.settings
        zero = Zero(
            case=BackendCase(backend=self.name, source=self.scenario), item=self, settings=settings
        )
        gap, unseen = "", False
        try:
            run = zero.run()
        except ZsimError as error:
            step = unended.expected(self.scenario, error, backend=self.name)
            if step is None:
                raise
            record, problems = step.error.run, list(_unmet(step))
        else:
            record, problems = run.record, list(_problems(run))
            names = [verdict.name for verdict in run.expectations if verdict.ok is None]
            gap = f"{self.name} measures no {', no '.join(names)} of [expect]" if names else ""
            unseen = len(names) == len(run.expectations) > 0
        if gap and settings.require_backend:
            problems.append(f"{gap} (--zero-require-backend)")
        elif gap:
            self.user_properties.append(("zero_not_checked", gap))
        if self.name != SIM and SIM in settings.backends:
            comparison = predicted_against(zero.scenario, record)
            problems += [] if comparison.ok else [str(comparison)]
        elif unseen and not problems:
            settings.lacks(gap)
        if problems:
            raise ScenarioFailedError("\n".join(problems))


def _unmet(step: UnendedRun) -> Iterator[str]:
    """Lines on each expectation that a step which did not end fails, and on why it did not."""
    for verdict in step.expectations:
        if not verdict.ok:
            yield f"{verdict.name}: expected {verdict.expected}, found {verdict.actual}"
    if not step.ok:
        yield str(step.error)


def _problems(run: Run) -> Iterator[str]:
    """Lines on each expectation that fails, with what is behind it."""
    from zsim.testing import explanations

    for verdict in run.expectations:
        if verdict.ok is False:
            yield f"{verdict.name}: expected {verdict.expected}, found {verdict.actual}"
            yield from explanations.of_expectation(run, verdict.name)
    if run.fits is False and all(verdict.name != "fits" for verdict in run.expectations):
        yield f"memory: {run.device_memory}; expect.fits = false says that this is meant"
    if not run.record.complete:
        yield f"the Run did not reach its end: {run.record.failure}"
