"""Config files as plain data: JSON, YAML and TOML from untrusted text, within limits.

Nothing of a file is executed. YAML has neither aliases nor tags here: an alias can make a small
text a huge value, and a tag names a type to build.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from zsim.errors import BackendUnavailableError, ScenarioError
from zsim.io import json_reader, limits
from zsim.io.files import not_a_file

MAX_DEPTH = 20
"""Deepest nesting of a config, in tables and lists."""
Config = dict[str, Any]


class ExtraError(BackendUnavailableError):
    """Error: an optional library is not installed."""


def text_of(path: Path) -> str:
    """The text of a config file; ScenarioError where there is none, or a too large one."""
    try:
        if not path.is_file():
            raise ScenarioError((f"{path}: {not_a_file(path)}",))
        with path.open("rb") as stream:
            data = stream.read(limits.MAX_BYTES + 1)
    except OSError as error:
        raise ScenarioError((f"{path}: cannot be read: {error.strerror}",)) from None
    if len(data) > limits.MAX_BYTES:
        raise ScenarioError((f"{path}: expected at most {limits.MAX_BYTES:,} bytes, found more",))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScenarioError((f"{path}: expected UTF-8 text, found byte "
                             f"0x{data[error.start]:02x} at {error.start}",)) from None


def json_config(text: str, *, where: str) -> Config:
    """The table in JSON text, in which lines of `//` are comments, as configs in tutorials have
    them."""
    bare = re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE)
    try:
        return _table(json_reader.loads(bare), where=where, language="JSON")
    except (ValueError, RecursionError) as error:
        raise ScenarioError((f"{where}: not JSON: {str(error)[:200]}",)) from None


def toml_config(text: str, *, where: str) -> Config:
    """The table in TOML text."""
    if problem := limits.scan(text):
        raise ScenarioError((f"{where}: {problem}",))
    try:
        return tomllib.loads(text)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ScenarioError((f"{where}: not TOML: {str(error)[:200]}",)) from None


def yaml_config(text: str, *, where: str) -> Config:
    """The table in YAML text; ScenarioError for aliases, tags and a key that is there twice."""
    try:
        import yaml
    except ImportError:
        raise ExtraError(
            where=where, expected="pyyaml, to read YAML", found="no pyyaml",
            remedy="pip install 'zsim[import]'",
        ) from None
    try:
        node = yaml.compose(_checked(yaml, text), Loader=yaml.SafeLoader)
        return _table(_value(yaml, node), where=where, language="YAML")
    except yaml.YAMLError as error:
        line = " ".join(str(error).split())[:200]
        raise ScenarioError((f"{where}: not YAML: {line}",)) from None
    except (ValueError, RecursionError) as error:
        raise ScenarioError((f"{where}: {str(error)[:200]}",)) from None


def _checked(yaml: Any, text: str) -> str:
    """`text`, not too deep, and without an alias, an anchor or a tag; ValueError with the line of
    one."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"line {line}: expected at most {MAX_DEPTH} nested tables and lists")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ValueError(f"line {line}: expected no anchors and aliases, found one of them")
        if getattr(event, "tag", None):
            raise ValueError(f"line {line}: expected no tags, found {event.tag[:40]}")
    return text


def _value(yaml: Any, node: Any) -> Any:
    """The plain value of a YAML node. Keys are text, and stand there once."""
    if isinstance(node, yaml.SequenceNode):
        return [_value(yaml, item) for item in node.value]
    if not isinstance(node, yaml.MappingNode):
        return _scalar(yaml, node)
    table: Config = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ValueError(f"line {key.start_mark.line + 1}: expected text as a key")
        if key.value in table:
            raise ValueError(
                f"line {key.start_mark.line + 1}: expected each key once, found {key.value[:60]} "
                "twice"
            )
        table[key.value] = _value(yaml, value)
    return table


def _scalar(yaml: Any, node: Any) -> Any:
    """A scalar as YAML 1.1 reads it; a date stays text."""
    if node is None:
        return None
    if node.tag.endswith(":timestamp"):
        return node.value
    return yaml.constructor.SafeConstructor().construct_object(node)


def _table(value: Any, *, where: str, language: str) -> Config:
    if not isinstance(value, dict):
        raise ScenarioError((f"{where}: expected a table of {language}, found "
                             f"{type(value).__name__}",))
    if problems := limits.number_problems(value):
        raise ScenarioError(tuple(f"{where}: {problem}" for problem in problems))
    return value
