"""Work beside a run is told from the run's own."""

import os
import subprocess
import sys
import time

import pytest

from zsim.calibration.machine import machine_load
from zsim.calibration.machine.machine_load import Window, others_share

BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


def spin(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@pytest.mark.skipif(not machine_load.STAT.exists(), reason="no /proc/stat on this system")
def test_work_beside_a_window_is_not_its_own():
    with subprocess.Popen([sys.executable, "-c", BUSY]) as other:
        window = Window()
        spin(0.5)
        load = window.load()
        other.kill()
    cores = os.cpu_count()
    taken = load.machine_ns - load.own_ns
    assert load.own_ns <= load.machine_ns <= 1.1 * cores * load.wall_ns
    assert others_share(load.wall_ns, load.own_ns, load.machine_ns) == taken / (
        cores * load.wall_ns
    )
    # on any machine the other process gets at least a few ticks of such a window
    assert taken > 0


def test_a_share_is_between_none_and_all():
    cores = os.cpu_count()
    assert others_share(100, 50, 40) == 0.0
    assert others_share(100, 0, 1000 * cores) == 1.0
    assert others_share(100, 0, 50 * cores) == 0.5


def test_a_system_that_tells_nothing_has_no_load(monkeypatch, tmp_path):
    monkeypatch.setattr(machine_load, "STAT", tmp_path / "none")
    assert Window().load() is None
