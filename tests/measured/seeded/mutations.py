"""Seeded defects, and the tests that catch them.

`python -m tests.measured.seeded.mutations --out FILE` makes the record. Each row of
`mutation_table` changes a text of the product in a copy of the tree, and names tests that should
fail then. They run in a fork of a process that has loaded the libraries, and stop at the first
failure. At last they must pass without a defect. `--merge` makes the record of several jobs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from tests.measured.seeded.mutation_table import MUTATIONS, SUITES, SURVIVORS, Mutation
from tests.support.folders import ROOT

COPIED = ("zsim", "zreal", "tests", "scenarios", "pyproject.toml", "README.md")
QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
"""Libraries are loaded before pytest could rewrite them."""
BROKEN = 99
"""Exit status of a session that did not come to its tests."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def preload(*, torch: bool) -> None:
    """Load the libraries of tests, and nothing of the product's: it is what changes."""
    import hypothesis
    import networkx
    import pydantic
    import pytest
    import simpy

    assert all((hypothesis, networkx, pydantic, pytest, simpy))
    if torch:
        import torch.distributed

        assert torch.distributed.is_available()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("zsim", "zreal")]:
        del sys.modules[name]


def run_tests(tree: Path, tests: tuple[str, ...], limit_s: float) -> dict[str, Any]:
    """Exit status and first failed test of a session of pytest in a fork; None for no end."""
    begin = time.perf_counter()
    log = tree / "session.txt"
    if not (child := os.fork()):
        os.setsid()
        code = BROKEN
        try:
            code = _session(tree, tests, log)
        finally:  # nothing of the parent's is to be ended here
            os._exit(code)
    status = None
    while status is None and time.perf_counter() - begin < limit_s:
        done, raw = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(raw) if done else None
        time.sleep(0.05)
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    told = FAILED.search(log.read_text(encoding="utf-8")) if log.exists() else None
    return {
        "status": status, "test": told[1] if told else "",
        "seconds": round(time.perf_counter() - begin, 1),
    }


def _session(tree: Path, tests: tuple[str, ...], log: Path) -> int:
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.dont_write_bytecode = True
    import pytest

    options = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "--tb=line", "-rfE", *QUIET]
    with log.open("w", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        return int(pytest.main([*options, *tests]))


def try_out(tree: Path, mutation: Mutation, limit_s: float) -> dict[str, Any]:
    """The row of one defect: caught, survived, or not there any more."""
    path = tree / mutation.file
    text = path.read_text(encoding="utf-8")
    row = {"file": mutation.file, "old": mutation.old, "new": mutation.new, "suite": mutation.suite}
    if text.count(mutation.old) != 1:
        return {**row, "result": "not there", "count": text.count(mutation.old)}
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        done = run_tests(tree, SUITES[mutation.suite], limit_s)
    finally:
        path.write_text(text, encoding="utf-8")
    result = {0: "survived", 1: "caught", 2: "caught", None: "caught by the limit"}
    return {**row, "result": result.get(done.pop("status"), "broken"), **done}


def copy_of_the_tree(folder: Path) -> Path:
    """A copy of what tests need."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns(".hypothesis", "*.egg-info")
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    return folder


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of every `jobs`-th defect from `job` on."""
    known = {
        key(row) for file in asked.known
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"]
        if row["result"].startswith("caught")
    }
    left = [each for each in MUTATIONS if (each.file, each.old, each.new) not in known]
    mine = [
        each for each in left[asked.job :: asked.jobs]
        if asked.only in f"{each.file} {each.suite}"
    ]
    preload(torch=any(each.suite.startswith("real") for each in mine))
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree, whole = copy_of_the_tree(Path(folder)), list[dict[str, Any]]()
        for mutation in mine if not asked.whole else ():
            yield try_out(tree, mutation, asked.limit)
        for suite in [*SUITES][asked.job :: asked.jobs]:
            if asked.only not in suite:
                continue
            done = run_tests(tree, SUITES[suite], asked.limit)
            whole.append({"suite": suite, "result": "whole", **done})
        yield from whole


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="a part of a file's or a suite's name")
    parser.add_argument("--whole", action="store_true", help="try the suites without defects alone")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one defect")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--job", type=int, default=0)
    parser.add_argument("--known", type=Path, nargs="*", default=[],
                        help="records: what they have caught is not tried again")
    parser.add_argument("--merge", type=Path, nargs="*", help="records of jobs, later ones first")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    results, whole = list[dict[str, Any]](), list[dict[str, Any]]()
    for row in rows(asked) if not asked.merge else merged(asked.merge):
        (whole if row["result"] == "whole" else results).append(row)
        sys.stderr.write(f"{row['result']}: {json.dumps(row, ensure_ascii=False)}\n")
        if asked.out:
            asked.out.write_text(record(results, whole), encoding="utf-8")
    survived = [row for row in results if row["result"] == "survived" and not reason(row)]
    return int(bool(survived or any(row["status"] for row in whole)))


def merged(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """The first row of each defect of the table, and of each suite, in several records."""
    records = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    known = {key(row): row for each in reversed(records) for row in each["rows"]}
    yield from (
        known[name] for each in MUTATIONS
        if (name := (each.file, each.old, each.new)) in known
    )
    yield from {row["suite"]: row for each in reversed(records) for row in each["suites"]}.values()


def key(row: dict[str, Any]) -> tuple[str, str, str]:
    """File, old and new text."""
    return row["file"], row["old"], row["new"]


def reason(row: dict[str, Any]) -> str:
    """Reason for which a defect survives, or ""."""
    return SURVIVORS.get(key(row), "")


def record(results: list[dict[str, Any]], whole: list[dict[str, Any]]) -> str:
    """The record as JSON text: a line for each defect."""
    caught = sum(row["result"].startswith("caught") for row in results)
    head = {
        "command": "python -m tests.measured.seeded.mutations --out "
                   "tests/measured/seeded/mutations.json",
        "date": time.strftime("%Y-%m-%d"), "defects": len(results), "caught": caught,
        "survived": sum(row["result"] == "survived" for row in results),
    }
    lines = [
        json.dumps({**row, **({"reason": reason(row)} if reason(row) else {})}, ensure_ascii=False)
        for row in results
    ]
    body = ",\n  ".join(lines)
    suites = json.dumps(whole)
    return f'{json.dumps(head)[:-1]}, "suites": {suites}, "rows": [\n  {body}\n]}}\n'


if __name__ == "__main__":
    sys.exit(main())
