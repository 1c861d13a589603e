"""Megatron's arguments in a shell script, or as YAML or JSON, made one table: text is read, and
nothing is executed.

In a script each word that begins with -- is an argument. The words up to the next one, or to the
end of the line, are its value. An argument with two values is text of both, and refused where it
matters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zsim.configs import documents
from zsim.configs.documents import Config
from zsim.configs.scripts.shell_script import MAX_VALUE, lines_of
from zsim.errors import ScenarioError

SCRIPT = "_script"
"""Key of the script's name after pretrain_, which is no argument."""
UNDECIDED = "_undecided"
"""Key of the conditions of a script whose branches are both read."""
_COMMAND = re.compile(r"[A-Za-z_]\w*\+?=|\$\{?\w*(ARGS|OPTIONS)|\S+\.py$")
"""An assignment, arguments in a variable, or a script: no part of a value."""
_TRAINED = re.compile(r"\bpretrain_(\w{1,40})\.py\b")
_ARGUMENT = re.compile(r"--([A-Za-z][\w-]{0,80})(?:=(.*))?$")


def shell_config(text: str, *, where: str, variables: Mapping[str, Any] | None = None) -> Config:
    """The arguments in the text of a script, by their names with underscores; `variables` are
    those of the script that the user sets."""
    undecided: list[str] = []
    table: Config = {}
    values = {name: str(value) for name, value in (variables or {}).items()}
    for line in lines_of(text, values, undecided):
        for name, value in _arguments(line):
            _add(table, name, value)
        if script := _TRAINED.search(line):
            table[SCRIPT] = script[1]
    if not set(table) - {SCRIPT}:
        raise ScenarioError((f"{where}: expected arguments as --num-layers 32, found none",))
    return table | ({UNDECIDED: undecided} if undecided else {})


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
