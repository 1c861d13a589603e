"""Configs of other tools as tests write them, and their import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zsim.configs.draft import Answers
from zsim.configs.imported import Imported
from zsim.configs.reading import read_config

TINY: dict[str, Any] = {"batch.sequence_length": 64, "batch.micro_batch": 1, "cluster.ranks": 4}


def imported(
    folder: Path, config: object, kind: str | None = None, *, name: str = "config.json",
    model: str | None = "gpt-tiny", cluster: str | None = "cpu-gloo", dropped: tuple[str, ...] = (),
    recipe: str = "", **settings: Any,
) -> Imported:
    """The import of a config, written to a file as it is, or as JSON; TINY and `settings`, with
    double underscores for dots, answer what is open."""
    file = folder / name
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    answers = TINY | {key.replace("__", "."): value for key, value in settings.items()}
    return read_config(
        file,
        Answers(
            model=model, cluster=cluster, folder=folder, dropped=dropped,
            settings={key: value for key, value in answers.items() if value is not None},
        ),
        kind=kind, recipe=recipe,
    )


def problems(error: Exception) -> str:
    """The text of an error without the folder of the test."""
    return "\n".join(line.rpartition("config.json: ")[2] for line in str(error).splitlines())
