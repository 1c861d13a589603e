"""Forms of norms and of the loss: "fused" is torch's own function, "composite" the single calls of
the model's own code."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from zsim.models.operators import COMPOSITE, Operator
from zsim.models.spec import ModelSpec

Form = Literal["fused", "composite"]


def in_form(model: ModelSpec, *, norms: Form = "fused", loss: Form = "fused") -> ModelSpec:
    """`model` with its RMSNorms and its cross-entropy in these forms.

    A composite norm is LlamaRMSNorm's: float32 but for the product with the weight. A composite
    loss is Megatron's and nanotron's, whose backward makes the gradient in the softmax.
    """
    forms = {"rms_norm": norms, "cross_entropy": loss}
    kinds = {kind for kind, form in forms.items() if form == COMPOSITE}

    def formed(operator: Operator) -> Operator:
        return (
            replace(operator, implementation=COMPOSITE) if operator.kind in kinds else operator
        )

    if not kinds:
        return model
    modules = tuple(
        replace(module, operators=tuple(map(formed, module.operators))) for module in model.modules
    )
    return replace(model, modules=modules)
