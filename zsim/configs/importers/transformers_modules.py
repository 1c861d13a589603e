"""Differences of transformers' modules from presets: logits are cast to float32 before the loss,
and RMSNorms are composite.

A trainer of transformers has such modules. A config of DeepSpeed or accelerate does not say whose
modules it trains, so the import tells what to set.
"""

from __future__ import annotations

from collections.abc import Iterable

from zsim.configs.draft import Draft
from zsim.errors import listed
from zsim.models.families import preset, presets

DIFFERENCES = {
    "model.loss_dtype": "casts logits to float32 before the loss",
    "execution.norms": "has composite RMSNorms",
}


def put(draft: Draft) -> None:
    """Put what the modules do that a preset does not; --set has precedence."""
    differences = _differences(draft)
    for key, value in differences.items():
        draft.put(key, value)
    if differences:
        draft.notes.assume(f"a module of transformers {_deeds(differences)}: "
                           f"{listed(differences, 'and')}")


def tell(draft: Draft) -> None:
    """Assume that a preset computes as it does, and tell what a module of transformers needs."""
    if differences := _differences(draft):
        settings = " ".join(f"--set {key}={value}" for key, value in differences.items())
        draft.notes.assume(f"the model computes as the preset does; a module of transformers "
                           f"{_deeds(differences)}: {settings}")


def _deeds(differences: Iterable[str]) -> str:
    return " and ".join(DIFFERENCES[key] for key in differences)


def _differences(draft: Draft) -> dict[str, str]:
    """Keys and values of a scenario in which they differ from the preset, but those of --set."""
    name = draft.tables["model"].get("preset")
    if name not in presets():
        return {}
    settings = {"model.loss_dtype": "float32"}
    if preset(name).family == "llama":
        settings["execution.norms"] = "composite"
    return {key: value for key, value in settings.items() if key not in draft.answers.settings}
