"""Sessions of pytest with the plugin alone, in this process, in a folder of a user's own.

All of zsim is imported here before, as each session forgets what it has imported itself.
"""

from __future__ import annotations

import shutil
import xml.etree.ElementTree as Xml
from importlib.util import find_spec

import pytest

import zsim
from tests.support.folders import ROOT
from tests.support.imported import import_all
from zsim.scenario.scenario import load

import_all(zsim)
NEEDS_TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
"""Mark of tests whose sessions import torch. They import none, as pytester would forget it."""
PARITY = ROOT / "scenarios" / "parity"


class Sessions:
    """A user's folder and sessions of pytest in it."""

    def __init__(self, pytester):
        self.pytester = pytester
        self.path = pytester.path

    def scenario(self, name, *, to="scenarios", **changes):
        """Copy a parity scenario into the folder `to`; one with `changes` expects nothing else."""
        target = self.path / to / f"{name}.toml"
        target.parent.mkdir(parents=True, exist_ok=True)
        if changes:
            original = load(PARITY / f"{name}.toml").with_(expect=None)
            target.write_text(original.with_(**changes).to_toml())
        else:
            shutil.copy(PARITY / f"{name}.toml", target)
        return target

    def tests(self, source, name="test_user"):
        """Write a user's test module."""
        head = "import pytest\nimport zsim\n"
        return self.pytester.makepyfile(**{name: f"{head}\n{source}"})

    def backends(self):
        """Make a conftest that offers the backends of BACKENDS."""
        self.pytester.makeconftest(BACKENDS)

    def run(self, *arguments):
        """A session in this process."""
        return self.pytester.runpytest_inprocess(*PLUGIN, *map(str, arguments))

    def run_apart(self, *arguments):
        """A session in a process of its own, for xdist and for torch."""
        return self.pytester.runpytest_subprocess(*PLUGIN, *map(str, arguments), timeout=300)

    def outcomes(self, *arguments):
        """Outcome of each test by its id, and the session."""
        report = self.path / "outcomes.xml"
        result = self.run(*arguments, f"--junitxml={report}")
        return outcomes(report), result


PLUGIN = ("-p", "zsim.testing.pytest_plugin", "-W", "error", "--strict-markers")


def outcomes(report):
    """Outcome of each test of a JUnit report, by class and name."""
    return {
        f"{case.get('classname')}::{case.get('name')}": outcome(case)
        for case in Xml.parse(report).getroot().iter("testcase")
    }


def outcome(case):
    """The first of failure, error and skipped that the test's element has, or "passed"."""
    told = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
    return told[0] if told else "passed"


def properties(report, name):
    """The properties of a test in a JUnit report."""
    (case,) = [c for c in Xml.parse(report).getroot().iter("testcase") if c.get("name") == name]
    return [(each.get("name"), each.get("value")) for each in case.iter("property")]


BACKENDS = '''
"""Backends of a user: one whose devices are not there, and others that need no torch."""
from dataclasses import replace

import zsim
from zsim.runs import registry
from zsim.runs.backend import Capabilities


class Twin:
    """Real ranks that do what is predicted."""
    name = "twin"

    def capabilities(self):
        return Capabilities(memory=True, numerics=False, time=False, device="cpu")

    def run(self, scenario, *, options):
        unfolded = replace(options, all_ranks=options.ranks is None)
        record = registry.SimBackend(device="cpu").run(scenario, options=unfolded)
        return replace(record, backend=self.name, interpreter="executor")


class Twisted(Twin):
    """Real ranks that send four bytes more in each collective."""
    name = "twisted"

    def run(self, scenario, *, options):
        record = super().run(scenario, options=options)
        return replace(record, ranks=tuple(map(self.twisted, record.ranks)))

    def twisted(self, rank):
        steady = rank.phases["steady"]
        more = tuple(replace(each, nbytes=each.nbytes + 4) for each in steady.collectives)
        phases = {**rank.phases, "steady": replace(steady, collectives=more)}
        return replace(rank, phases=phases, spans=(), bytes_sent=0)


class Timeless(Twin):
    """Real ranks whose time nobody took, as those of fake."""
    name = "timeless"

    def run(self, scenario, *, options):
        record = super().run(scenario, options=options)
        ranks = tuple(replace(rank, spans=()) for rank in record.ranks)
        return replace(record, step_time_ns=None, ranks=ranks)


class Failing(Twin):
    """Real ranks, of which one fails after its first step."""
    name = "failing"

    def run(self, scenario, *, options):
        from zsim.ir.run import IncompleteRunError

        record = super().run(scenario, options=options)
        error = zsim.RankError(
            where=f"rank 1 within {options.timeout_s} s", expected="steps", found="ValueError"
        )
        partial = replace(record, complete=False, failure=str(error))
        failed = IncompleteRunError(error, partial)
        failed.details = "Traceback of rank 1"
        raise failed


class Absent(Twin):
    """No devices."""
    name = "absent"

    def capabilities(self):
        raise zsim.BackendUnavailableError(
            where="backend absent", expected="an interconnect", found="none"
        )


OWN = {kind.name: kind for kind in (Twin, Twisted, Timeless, Failing, Absent)}
real = registry.find, registry.names
registry.find = lambda name, **words: OWN[name]() if name in OWN else real[0](name, **words)
registry.names = lambda: real[1]() | {name: f"conftest:{name}" for name in OWN}


def pytest_unconfigure():
    registry.find, registry.names = real
'''
