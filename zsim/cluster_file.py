"""A cluster as one TOML file: a preset with the constants that a calibration found, each with its source, and how good they are."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from zsim.calibrate import Fitted


def text(preset: str, fitted: Fitted, *, source: str) -> str:
    """The whole file: the cluster `preset` and, as a table in it, its device with what was fitted."""
    folder = files("zsim") / "presets"
    cluster = tomllib.loads((folder / "clusters" / f"{preset}.toml").read_text())
    device = tomllib.loads((folder / "devices" / f"{cluster['device']}.toml").read_text())
    generation = device["name"].split()[0]
    factors = {name: factor for (kind, name), factor in fitted.factors.items() if kind in ("", generation)}
    whole = {**cluster, "device": _calibrated(device, factors, source)}
    return "\n".join([*_head(fitted, source), *_table("", whole)]) + "\n"


def _head(fitted: Fitted, source: str) -> Iterator[str]:
    yield f"# calibrated on {len(fitted.cases)} rows of {source}"
    for words, errors in (("fitted", fitted.errors), ("left out with their group", fitted.left_out)):
        ordered = sorted(abs(error) for error in errors)
        middle, high = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        yield f"# errors of rows {words}: median {_share(middle)}, 95th percentile {_share(high)}, largest {_share(ordered[-1])}"
    yield ""


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _calibrated(device: Mapping[str, Any], factors: Mapping[str, float], source: str) -> dict[str, Any]:
    found = dict(device)
    for name, factor in factors.items():
        if name.startswith("attention."):
            part = name.removeprefix("attention.")
            found["attention"] = {
                kind: {**table, part: _scaled(table[part], factor, source)} for kind, table in found.get("attention", {}).items()
            }
        else:
            found[name] = _scaled(found[name], factor, source)
    return found


def _scaled(entry: Mapping[str, str], factor: float, source: str) -> dict[str, str]:
    """A number with its unit, multiplied."""
    number, _, unit = entry["value"].partition(" ")
    value = f"{float(number) * factor:.4g}" if unit else str(round(float(number) * factor))
    before = f"{source}; before: {entry['value']}, {entry['source']}"
    return {"value": f"{value} {unit}".strip(), "provenance": "calibrated", "source": before}


def _table(name: str, table: Mapping[str, Any]) -> Iterator[str]:
    """A table of TOML: its values first, then the tables in it, under their whole names."""
    if name and any("value" in entry or not isinstance(entry, dict) for entry in table.values()):
        yield f"[{name}]"
    tables = {key: entry for key, entry in table.items() if isinstance(entry, dict) and "value" not in entry}
    for key, entry in table.items():
        if key not in tables:
            yield f"{key} = {_value(entry)}"
    yield ""
    for key, entry in tables.items():
        yield from _table(f"{name}.{key}" if name else key, entry)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(entry)}" for key, entry in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)  # a string of JSON is one of TOML
