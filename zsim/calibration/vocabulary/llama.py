"""Llama models as sources spell them, and the presets of their sizes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from zsim.calibration.rows.checks import said
from zsim.calibration.rows.records import Record, RowError
from zsim.models.families import aliases, preset


def model_of(name: str) -> str:
    """The preset of the Llama that `name` spells; RowError for another model."""
    known = aliases.llama(name)
    if not known:
        expected = ", ".join(f"llama{generation}-{size}b" for generation, size in aliases.LLAMAS)
        raise RowError(f"model: expected one of {expected}, found {name[:40]!r}")
    return known


def table_of(name: str, *, vocabulary: int) -> dict[str, object]:
    """The scenario's model table for the preset `name`, with its sizes where the vocabulary is
    another."""
    found = preset(name)
    if not vocabulary or found.sizes.vocabulary == vocabulary:  # type: ignore[union-attr]
        return {"preset": name}
    return {"family": found.family, "sizes": asdict(found.sizes) | {"vocabulary": vocabulary}}


def is_grouped(name: str) -> bool:
    """Whether several heads of the preset `name` share their keys and values."""
    sizes: Any = preset(name).sizes
    return sizes.num_kv_heads not in (0, sizes.num_heads)


def sizes_said(record: Record, name: str) -> None:
    """RowError where the row's own sizes, of which the source's rows have none, are not those of
    the preset `name`."""
    sizes: Any = preset(name).sizes
    for column, size in (
        ("d_model", sizes.hidden_size),
        ("n_layers", sizes.num_layers),
        ("n_heads", sizes.num_heads),
        ("n_kv_heads", sizes.num_kv_heads or sizes.num_heads),
        ("d_ff", sizes.feed_forward),
    ):
        said(record, column, size, within=0.0)
