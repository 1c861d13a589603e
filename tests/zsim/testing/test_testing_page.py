"""The page of the plugin: its examples run, and print what it shows."""

from __future__ import annotations

import re
import shutil

import pytest

from tests.support.folders import ROOT
from tests.support.plugin_sessions import NEEDS_TORCH
from zsim.analysis.growth import FIGURES
from zsim.testing.pytest_plugin import OPTIONS

pytest_plugins = ["pytester"]

PAGE = (ROOT / "zsim" / "testing" / "README.md").read_text(encoding="utf-8")
TRAIN = ROOT / "scenarios" / "published" / "llama-3-8b-8-h100.toml"
SMALL = ROOT / "scenarios" / "parity" / "fsdp2-gpt-4.toml"


def blocks(language):
    """The fenced blocks of a language on the page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def matches(shown, printed):
    """True where the lines that are `shown` follow one another in what was `printed`.

    The end of a line may be a part of the session's progress.
    """
    lines = [line for line in shown.splitlines() if line != "…" and not line.startswith("$ ")]
    first = next((i for i, line in enumerate(printed) if line.startswith(lines[0])), len(printed))
    pairs = zip(lines, printed[first:], strict=False)
    return len(printed[first:]) >= len(lines) and all(line.startswith(s) for s, line in pairs)


@pytest.fixture
def folder(sessions):
    """A user's folder with the scenarios and the tests of the page."""
    (sessions.path / "scenarios").mkdir()
    shutil.copy(TRAIN, sessions.path / "scenarios" / "train.toml")
    shutil.copy(SMALL, sessions.path / "scenarios" / "small.toml")
    (sessions.path / "test_train.py").write_text(blocks("python")[0])
    (sessions.path / "test_small.py").write_text("import pytest\n" + blocks("python")[1])
    return sessions


def test_the_first_example_is_ten_lines_and_prints_what_is_shown(folder):
    assert len([line for line in blocks("python")[0].splitlines() if line]) <= 10
    result = folder.run("-v", "test_train.py")
    result.assert_outcomes(passed=2)
    assert matches(blocks("text")[0], result.stdout.lines)


def test_the_failure_is_the_one_that_is_shown(folder):
    source = blocks("python")[0].replace("GiB(70)", "GiB(50)")
    (folder.path / "test_train.py").write_text(source)
    result = folder.run("-k", "sim-8", "test_train.py")
    assert matches(blocks("text")[1], result.stdout.lines)


def test_scenario_files_are_tests_as_shown(folder):
    command = blocks("text")[2].splitlines()[0].removeprefix("$ pytest ")
    result = folder.run(*command.split())
    result.assert_outcomes(passed=2)
    assert matches(blocks("text")[2], result.stdout.lines)


def test_the_example_of_units_passes(folder):
    folder.run("test_small.py", "-k", "unit").assert_outcomes(passed=1)


@NEEDS_TORCH
@pytest.mark.gloo
@pytest.mark.slow  # a session of tests/user_project compares on gloo too
def test_the_example_of_gloo_passes(folder):
    folder.run_apart("test_small.py", "-k", "gloo").assert_outcomes(passed=1)


def test_every_option_and_every_limit_is_told():
    told = set(re.findall(r"^\| `--zero-([a-z-]+)", PAGE, re.MULTILINE))
    assert told == {*OPTIONS, "require-backend", "update-golden"}
    (line,) = [line for line in PAGE.splitlines() if line.startswith("| `--zero-fail-if")]
    assert [name for name in FIGURES if f"`{name}`" not in line] == []


def test_the_page_is_a_page():
    assert len(PAGE.splitlines()) <= 120
