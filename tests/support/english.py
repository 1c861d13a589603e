"""The English of docstrings and messages: where each rule is broken."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

MAX_WORDS = 25
"""Longest sentence of a docstring, in words; what stands in code quotes counts as one."""
OPENERS = frozenset(
    {"As", "At", "By", "For", "From", "How", "In", "It", "Its", "Of", "On", "That", "There"}
    | {"Those", "Until", "What", "When", "Where", "Whether", "Which", "Who", "Whose", "Why", "With"}
)
"""First words that name no subject; None and Before do."""
NO_NAMES = frozenset({"found", "one", "place", "words"})
"""Names that say nothing of what a variable holds."""
PARTS_OF_ERRORS = frozenset({"found"})
"""Arguments that errors have by their design: expected, found, remedy."""
FEW_WORDS = 4
"""Literals of fewer words are names and formats."""
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[:;])\s+(?=[A-Z])")
_RELATIVES = re.compile(r"\b(?:which|whose|whom|who)\b", re.IGNORECASE)
_CODE = re.compile(r"`[^`]*`|\([^()]*\)|\[[^\[\]]*\]|\"[^\"]*\"|https?://\S+")


@lru_cache(maxsize=1)
def tree_of(file: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(file.read_text(encoding="utf-8"))


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each literal of some words that is no docstring: what users may read.

    What an f-string fills in is one word.
    """
    inside = {
        id(value) for node in ast.walk(tree) if isinstance(node, ast.Expr | ast.JoinedStr)
        for value in ast.iter_child_nodes(node)
    }
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        texts = [str(p.value) if isinstance(p, ast.Constant) else "Value" for p in parts]
        if isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str):
            text = "".join(texts)
            if len(text.split()) >= FEW_WORDS and "```" not in text:
                yield node.lineno, text


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring: of modules, classes, functions, and of attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            if isinstance(text, str):
                yield node.lineno, text


def prose(text: str) -> Iterator[str]:
    """Paragraphs of a docstring without doctests, tables, lists of sources and indented code."""
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.split("\n")
        if not any(line.lstrip().startswith((">>>", "|", "$", "- ")) for line in lines):
            yield " ".join(line.strip() for line in lines).strip()


def long_sentences(text: str) -> Iterator[str]:
    """Sentences of more than `MAX_WORDS` words."""
    for paragraph in prose(text):
        for sentence in _SENTENCE_END.split(_CODE.sub("Code", paragraph)):
            if len(sentence.split()) > MAX_WORDS:
                yield sentence


def several_clauses(text: str) -> Iterator[str]:
    """Sentences with more than one relative clause, by "which", "who" or "whose"."""
    for paragraph in prose(text):
        for sentence in _SENTENCE_END.split(_CODE.sub("Code", paragraph)):
            if len(_RELATIVES.findall(sentence)) > 1:
                yield sentence


def vague_openers(text: str) -> Iterator[str]:
    """The first word of a docstring, where it is none that names its subject."""
    if (first := re.match(r"\w+", text.strip())) and first[0] in OPENERS:
        yield text.strip().split("\n")[0]


def vague_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each variable or argument that is called by a word that says nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in NO_NAMES:
            yield node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg in NO_NAMES - PARTS_OF_ERRORS:
            yield node.lineno, node.arg


def breaches(file: Path) -> Iterator[str]:
    """Each breach of a rule in `file`, as FILE:LINE RULE: TEXT."""
    yield from breaches_of_docstrings_and_names(file)
    for line, text in messages(tree_of(file)):
        for opener in vague_openers(text):
            yield f"{file}:{line} a noun or a verb first: {opener}"
        for sentence in long_sentences(text.replace("; ", ". ")):
            yield f"{file}:{line} {len(sentence.split())} words in a message: {sentence[:90]}…"


def breaches_of_docstrings_and_names(file: Path) -> Iterator[str]:
    """Each breach in a file of tests, whose literals are scenarios and no messages."""
    tree = tree_of(file)
    for line, text in docstrings(tree):
        for opener in vague_openers(text):
            yield f"{file}:{line} a noun or a verb first: {opener}"
        for sentence in long_sentences(text):
            yield f"{file}:{line} {len(sentence.split())} words in a sentence: {sentence[:90]}…"
        for sentence in several_clauses(text):
            yield f"{file}:{line} several relative clauses: {sentence[:90]}…"
    for line, name in vague_names(tree):
        yield f"{file}:{line} a name that says nothing: {name}"
