"""A session of pytest on a rank, for one test or for the functions of one file.

Conftests, fixtures, parameters and assertion rewriting are thus pytest's own. What the controller
has judged already, marks among it, is not judged again.
"""

from __future__ import annotations

import io
import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from _pytest._io import TerminalWriter

from zreal.testing.on_rank.bodies import Served, call_function, failure, function_error, trimmed
from zreal.testing.options import RANK

AUTOLOAD = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"


def run_session(session: dict[str, Any], served: Served) -> dict[str, Any]:
    """Run the session of a test (see `zreal.testing.session`); returns the outcome of its end."""
    plugin = RankPlugin(session, served)
    os.environ[AUTOLOAD] = "1"
    modules = [import_module(name) for name in session["plugins"]]
    stem = served.folder / f"rank_{served.rank.index}"
    own = [f"--basetemp={stem}_basetemp", f"--override-ini=log_file={stem}.log"]
    code = pytest.main([*own, *session["arguments"]], plugins=[plugin, *modules])
    if not plugin.answered:
        plugin.problems.append(f"pytest ends with {code!r} before the test")
        served.answer(plugin.end())
        served.commands.receive()
    return plugin.end()


class RankPlugin:
    """Hooks of a rank's session."""

    def __init__(self, session: dict[str, Any], served: Served) -> None:
        self.session, self.served = session, served
        self.problems: list[str] = []
        """Reports of errors in collection, and after the body."""
        self.warnings: list[tuple[str, str, str, int]] = []
        self.answered = False
        """The body was reached, or the test has ended before it."""

    def end(self) -> dict[str, Any]:
        """The outcome of all but the body."""
        text = "\n".join(self.problems)
        errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E  ")]
        return {
            "outcome": "failed" if text else "passed", "text": text, "at": time.monotonic(),
            "line": [*errors, text.partition("\n")[0]][0], "warnings": self.warnings,
        }

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Take over the controller's options and markers."""
        os.environ.pop(AUTOLOAD)
        os.environ |= self.session["autoload"]
        config.stash[RANK] = self.served.rank
        vars(config.option).update(self.session["options"])
        for line in self.session["markers"]:
            config.addinivalue_line("markers", line)
        config.pluginmanager.register(_NoTerminal(), "terminalreporter")

    @pytest.fixture
    def tmp_path(self) -> Path:
        """The folder that all ranks share."""
        folder = Path(self.session["tmp_path"] or self.served.folder / "tmp_path")
        folder.mkdir(exist_ok=True)
        return folder

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Answer calls of functions, where the session is for a file and no test."""
        if not self.session["is_file"] or session.testsfailed:
            return None
        self._answer({"outcome": "passed"})
        self.served.answer_calls(partial(call_function, self.served.rank), function_error)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool:
        """Answer calls of the test's body."""
        body, fixtures = _body(pyfuncitem)
        self._answer({"outcome": "passed"})
        self.served.answer_calls(
            lambda values: body(**fixtures, **values), partial(_test_error, pyfuncitem)
        )
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Any:
        """Answer for a fixture that fails or skips before the body."""
        report = yield
        if call.excinfo is not None:
            if self.answered:
                self.problems.append(report.longreprtext)
            else:
                self._answer(failure(call.excinfo.value, partial(_test_error, item)))
                self.served.commands.receive()
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the errors of collection."""
        if report.failed:
            self.problems.append(report.longreprtext)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str
    ) -> None:
        """Keep a warning of the test, for the controller to repeat."""
        if when == "runtest":
            self.warnings.append((
                str(warning_message.message), warning_message.category.__name__,
                warning_message.filename, warning_message.lineno,
            ))

    def _answer(self, outcome: dict[str, Any]) -> None:
        self.answered = True
        self.served.answer(outcome)


class _NoTerminal:
    """The terminal of a session that prints nothing; pytest 8 asks it how to colour values."""

    def __init__(self) -> None:
        self._tw = TerminalWriter(io.StringIO())


def _body(item: pytest.Function) -> tuple[Callable[..., object], dict[str, Any]]:
    """The function of a test, below hypothesis, and its fixtures by name."""
    function, names = item.obj, list(signature(item.obj).parameters)
    if hasattr(function, "hypothesis"):
        inner = function.hypothesis.inner_test
        own = () if item.instance is None else (item.instance,)
        function = partial(_example, inner, *own)
        names = list(signature(inner).parameters)
    return function, {name: item.funcargs[name] for name in names if name in item.funcargs}


def _example(body: Callable[..., object], *arguments: object, **values: object) -> object:
    """Call a body whose values hypothesis has drawn elsewhere, as it may not be told here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using `assume` outside")
        return body(*arguments, **values)


def _test_error(item: pytest.Item, error: BaseException) -> tuple[str, str]:
    """The report of an error in a test, and its place in the code."""
    shown = item.repr_failure(pytest.ExceptionInfo.from_exception(trimmed(error)))
    crash = getattr(shown, "reprcrash", None)
    return str(shown), "" if crash is None else f" ({Path(crash.path).name}:{crash.lineno})"
