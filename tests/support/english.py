"""The English of docstrings and messages: where each rule is broken."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

MAX_WORDS = 25
"""Longest sentence of a docstring, in words; what stands in code quotes counts as one."""
PREPOSITIONS = frozenset(
    {"as", "at", "by", "for", "from", "in", "of", "on", "until", "where", "with"}
)
"""Openers that a value may have in a message, as "at least 1"; no sentence and no help may."""
OPENERS = PREPOSITIONS | {
    "how", "it", "its", "that", "there", "those", "what", "when", "whether", "which", "who",
    "whose", "why",
}
"""First words that name no subject; None and Before do."""
NO_NAMES = frozenset({"found", "one", "place", "words"})
"""Names that say nothing of what a variable holds."""
PARTICIPLES = frozenset({"asked", "given", "said", "seen", "told", "what"})
"""Names that say as little, which tests may have."""
PARTS_OF_ERRORS = frozenset({"found"})
"""Arguments that errors have by their design: expected, found, remedy."""
HELPS = frozenset({"help", "description", "epilog"})
"""Keyword arguments of argparse with texts for users."""
FEW_WORDS = 4
"""Literals of fewer words are names and formats."""
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[:;])\s+(?=[A-Z])")
_RELATIVES = re.compile(r"\b(?:which|whose|whom|who)\b", re.IGNORECASE)
_QUOTED = re.compile(r"`[^`]*`|\"[^\"]*\"|https?://\S+")
"""Quotations: one word in a message, whose parentheses count word by word."""
_CLAUSES = re.compile(r"\b(?:that|which|who|whom|whose|where)\b", re.IGNORECASE)
MAX_CLAUSES = 2
"""Most clauses of a sentence, by the words in `_CLAUSES`; at most one by `_RELATIVES`."""
_CODE = re.compile(r"`[^`]*`|\([^()]*\)|\[[^\[\]]*\]|\"[^\"]*\"|https?://\S+")


@lru_cache(maxsize=1)
def tree_of(file: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(file.read_text(encoding="utf-8"))


def helps(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each `help=` of an option or a command."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in HELPS:
            yield node.value.lineno, literal(node.value)


def literal(node: ast.expr) -> str:
    """The text of a literal, "" for anything else; each value in an f-string is one word."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    if isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str):
        return "".join(str(p.value) if isinstance(p, ast.Constant) else "Value" for p in parts)
    return ""


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each literal of some words that is no docstring, nor code: what users may
    read."""
    inside = {
        id(value) for node in ast.walk(tree) if isinstance(node, ast.Expr | ast.JoinedStr)
        for value in ast.iter_child_nodes(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in inside:
            text = literal(node)
            if len(text.split()) >= FEW_WORDS and "```" not in text and "\n    " not in text:
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


def long_sentences(text: str, code: re.Pattern[str] = _CODE) -> Iterator[str]:
    """Sentences of more than `MAX_WORDS` words; what `code` matches counts as one."""
    for paragraph in prose(text):
        for sentence in _SENTENCE_END.split(code.sub("Code", paragraph)):
            if len(sentence.split()) > MAX_WORDS:
                yield sentence


def several_clauses(text: str) -> Iterator[str]:
    """Sentences with more than one clause by "which" or "who", or `MAX_CLAUSES` by "that" too."""
    for paragraph in prose(text):
        for sentence in _SENTENCE_END.split(_CODE.sub("Code", paragraph)):
            clauses = len(_CLAUSES.findall(sentence))
            if clauses > MAX_CLAUSES or len(_RELATIVES.findall(sentence)) > 1:
                yield sentence


def vague_openers(text: str, *, allowed: frozenset[str] = frozenset()) -> Iterator[str]:
    """The first line of a text whose first word names no subject; `allowed` ones may open it."""
    first = re.match(r"\w+", text.strip())
    if first and first[0].lower() in OPENERS and first[0] not in allowed:
        yield text.strip().split("\n")[0]


def vague_names(tree: ast.AST, names: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each variable, field or argument that is called by one of `names`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in names:
            yield node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg in names - PARTS_OF_ERRORS:
            yield node.lineno, node.arg


def breaches(file: Path) -> Iterator[str]:
    """Each breach of a rule in `file`, as FILE:LINE RULE: TEXT."""
    yield from breaches_of_docstrings_and_names(file, NO_NAMES | PARTICIPLES)
    for line, text in helps(tree_of(file)):
        for opener in vague_openers(text):
            yield f"{file}:{line} a noun or a verb first: {opener}"
    for line, text in messages(tree_of(file)):
        for opener in vague_openers(text, allowed=PREPOSITIONS):
            yield f"{file}:{line} a noun or a verb first: {opener}"
        for sentence in long_sentences(text, _QUOTED):
            yield f"{file}:{line} {len(sentence.split())} words in a message: {sentence[:90]}…"


def breaches_of_docstrings_and_names(
    file: Path, names: frozenset[str] = NO_NAMES
) -> Iterator[str]:
    """Each breach in a file of tests, whose literals are scenarios and no messages."""
    tree = tree_of(file)
    for line, text in docstrings(tree):
        for opener in vague_openers(text):
            yield f"{file}:{line} a noun or a verb first: {opener}"
        for sentence in long_sentences(text):
            yield f"{file}:{line} {len(sentence.split())} words in a sentence: {sentence[:90]}…"
        for sentence in several_clauses(text):
            yield f"{file}:{line} several relative clauses: {sentence[:90]}…"
    for line, name in vague_names(tree, names):
        yield f"{file}:{line} a name that says nothing: {name}"
