"""Tests on two gloo ranks: `python -m tests.benchmarks.ranks` measures them beside torch's class.

Three sessions of pytest run in turn: tests with the marker `ranks`, the same tests as methods of
torch's MultiProcessTestCase, and calls of a pool. The least time of a test counts, as a shared
machine only ever adds; the first of each session loads torch and is left out. What a rank computes
itself, until its body has run, is shown beside it: other work adds little to that.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as Xml
from pathlib import Path

from tests.support.folders import ROOT

COMPUTED = """
def computed():
    with open("computed.txt", "a") as file:
        file.write(f"{time.process_time()}\\n")
"""
"""A function that notes the seconds that this process has computed."""
RANKS = f"""
import pytest, time, torch
import torch.distributed as dist
{COMPUTED}
@pytest.mark.parametrize("number", range(12))
@pytest.mark.ranks(2)
def test_sum(rank, number):
    total = torch.ones(4)
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 4
    computed()
"""
TORCH = f"""
import time, torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase
{COMPUTED}
class TestTorch(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def _sum(self):
        store = dist.FileStore(self.file_name, 2)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
        total = torch.ones(4)
        dist.all_reduce(total)
        assert total.tolist() == [2.0] * 4
        computed()

    test_sum_0 = test_sum_1 = test_sum_2 = lambda self: self._sum()
"""
EXPECTTEST = "import unittest\nACCEPT = False\nclass TestCase(unittest.TestCase): pass\n"
"""Stand-in for a package that torch's class imports, and uses for other tests."""
POOL = """
import time
import torch
import torch.distributed as dist

def summed(value):
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total.item()

def test_calls(rank_pool, record_property):
    pool = rank_pool(2)
    times = []
    for number in range(200):
        begin = time.perf_counter()
        assert pool.run(summed, number) == [2 * number] * 2
        times.append(time.perf_counter() - begin)
    record_property("least", min(times))
"""


def main() -> None:
    """Print the least time of each, and the ratio."""
    with tempfile.TemporaryDirectory() as folder:
        own = min(_times(_cases(Path(folder), RANKS)))
        own_computed = _computed(Path(folder))
        theirs = min(_times(_cases(Path(folder), TORCH)))
        theirs_computed = _computed(Path(folder))
        (calls,) = _cases(Path(folder), POOL)
        call = float(next(each.get("value", "") for each in calls.iter("property")))
    load = os.getloadavg()[0]
    sys.stdout.write(
        f"a test on 2 gloo ranks, marker ranks      {own:8.3f} s, a rank computes for "
        f"{own_computed:.3f} s\n"
        f"the same by torch's MultiProcessTestCase  {theirs:8.3f} s, a rank computes for "
        f"{theirs_computed:.3f} s\n"
        f"    times                                 {theirs / own:8.0f}                           "
        f"{theirs_computed / own_computed:.0f}\n"
        f"a call of a pool of 2 ranks               {call:8.4f} s\n"
        f"on {os.cpu_count()} cores, {platform.machine()}, load {load:.2f}\n"
    )


def _cases(folder: Path, source: str) -> list[Xml.Element]:
    """The tests of a session of pytest, from its JUnit report."""
    report = folder / "report.xml"
    (folder / "test_speed.py").write_text(source)
    (folder / "expecttest.py").write_text(EXPECTTEST)
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "zreal.testing.pytest_plugin",
         "-p", "no:cacheprovider", f"--junitxml={report}"],
        cwd=folder, check=True, env=environment, stdout=subprocess.DEVNULL,
    )
    return list(Xml.parse(report).getroot().iter("testcase"))


def _computed(folder: Path) -> float:
    """The least that a rank of the session has computed; the next session begins anew."""
    file = folder / "computed.txt"
    seconds = min(map(float, file.read_text().split()))
    file.unlink()
    return seconds


def _times(cases: list[Xml.Element]) -> list[float]:
    return [float(case.get("time", "nan")) for case in cases][1:]


if __name__ == "__main__":
    main()
