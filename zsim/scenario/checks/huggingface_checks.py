"""Refusals for modules of transformers, which are lowered as one forward of their own code runs."""

from __future__ import annotations

from collections.abc import Iterator

from zsim.models.checkpointing import Checkpointing
from zsim.models.repeats import most_runs
from zsim.models.spec import TRANSFORMERS, ModelSpec
from zsim.models.training_options import Batch
from zsim.models.wrapping import Wrapping


def problems(
    model: ModelSpec, *, batch: Batch, autocast: str, checkpointing: Checkpointing,
    wrapping: Wrapping, unused: tuple[str, ...],
) -> Iterator[str]:
    """One line each, with the scenario's key in front; nothing for any other model."""
    if model.family != TRANSFORMERS:
        return
    required = (
        ("model.uses", 1, most_runs(model)),
        ("model.unused", "nothing", ", ".join(unused) or "nothing"),
        ("batch.forwards", 1, batch.forwards), ("precision.autocast", "none", autocast),
        ("wrapping.ends", "root", wrapping.ends),
        ("activation_checkpointing.early_stop", True, checkpointing.early_stop),
        (
            "activation_checkpointing.recompute", "nothing",
            ", ".join(checkpointing.recompute) or "nothing",
        ),
    )
    for key, expected, actual in required:
        if actual != expected:
            traced = (
                ", and so does a trace: zsim trace hf:config.json --autocast bf16"
                if key == "precision.autocast" else ""
            )
            yield (
                f"{key}: expected {expected} with model.huggingface, found {actual}; a family with "
                f"the same sizes has it, model.family{traced}"
            )
    if batch.sequence_length < 2:
        yield (
            f"batch.sequence_length: expected at least 2 with model.huggingface, found "
            f"{batch.sequence_length}"
        )
