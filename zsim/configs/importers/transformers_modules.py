"""Differences of transformers' modules from presets: logits are cast to float32 before the loss,
and RMSNorms are composite.

A trainer of transformers has such modules. A config of DeepSpeed or accelerate does not say whose
modules it trains, so the import tells what to set.
"""

from __future__ import annotations

from zsim.configs.draft import Draft
from zsim.models.families import preset, presets

DIFFERENCES = {
    "model.loss_dtype": "casts logits to float32 before the loss",
    "execution.norms": "has composite RMSNorms",
}


def put(draft: Draft) -> None:
    """Put what the modules do that a preset does not; --set has precedence."""
    for key, value in _differences(draft).items():
        draft.put(key, value)
    if draft.tables["model"].get("preset") in presets():
        draft.notes.assume("logits are cast to float32 before the loss, and RMSNorms are "
                           "composite, as transformers' modules have them")


def tell(draft: Draft) -> None:
    """Assume that a preset computes as it does, and tell what a module of transformers needs."""
    if differences := _differences(draft):
        deeds = " and ".join(DIFFERENCES[key] for key in differences)
        settings = " ".join(f"--set {key}={value}" for key, value in differences.items())
        draft.notes.assume(f"the model computes as the preset does; a module of transformers "
                           f"{deeds}: {settings}")


def _differences(draft: Draft) -> dict[str, str]:
    """Keys and values of a scenario in which they differ from the preset, but those of --set."""
    name = draft.tables["model"].get("preset")
    if name not in presets():
        return {}
    settings = {"model.loss_dtype": "float32"}
    if preset(name).family == "llama":
        settings["execution.norms"] = "composite"
    return {key: value for key, value in settings.items() if key not in draft.answers.settings}
