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
        runs, files = [], []
        for index, name in enumerate(SCENARIOS):
            saved, trace = (tmp_path / f"{seed}-{index}.{end}" for end in ("json", "trace.json"))
            runs.append(["run", name, "--save", str(saved), "--trace", str(trace), "--json"])
            files += [saved, trace]
        code = f"from zsim.cli.main import main; raise SystemExit(any([main(r) for r in {runs}]))"
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        results.add((done.stdout, *(file.read_bytes() for file in files)))

    assert len(results) == 1
