"""The fixture `sessions`: sessions of pytest with zreal's plugin alone, in a folder of a user's.

They run in this process, whose fork server their ranks share. What they import is imported here
before, since each session forgets what it has imported itself.
"""

from __future__ import annotations

import multiprocessing.heap
import multiprocessing.popen_forkserver
import multiprocessing.sharedctypes
from collections.abc import Callable, Sequence

import hypothesis
import pytest
import torch

import zreal.testing.pool
import zreal.testing.ranked_test
import zreal.testing.requirements
import zsim
from tests.support.imported import import_all
from zreal.processes import launch
from zreal.processes.rank_status import RankStatus
from zreal.testing import ranks

import_all(zsim)
IMPORTED = (multiprocessing, hypothesis, torch, zreal)
PLUGIN = ("-p", "zreal.testing.pytest_plugin", "-W", "error", "--strict-markers")
HEAD = """
import os, signal, sys, time
import pytest, torch
import torch.distributed as dist
"""


class RankSessions:
    """A user's folder, and sessions of pytest in it."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pytester, self.path, self._monkeypatch = pytester, pytester.path, monkeypatch

    def reports(self, source: str, *arguments: str) -> dict[str, pytest.TestReport]:
        """The report of each test of a module, by name: of its set-up or teardown where these have
        failed."""
        self.pytester.makepyfile(test_user=HEAD + source)
        recorder = self.pytester.inline_run(*PLUGIN, *arguments)
        by_test: dict[str, pytest.TestReport] = {}
        for report in recorder.getreports("pytest_runtest_logreport"):
            name = report.nodeid.partition("::")[2]
            has_failed = name in by_test and by_test[name].failed
            if not has_failed and (report.when == "call" or not report.passed):
                by_test[name] = report
        return by_test

    def failure(self, source: str, *arguments: str) -> str:
        """The report of a module's only test, which fails."""
        (report,) = self.reports(source, *arguments).values()
        assert report.failed, report
        return report.longreprtext

    def outcomes(self, source: str, *arguments: str) -> dict[str, str]:
        """The outcome of each test of a module, by name."""
        return {
            name: "xfailed" if hasattr(report, "wasxfail") else report.outcome
            for name, report in self.reports(source, *arguments).items()
        }

    def interrupted(self, source: str) -> list[str]:
        """The lines that a session prints which KeyboardInterrupt ends."""
        self.pytester.makepyfile(test_user=HEAD + source)
        return self.pytester.runpytest_inprocess(*PLUGIN, no_reraise_ctrlc=True).outlines

    def end_when(self, condition: Callable[[Sequence[RankStatus]], bool]) -> None:
        """Let ranks be judged once a condition of them holds, and at no time by the clock."""
        self._monkeypatch.setattr(launch, "GRACE_S", 3600.0)
        self._monkeypatch.setattr(ranks, "stranded", condition)


@pytest.fixture
def sessions(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> RankSessions:
    """Sessions with no plugin but pytest's own and zreal's."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    return RankSessions(pytester, monkeypatch)
