"""Artifacts of a session: a folder for each test, with its Runs, their traces, and its log."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from zsim.io import files
from zsim.ir.run import RunRecord
from zsim.runs import saved
from zsim.runs.pictures import chrome_trace
from zsim.testing.plugin.names_of_tests import file_name, folder_of

FOLDER = pytest.StashKey[Path]()
"""The folder of a test that has run something."""
NAMES = pytest.StashKey[list[str]]()
"""The names of the Runs that a test has written."""
REPORTS = pytest.StashKey[list[pytest.TestReport]]()


def keep(item: pytest.Item, record: RunRecord, *, folder: Path, ending: str = ".json") -> None:
    """Save a Run of the test, and the trace of one with spans; the second of a name is NAME.2."""
    target, name = folder / folder_of(item.nodeid), file_name(record.scenario)
    item.stash[FOLDER] = target
    names = item.stash.setdefault(NAMES, [])
    names.append(name)
    number = names.count(name)
    stem = name if number == 1 else f"{name}.{number}"
    saved.save(record, target / f"{stem}{ending}")
    if any(rank.spans for rank in record.ranks):
        chrome_trace.write(record, target / f"{stem}.trace.json.gz")


class Logs:
    """Hooks of a session with artifacts: each test's failures and captured output, as log.txt."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Write the log once the test is torn down."""
        report = yield
        reports = item.stash.setdefault(REPORTS, [])
        reports.append(report)
        if report.when == "teardown" and FOLDER in item.stash:
            files.write(item.stash[FOLDER] / "log.txt", _log(reports))
        return report


def _log(reports: list[pytest.TestReport]) -> str:
    """Outcome and failure of each phase of a test, and then all that was captured."""
    lines = []
    for report in reports:
        lines.append(f"{report.nodeid} {report.when}: {report.outcome}, {report.duration:.3f} s")
        lines += [report.longreprtext] if report.longreprtext else []
    for title, text in reports[-1].sections:
        lines += [f"-- {title}", text]
    return "\n".join(lines) + "\n"
