"""Llama models as sources spell them, and the presets of their sizes."""

from __future__ import annotations

from dataclasses import asdict

from zsim.measurements.table import RowError
from zsim.models import preset, spelled


def model_of(name: str) -> str:
    """The preset of the Llama that `name` spells; RowError for another model."""
    known = spelled.llama(name)
    if not known:
        expected = ", ".join(f"llama{generation}-{size}b" for generation, size in spelled.LLAMAS)
        raise RowError(f"model: expected one of {expected}, found {name[:40]!r}")
    return known


def table_of(name: str, *, vocabulary: int) -> dict[str, object]:
    """The scenario's model table for the preset `name`, with its sizes where the vocabulary is another."""
    found = preset(name)
    if not vocabulary or found.sizes.vocabulary == vocabulary:  # type: ignore[union-attr]
        return {"preset": name}
    return {"family": found.family, "sizes": asdict(found.sizes) | {"vocabulary": vocabulary}}
