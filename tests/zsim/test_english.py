"""Docstrings name their subject, sentences are short, and one concept has one term."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache

import pytest

from tests.support.english import (
    MAX_WORDS,
    breaches,
    breaches_of_docstrings_and_names,
    docstrings,
    messages,
)
from tests.support.folders import ROOT

GLOSSARY = ROOT / "zsim" / "GLOSSARY.md"
FILES = sorted(file for folder in ("zsim", "zreal") for file in (ROOT / folder).rglob("*.py"))

PAGES = sorted(
    page
    for pattern in ("*.md", "zsim/**/*.md", "zreal/**/*.md", "scenarios/**/*.md", "tests/**/*.md")
    for page in ROOT.glob(pattern) if page != GLOSSARY
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))


@cache
def glossary() -> list[tuple[str, str, str]]:
    """Term, meaning and what is not said instead, of each row."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]*)\|$", GLOSSARY.read_text(), re.MULTILINE)
    return [(term, meaning, unwanted.strip()) for term, meaning, unwanted in rows if term != "term"]


@cache
def prose() -> dict[str, str]:
    """Docstrings and messages of each file, and each page, in lower case without quotations."""
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in FILES}
    texts = {
        file: "\n".join(text for _, text in [*docstrings(tree), *messages(tree)])
        for file, tree in trees.items()
    } | {page: page.read_text(encoding="utf-8") for page in PAGES}
    quoted = re.compile(r"```.*?```|`[^`]*`|\"[^\"]*\"", re.DOTALL)
    return {
        str(file.relative_to(ROOT)): quoted.sub("", text.lower()) for file, text in texts.items()
    }


@cache
def everything() -> str:
    """All code and pages but the glossary, in lower case, blanks and hyphens as one blank."""
    text = " ".join(file.read_text(encoding="utf-8") for file in [*FILES, *PAGES])
    return re.sub(r"[\s-]+", " ", text.lower())


@pytest.mark.parametrize(
    "package", sorted({file.parent for file in FILES}), ids=lambda path: str(path.relative_to(ROOT))
)
def test_docstrings_and_names_follow_the_rules(package):
    wrong = [breach for file in FILES if file.parent == package for breach in breaches(file)]
    assert wrong == []


@pytest.mark.parametrize(
    "folder", sorted({file.parent for file in TESTS}), ids=lambda path: str(path.relative_to(ROOT))
)
def test_docstrings_and_names_of_tests_follow_the_rules(folder):
    files = [file for file in TESTS if file.parent == folder]
    assert [each for file in files for each in breaches_of_docstrings_and_names(file)] == []


@pytest.mark.quality
@pytest.mark.parametrize(("source", "rule"), [
    ('"""What a unit is."""', "a noun or a verb first"),
    (f'"""A unit{" and a unit" * 12}."""', "words in a sentence"),
    ('"""A unit, which is a module whose parameters are sharded."""', "relative clauses"),
    ('"""A unit that waits where a rank that sends has none."""', "relative clauses"),
    ("found = 1", "a name that says nothing"),
    ("def simulate(asked): ...", "a name that says nothing"),
    ('TEXT = "what the ranks had ended"', "a noun or a verb first"),
    ('option("--price", help="of one GPU")', "a noun or a verb first"),
    ('option("--price", help=f"of {money} GPU")', "a noun or a verb first"),
    (f'TEXT = "expected one (or{" another," * 12} or none); or{" a third," * 12}"', "in a message"),
])
def test_a_breach_of_each_rule_is_seen(source, rule, tmp_path):
    file = tmp_path / "breach.py"
    file.write_text(source)
    (breach,) = breaches(file)
    assert rule in breach


def test_choices_are_listed_by_one_function_alone():
    """A list in a message is made by `zsim.errors.listed`: "a, b or c"."""
    stray = re.compile(
        r"""['"] or ['"]\.join|\b(one of|some of|known are) \{['"]"""
        r"""|expected(=f?['"]| )\{['"], ['"]\.join"""
    )
    own = ("f\"{' or '.join(able)}\"", "f\"one of {', '.join(able)}\"",
           "expected=f\"{', '.join(able)}\"")
    assert all(stray.search(source) for source in own)
    assert [str(file) for file in FILES if stray.search(file.read_text(encoding="utf-8"))] == []


def test_the_glossary_is_a_page_of_terms_in_order_with_a_line_each():
    terms = [term for term, _, _ in glossary()]
    assert 50 <= len(terms) <= 90
    assert terms == sorted(set(terms), key=str.lower)
    assert [term for term, meaning, _ in glossary() if len(meaning.split()) > MAX_WORDS] == []


def test_every_term_of_the_glossary_is_in_use():
    terms = [term.lower().replace("-", " ") for term, _, _ in glossary()]
    assert [term for term in terms if term not in everything()] == []


def test_no_docstring_message_or_page_says_what_the_glossary_says_otherwise():
    unwanted = [term for _, _, others in glossary() for term in others.lower().split(", ") if term]
    used = {
        file: [
            term for term in unwanted
            if term in text and re.search(rf"(?<![\w.]){term}s?(?![\w(])", text)
        ]
        for file, text in prose().items()
    }
    assert {file: terms for file, terms in used.items() if terms} == {}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != ROOT / "README.md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_prose_of_a_page_is_wrapped(page):
    """Tables, links and blocks of code may be wider; the front page is for browsers."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    wide = re.compile(r"^(?! *(?:[|#<$\[]|    )).{101,}$", re.MULTILINE)
    assert wide.findall(text) == []


def test_a_stretch_is_that_of_a_trace_everywhere():
    """Sections of a Program, recomputed regions and idle intervals have words of their own."""
    others = {
        file.relative_to(ROOT).as_posix() for file in FILES
        if re.search(r"\bstretch(es)?\b", file.read_text(encoding="utf-8"), re.IGNORECASE)
    }
    traced = ("zreal/tracing/", "zreal/zero/", "zsim/autograd/traced/")
    assert {file for file in others if not file.startswith(traced)} == set()


def test_a_search_for_a_class_finds_one_class():
    """Every strategy has its `Options`; any other name is that of one public class."""
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in FILES)
    classes = [node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    public = Counter(name for name in classes if not name.startswith("_"))
    assert {name for name, count in public.items() if count > 1} == {"Options"}
