"""Identity of a measured model, whatever its rows call it: rows of one model are left out of a fit
together.

A model is its family and its sizes. A preset has them, other sequences, another attention or
another type of its loss make no other model.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, fields
from typing import TYPE_CHECKING, Any

from zsim.models.families import FAMILIES, changed, preset
from zsim.scenario.scenario import Scenario

if TYPE_CHECKING:
    from zsim.models.families import Sizes

WORDS: dict[str, str] = {
    "num_layers": "layers", "hidden_size": "wide", "num_heads": "heads", "vocabulary": "words"
}
SAME_MODEL = ("attention", "loss_dtype", "max_positions")
"""Sizes that say how it is computed, or how long sequences may be."""


def model_of(scenario: Scenario) -> str:
    """The scenario's model in words that are the same for all scenarios of it."""
    table: dict[str, Any] = scenario.tables["model"]
    if "preset" in table:
        known = preset(table["preset"])
        return _words(
            known.family, changed(known, num_layers=table.get("num_layers"))
        )
    if table.get("family") in FAMILIES and "sizes" in table:
        sizes = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in table["sizes"].items()
        }
        return _words(table["family"], FAMILIES[table["family"]].sizes(**sizes))
    # a config of transformers, or a traced model
    return f"{scenario.model.name}, {scenario.model.num_parameters} parameters"


def _words(family: str, sizes: Sizes) -> str:
    usual = {field.name: field.default for field in fields(sizes) if field.default is not MISSING}
    values = asdict(sizes)
    if family == "gpt":
        usual["feed_forward"] = 4 * values["hidden_size"] if values["feed_forward"] else 0
    usual["num_kv_heads"] = values.get("num_heads") if values.get("num_kv_heads") else 0
    own = {
        name: value
        for name, value in values.items()
        if name not in SAME_MODEL and value != usual.get(name, MISSING)
    }
    return f"{family} " + ", ".join(
        f"{value} {WORDS.get(name, name)}" for name, value in own.items()
    )
