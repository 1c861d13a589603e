"""Summary of a session whose Runs are held to saved ones: what was compared, and what was not."""

from __future__ import annotations

import pytest

from zsim.testing.regression import UNCHANGED, Baselines


class Summary:
    """Hooks of a session with --zero-compare, in the process that reports.

    A session that has run tests and compared nothing fails: saved Runs of other scenarios are no
    evidence.
    """

    def __init__(self, baselines: Baselines) -> None:
        self.path = baselines.path
        self.compared: list[str] = []
        self.not_compared: list[str] = []
        self.not_measured: list[str] = []
        self.ran = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what a test has compared; its last report has all of its properties."""
        if report.when != "teardown":
            return
        self.ran = True
        properties = report.user_properties
        self.compared += [str(text) for key, text in properties if key == "zero_compared"]
        self.not_compared += [str(text) for key, text in properties if key == "zero_not_compared"]
        self.not_measured += [str(text) for key, text in properties if key == "zero_not_measured"]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a session that has compared nothing."""
        if self.ran and not self.compared and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """A line for each Run that has changed, and the scenarios without a saved one."""
        if not self.ran:
            return
        terminalreporter.section(f"zsim: Runs against {self.path}")
        changed = [text for text in self.compared if not text.endswith(f": {UNCHANGED}")]
        for text in (*changed, *self.not_measured):
            terminalreporter.write_line(text)
        terminalreporter.write_line(f"{len(self.compared) - len(changed):,} unchanged")
        if self.not_compared:
            names = ", ".join(sorted(set(self.not_compared)))
            terminalreporter.write_line(f"no saved Run of {names}, on the same backend and ranks")
        if not self.compared:
            terminalreporter.write_line(
                "ERROR: --zero-compare: expected a saved Run of some scenario that ran, found none",
                red=True,
            )
