"""The importers: each maps the keys of one tool's config to a scenario's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from zsim.loaded import Loaded

if TYPE_CHECKING:
    from zsim.configs.importer import Importer

IMPORTERS: Mapping[str, Importer] = Loaded({
    name: f"{__name__}.{file}:IMPORTER" for name, file in {
        "accelerate": "accelerate", "deepspeed": "deepspeed", "megatron": "megatron",
        "nanotron": "nanotron", "torchtitan": "torchtitan", "transformers": "training_arguments",
    }.items()
})
"""Importers by the names that `zsim import` takes."""
