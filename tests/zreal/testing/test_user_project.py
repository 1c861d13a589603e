"""A user's project: its own tests pass, and each mistake seeded in it fails the test that should.

All mistakes are seeded at once, each where a test of its own looks.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch._dynamo.trace_rules

import zreal.backends
import zreal.rank.run
import zreal.tracing.named_module
from tests.support.folders import ROOT
from tests.zreal.testing.conftest import PLUGIN, RankSessions

pytest_plugins = ["pytester"]

IMPORTED = zreal.backends, zreal.rank.run, zreal.tracing.named_module, torch._dynamo.trace_rules
"""Modules that a session would forget. torch registers operators in the last, and refuses to do so
twice."""
PROJECT = ROOT / "tests" / "user_project"


@dataclass(frozen=True)
class Mistake:
    """A line of the project in its wrong form, the test that fails, and what its report says."""

    file: str
    right: str
    wrong: str
    test: str
    says: str


MISTAKES = (
    Mistake(  # shard math
        "tinylm/checkpoint.py", "rows = -(-len(tensor) // world)", "rows = len(tensor) // world",
        "test_pieces_hold_every_law", "resharding_is_sharding_anew",
    ),
    Mistake(  # units
        "tinylm/parallel.py", "fully_shard(block, mesh=mesh)", "block.train()",
        "test_units_are_wrapped_as_the_lint_wants", "one-unit",
    ),
    Mistake(  # ranks that differ
        "tinylm/parallel.py", "return float(total) / dist.get_world_size()",
        "return float(loss.detach())",
        "test_all_ranks_know_the_same_loss", "rank 1",
    ),
    Mistake(  # a collective that one rank does not enter
        "tinylm/parallel.py", "    dist.all_reduce(total)\n    return total.sqrt()",
        "    if dist.get_rank() == 0:\n        dist.all_reduce(total)\n    return total.sqrt()",
        "test_the_norm_is_that_of_one_process", "rank 0 waited, last collective: all_reduce",
    ),
    Mistake(  # a setting that changes the collectives
        "scenarios/eight-gpus.toml", 'name = "fsdp2"',
        'name = "fsdp2"\nreshard_after_forward = false',
        "eight-gpus.toml", "all_gathers",
    ),
    Mistake(  # memory
        "scenarios/eight-gpus.toml", 'mode = "full"', 'mode = "none"',
        "test_communication_hides_behind_compute", "activations",
    ),
    Mistake(  # the module is another than it was
        "tinylm/model.py", "HEADS, VOCABULARY, LAYERS = 32, 4, 128, 3",
        "HEADS, VOCABULARY, LAYERS = 32, 4, 128, 4",
        "test_our_module_does_what_is_predicted", "blocks.3",
    ),
    Mistake(
        "tinylm/model.py", "bias=False", "bias=True",
        "test_our_collectives_are_those_of_the_golden_file", "golden",
    ),
)


def copy_to(folder: Path) -> None:
    shutil.copytree(
        PROJECT, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
    )


@pytest.mark.gloo
def test_the_project_passes_its_own_tests(tmp_path: Path) -> None:
    """Beside them stands the test of the front page, as someone would paste it. The session is one
    of a user's own: a process with all plugins."""
    copy_to(tmp_path)
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "tests" / "test_front_page.py").write_text(block)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False,
    )
    assert result.returncode == 0, result.stdout
    assert "10 passed" in result.stdout


@pytest.mark.gloo
@pytest.mark.quality
def test_every_mistake_fails_its_test_with_words_that_lead_to_it(sessions: RankSessions) -> None:
    copy_to(sessions.path)
    for mistake in MISTAKES:
        path = sessions.path / mistake.file
        text = path.read_text()
        assert text.count(mistake.right) == 1, mistake
        path.write_text(text.replace(mistake.right, mistake.wrong))
    plugins = ("-p", "zsim.testing.pytest_plugin", *PLUGIN)
    out = sessions.pytester.runpytest_inprocess(*plugins, "-v", "--tb=short").stdout.str()
    assert f"{len(MISTAKES)} failed" in out, out
    for mistake in MISTAKES:
        assert mistake.says in report_of(mistake.test, out), (mistake, out)


def report_of(test: str, out: str) -> str:
    """The section of the failures that is headed by the test's name."""
    sections = out.partition("= FAILURES =")[2].split("\n___")
    return next((text for text in sections if test in text.splitlines()[0]), "")
