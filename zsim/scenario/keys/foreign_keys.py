"""Keys of libraries' own configs that a scenario's tables do not have, and the reason."""

from __future__ import annotations

from collections.abc import Mapping

_WITH_PARTITION = (
    "DeepSpeed's goes with partition_activations, which needs ranks of tensor parallelism, and "
    "scenarios have none yet; leave it out"
)
_OF_SIZES = (
    "presets have no dropout; sizes of your own may: "
    'model = {{ family = "gpt", sizes = {{ …, {key} = 0.1 }} }}'
)
FOREIGN_KEYS: Mapping[str, str] = {
    **{f"model.{key}": _OF_SIZES.format(key=key) for key in (
        "attention_dropout", "residual_dropout"
    )},
    "model.dropout": _OF_SIZES.format(key="attention_dropout"),
    "activation_checkpointing.partition_activations": (
        "expected none: ranks of tensor parallelism have the same activations and may keep 1/N "
        "each, but scenarios have none yet; N data-parallel ranks have their own, of which N parts "
        'of 1/N are as many bytes, sent twice; use offload.activations = "checkpoint_inputs"'
    ),
    "activation_checkpointing.contiguous_memory_optimization": _WITH_PARTITION,
    "activation_checkpointing.number_checkpoints": _WITH_PARTITION,
    "activation_checkpointing.cpu_checkpointing": (
        'this is offload.activations = "checkpoint_inputs"'
    ),
}
