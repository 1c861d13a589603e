"""Files of presets that come with zsim: their names, and their tables."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any, Literal

Kind = Literal["clusters", "devices", "models"]


def preset_names(kind: Kind) -> tuple[str, ...]:
    """The names of all presets of a kind, sorted."""
    entries = (files("zsim") / "presets" / kind).iterdir()
    return tuple(sorted(
        entry.name.removesuffix(".toml") for entry in entries if entry.name.endswith(".toml")
    ))


def preset_table(kind: Kind, name: str) -> dict[str, Any]:
    """The table of a preset's file, anew each time."""
    path = files("zsim") / "presets" / kind / f"{name}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))
