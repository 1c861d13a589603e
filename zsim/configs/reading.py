"""The way from another tool's file to a scenario."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from zsim.configs import documents
from zsim.configs.config_keys import ConfigKeys
from zsim.configs.documents import Config
from zsim.configs.draft import Answers, Draft
from zsim.configs.imported import Imported
from zsim.configs.importer import JSON_OR_YAML
from zsim.configs.importers import IMPORTERS
from zsim.configs.notes import Notes
from zsim.configs.scripts.argument_text import shell_config
from zsim.configs.scripts.python_config import python_config
from zsim.errors import ArgumentError, ScenarioError, listed
from zsim.io.files import not_a_file


def kind_of(path: Path) -> str | None:
    """The tool whose config the file at `path` is, by its content; None for a scenario and for any
    other file."""
    try:
        text = documents.text_of(path)
    except ScenarioError:
        return None
    for kind, importer in IMPORTERS.items():
        parse = importer.parsers.get(path.suffix.lower())
        if parse is None:
            continue
        try:
            config = parse(text, where=str(path))
        except (ScenarioError, documents.ExtraError):
            if parse is python_config and "torchtitan" in text:
                return kind  # which of its recipes is asked later
            continue
        if importer.is_config(config):
            return kind
    return None


def read_config(
    path: Path, answers: Answers, *, kind: str | None = None, recipe: str = ""
) -> Imported:
    """The scenario in a config of another tool; ScenarioError with every key that is unknown,
    contradictory or open. `recipe`: the function of a Python config."""
    if not path.is_file():
        raise ScenarioError((f"{path}: {not_a_file(path)}",))
    chosen = kind or kind_of(path)
    if chosen is None and path.suffix.lower() in JSON_OR_YAML:  # a file that no tool can read
        JSON_OR_YAML[path.suffix.lower()](documents.text_of(path), where=str(path))
    if chosen is None:
        raise ArgumentError(
            where=str(path), expected=f"a config of {listed(IMPORTERS)}", found="none of them",
            remedy="name the kind: zsim import KIND FILE",
        )
    importer = IMPORTERS[chosen]
    parse = importer.parsers.get(path.suffix.lower())
    if parse is None:
        raise ArgumentError(
            where=str(path), expected=f"a file of {chosen} that ends in {listed(importer.parsers)}",
            found=path.suffix or "no suffix",
        )
    notes = Notes(where=str(path))
    chooses: dict[str, Any] = {"recipe": recipe} if parse is python_config else {}
    if parse is shell_config:
        chooses["variables"] = {k: v for k, v in answers.settings.items() if k.isupper()}
        answers = replace(answers, settings={
            key: value for key, value in answers.settings.items() if not key.isupper()
        })
    config = parse(documents.text_of(path), where=str(path), **chooses)
    config = _without(config, answers.dropped, notes)
    draft = Draft(notes, answers)
    importer.read(ConfigKeys(config, notes), draft)
    scenario = draft.finish(name=path.stem)
    return Imported(
        kind=chosen, scenario=scenario, ignored=dict(notes.ignored), assumed=tuple(notes.assumed)
    )


def _without(config: Config, dropped: tuple[str, ...], notes: Notes) -> Config:
    """The config without the keys that the user drops, each as "table.key"."""
    for name in dropped:
        table: Any = config
        *path, last = name.split(".")
        for part in path:
            table = table.get(part) if isinstance(table, dict) else None
        if not isinstance(table, dict) or last not in table:
            notes.problem(f"--drop {name}", "no such key in the config")
            continue
        del table[last]
        notes.ignored[name] = "by --drop"
    return config
