"""Megatron's arguments in a shell script, or as YAML or JSON, made one table: text is read, and
nothing is executed.

In a script each word that begins with -- is an argument. The words up to the next one, or to the
end of the line, are its value. Variables with one literal value are put in. Both branches of a
condition are read: an argument with two values is text of both, and refused where it matters.
"""

from __future__ import annotations

import re
from typing import Any

from zsim.configs import documents
from zsim.configs.documents import Config
from zsim.errors import ScenarioError

MAX_VALUE = 200
"""Longest value of an argument, in characters; what is longer is cut."""
_ASSIGNED = re.compile(
    r"^[ \t]*(?:export[ \t]+|declare[ \t]+-\w+[ \t]+)?([A-Za-z_]\w{0,80})="
    r"(\"[^\"\n]*\"|'[^'\n]*'|[^\s(;\"'][^\s(;]*|[\"'](?=[ \t]*$))", re.MULTILINE,
)
"""A variable and its value: quoted on its line, a word, or the quote that opens more lines."""
_VARIABLE = re.compile(r"\$\{?([A-Za-z0-9_]{1,80})(?::-([^}$]{0,80}))?\}?")
_PRODUCT = re.compile(r"\$\(\(([^()]{1,80})\)\)")
_COMMAND = re.compile(r"[A-Za-z_]\w*\+?=|\$\{?\w*(ARGS|OPTIONS)|\S+\.py$")
"""An assignment, arguments in a variable, or a script: no part of a value."""
_ARGUMENT = re.compile(r"--([A-Za-z][\w-]{0,80})(?:=(.*))?$")


def shell_config(text: str, *, where: str) -> Config:
    """The arguments in the text of a script, by their names with underscores."""
    lines = re.sub(r"\\\n", " \n", text)
    lines = re.sub(r"(^|[ \t])#.*$", r"\1", lines, flags=re.MULTILINE)
    variables = _variables(lines)
    table: Config = {}
    for line in lines.splitlines():
        for name, value in _arguments(_filled(line, variables)):
            _add(table, name, value)
    if not table:
        raise ScenarioError((f"{where}: expected arguments as --num-layers 32, found none",))
    return table


def yaml_arguments(text: str, *, where: str) -> Config:
    """The arguments in a YAML table, with or without dashes, perhaps under MODEL_ARGS."""
    return _bare(documents.yaml_config(text, where=where))


def json_arguments(text: str, *, where: str) -> Config:
    """The arguments in a JSON table, as `yaml_arguments` has them."""
    return _bare(documents.json_config(text, where=where))


def _bare(table: Config) -> Config:
    inner = table.get("MODEL_ARGS", table)
    inner = inner if isinstance(inner, dict) else table
    return {str(key).lstrip("-").replace("-", "_"): value for key, value in inner.items()}


def _variables(text: str) -> dict[str, str]:
    """Variables of a script with one literal value each."""
    values: dict[str, str] = {}
    several: set[str] = set()
    for name, written in _ASSIGNED.findall(text):
        value = _filled(written.strip("\"'"), values)
        if value.lstrip().startswith("--"):  # arguments, which are read where they stand
            value = ""
        if values.get(name, value) != value:
            several.add(name)
        values[name] = value[:MAX_VALUE]
    return {name: value for name, value in values.items() if name not in several}


def _filled(text: str, variables: dict[str, str]) -> str:
    """`text` with the values of variables, and products of whole numbers, put in."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match[1], match[2] if match[2] is not None else match[0])

    def product(match: re.Match[str]) -> str:
        factors = [factor.strip() for factor in _VARIABLE.sub(value, match[1]).split("*")]
        if not all(factor.isdigit() and len(factor) < 9 for factor in factors):
            return match[0]
        made = 1
        for factor in factors:
            made *= int(factor)
        return str(made)

    return _VARIABLE.sub(value, _PRODUCT.sub(product, text))


def _arguments(line: str) -> list[tuple[str, list[str]]]:
    """Names and values of the arguments in one line."""
    pairs: list[tuple[str, list[str]]] = []
    is_open = False
    for part in re.sub(r"[\"'()\\;|&`]", " ", line).split():
        if match := _ARGUMENT.match(part):
            pairs.append((match[1].replace("-", "_"), [match[2]] if match[2] else []))
            is_open = True
        elif _COMMAND.match(part):
            is_open = False
        elif is_open:
            pairs[-1][1].append(part)
    return pairs


def _add(table: Config, name: str, values: list[str]) -> None:
    value: Any = " ".join(values)[:MAX_VALUE] if values else True
    if name in table and table[name] != value:
        value = f"{table[name]} and {value}"[:MAX_VALUE]
    table[name] = value
