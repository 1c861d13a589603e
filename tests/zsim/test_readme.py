"""The front page says what is: its output, its tables and its links."""

from __future__ import annotations

import re
from typing import Any

import pytest

import zsim
from tests.support.folders import PUBLISHED, ROOT
from zsim.cli.main import main
from zsim.scenario.scenario import parse
from zsim.strategies import STRATEGIES

README = (ROOT / "README.md").read_text(encoding="utf-8")
FOLDERS = ("zsim", "zreal", "scenarios", "tests")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))


def blocks(language: str) -> list[str]:
    """The fenced blocks of `language` on the front page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_the_front_page_is_a_page() -> None:
    assert len(README.splitlines()) <= 120


@pytest.mark.parametrize(
    "block", [0, pytest.param(1, marks=pytest.mark.gloo)], ids=["run", "validate"]
)
def test_a_command_prints_what_the_page_shows_below_it(
    block: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole of it: a line of `…` stands for some lines, and `…` in a line for some of it."""
    commands = re.findall(r"^<!-- command -->\n```sh\nzsim (.*)\n", README, re.MULTILINE)
    verb, file = commands[block].split()
    if verb == "validate":
        pytest.importorskip("torch")
    pattern = "".join(
        r"(?:.+\n)+" if line.strip() == "…" else re.escape(line).replace("…", ".+") + r"\n"
        for line in blocks("text")[block].splitlines()
    )
    assert main([verb, str(ROOT / file)]) == 0
    printed = capsys.readouterr().out
    assert re.fullmatch(pattern, printed), printed


def test_the_page_lists_every_strategy_and_every_package() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)) == set(STRATEGIES)
    packages = {file.parent.name for file in (ROOT / "zsim").glob("*/__init__.py")}
    listed = set(re.findall(r"^\| \[(\w+)\]\(zsim/", README, re.MULTILINE))
    assert packages - listed == {"io", "presets"} & packages


def test_the_example_is_one_scenario_as_a_file_and_as_a_test() -> None:
    made: list[zsim.Scenario] = []
    simulate = zsim.simulate
    there: dict[str, Any] = {}
    exec(blocks("python")[0], there)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zsim, "simulate", lambda case: made.append(case) or simulate(case))
        there["test_two_nodes_hold_the_model"]()
    assert made == [parse(blocks("toml")[0].encode(), where="Scenario")]


def test_the_accuracy_of_the_page_is_that_of_the_published_rows() -> None:
    measured = (PUBLISHED / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| \d+ \| [\d.]+ .*$", README, re.MULTILINE)
    assert len(rows) == 5
    assert [row for row in rows if row not in measured] == []


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_somewhere(page) -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []
