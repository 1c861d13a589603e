"""The same scenario gives the same bytes, whatever order Python's hashes are in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.folders import ROOT

SCENARIOS = ("scenarios/parity/fsdp2-uneven-4.toml", "scenarios/parity/zero-redundancy-gpt-4.toml")


def test_runs_under_different_hash_seeds_save_one_run_and_one_trace(tmp_path: Path) -> None:
    results = set()
    for seed in range(4):
        for name in SCENARIOS:
            saved, trace = tmp_path / f"{seed}.json", tmp_path / f"{seed}.trace.json"
            command = [
                sys.executable, "-m", "zsim", "run", name, "--save", str(saved), "--trace",
                str(trace), "--json",
            ]
            environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, check=False
            )
            assert done.returncode == 0, done.stderr.decode()
            results.add((name, done.stdout, saved.read_bytes(), trace.read_bytes()))

    assert len(results) == len(SCENARIOS)
