"""Families and presets: how a scenario's model table becomes a ModelSpec."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from zsim.errors import ScenarioError
from zsim.loaded import Loaded
from zsim.models.families import aliases
from zsim.models.families.mlp import MlpSizes
from zsim.models.family import Family
from zsim.models.spec import ModelSpec
from zsim.presets import preset_names, preset_table

if TYPE_CHECKING:
    from zsim.models.families.gpt import GptSizes
    from zsim.models.families.llama import LlamaSizes

    Sizes = MlpSizes | GptSizes | LlamaSizes


FAMILIES: Mapping[str, Family] = Loaded({
    name: f"{__name__}.{name}:FAMILY" for name in ("mlp", "gpt", "llama")
})


LISTED_LENGTH = 2048
"""The sequence length at which presets with open positions are listed: that of llm-foundry's MPT.
"""


class Preset(NamedTuple):
    """A model by name: its family, its sizes, and where the sizes come from."""

    name: str
    family: str
    source: str
    sizes: Sizes

    @property
    def has_open_positions(self) -> bool:
        """True where a model has as many learned positions, and so parameters, as the scenario's
        sequences have tokens."""
        return not getattr(self.sizes, "max_positions", True)


def presets() -> tuple[str, ...]:
    """The names of all model presets, sorted."""
    return preset_names("models")


@cache
def preset(name: str) -> Preset:
    """The preset `name`; ScenarioError with the nearest name when there is none."""
    if name not in presets():
        same = aliases.llama(name) or aliases.mpt(name)
        if same in presets():
            raise ScenarioError((f'model.preset: unknown model "{name[:60]}", did you mean '
                                 f'{same} (same sizes)?',))
        near = difflib.get_close_matches(name, presets(), n=1)
        hint = f", did you mean {near[0]}?" if near else "; `zsim list models` names them"
        raise ScenarioError((f'model.preset: unknown model "{name[:60]}"{hint}',))
    table = preset_table("models", name)
    family, source = table.pop("family"), table.pop("source")
    if "dims" in table:
        table["dims"] = tuple(table["dims"])
    return Preset(name=name, family=family, source=source, sizes=FAMILIES[family].sizes(**table))


@lru_cache(maxsize=16)
def build(family: str, sizes: Sizes, *, name: str, sequence_length: int) -> ModelSpec:
    """The ModelSpec of `sizes`; `sequence_length` counts only where the sizes leave the learned
    positions open."""
    return FAMILIES[family].build(sizes, name=name, sequence_length=sequence_length)


def load_preset(
    name: str, *, sequence_length: int = LISTED_LENGTH, num_layers: int | None = None,
    attention: str | None = None, loss_dtype: str | None = None,
) -> ModelSpec:
    """The ModelSpec of a preset, with fewer layers, another attention or another dtype of the loss
    when asked for."""
    chosen = preset(name)
    return build(
        chosen.family,
        changed(chosen, num_layers=num_layers, attention=attention, loss_dtype=loss_dtype),
        name=name,
        sequence_length=sequence_length,
    )


def changed(
    chosen: Preset, *, num_layers: int | None = None, attention: str | None = None,
    loss_dtype: str | None = None,
) -> Sizes:
    """The sizes of a preset cut to `num_layers` layers, with the attention implementation and the
    dtype of the loss asked for."""
    sizes = chosen.sizes
    if loss_dtype is not None:
        sizes = replace(sizes, loss_dtype=loss_dtype)  # type: ignore[arg-type]
    if isinstance(sizes, MlpSizes):
        layers = len(sizes.dims) - 1
        return (
            sizes
            if num_layers is None
            else replace(sizes, dims=sizes.dims[: _fewer(num_layers, layers) + 1])
        )
    if num_layers is not None:
        sizes = replace(sizes, num_layers=_fewer(num_layers, sizes.num_layers))
    return sizes if attention is None else replace(sizes, attention=attention)  # type: ignore[arg-type]


def _fewer(wanted: int, layers: int) -> int:
    if not 1 <= wanted <= layers:
        raise ScenarioError((f"model.num_layers: expected 1 to {layers}, the layers of the "
                             f"preset, found {wanted}",))
    return wanted
