"""Llama models as sources spell them, and the presets of their sizes."""

from __future__ import annotations

import re
from dataclasses import asdict

from zsim.measurements.table import RowError
from zsim.models import preset

MODELS = {
    ("2", "7"): "llama-2-7b",
    ("2", "13"): "llama-2-13b",
    ("2", "34"): "llama-2-34b",
    ("2", "70"): "llama-2-70b",
    ("3", "8"): "llama-3-8b",
    ("3", "70"): "llama-3-70b",
    ("3", "405"): "llama-3-405b",
    ("3.1", "8"): "llama-3-8b",
    ("3.1", "70"): "llama-3-70b",
    ("3.1", "405"): "llama-3-405b",
    ("3.2", "1"): "llama-3.2-1b",
    ("3.2", "3"): "llama-3.2-3b",
    ("3.3", "70"): "llama-3-70b",
}
"""By generation and thousands of millions of parameters; 3.1 and 3.3 have the sizes of 3."""
_BEFORE, _BEHIND = r"(?:meta-llama/)?(?:meta[-_ ]?)?llama[-_ ]?v?", r"[-_ ]?b(?:[-_ ](?:hf|base|instruct|chat))*"


def model_of(name: str) -> str:
    """The preset of the Llama that `name` spells, as "Llama 3.1 8B" or llama3-8b; RowError for another model."""
    said = name.strip().lower()
    for (generation, size), known in MODELS.items():
        if re.fullmatch(f"{_BEFORE}{generation.replace('.', '[-._]?')}[-_ ]*{size}{_BEHIND}", said):
            return known
    expected = ", ".join(f"llama{generation}-{size}b" for generation, size in MODELS)
    raise RowError(f"model: expected one of {expected}, found {name[:40]!r}")


def table_of(name: str, *, vocabulary: int) -> dict[str, object]:
    """The scenario's model table for the preset `name`, with its sizes where the vocabulary is another."""
    found = preset(name)
    if not vocabulary or found.sizes.vocabulary == vocabulary:  # type: ignore[union-attr]
        return {"preset": name}
    return {"family": found.family, "sizes": asdict(found.sizes) | {"vocabulary": vocabulary}}
