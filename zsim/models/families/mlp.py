"""mlp: blocks of linear, GELU, linear without residual, then a classifier that belongs to the root.
"""

from __future__ import annotations

from dataclasses import dataclass

from zsim.errors import ScenarioError
from zsim.models.families.layers import LossDtype, cross_entropy, linear, parameters_of
from zsim.models.family import Family
from zsim.models.operators import Operator
from zsim.models.spec import ROOT, ModelSpec, Module, ParamGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSizes:
    """Sizes of an mlp, which has one block less than `dims`."""

    dims: tuple[int, ...]
    """Widths before, between and after blocks."""
    hidden: int
    """Width inside each block."""
    num_classes: int
    """Classes of the classifier."""
    loss_dtype: LossDtype = "model"
    """Dtype of the loss: the "model"'s, or logits cast to "float32" before it."""


def build(sizes: MlpSizes, *, name: str, sequence_length: int) -> ModelSpec:
    """The ModelSpec; the input is float, (micro_batch, dims[0]), one token per sequence."""
    if not sizes.dims:
        raise ScenarioError(("model.sizes.dims: expected the widths before, between and after "
                             "blocks, found none",))
    modules = []
    for i, (width, out) in enumerate(zip(sizes.dims, sizes.dims[1:], strict=False)):
        fqn = f"blocks.{i}"
        modules.append(
            Module(
                fqn=fqn, unit=fqn,
                operators=(
                    linear(f"{fqn}.fc1", "x", "wide", width, sizes.hidden),
                    Operator(
                        kind="gelu", name=f"{fqn}.gelu", inputs=("wide",), output="act",
                        out_features=sizes.hidden,
                    ),
                    linear(f"{fqn}.fc2", "act", "y", sizes.hidden, out),
                ),
            )
        )
    head = Module(
        fqn="head",
        unit=ROOT,
        operators=(
            linear("head", "x", "logits", sizes.dims[-1], sizes.num_classes),
            *cross_entropy(sizes.num_classes, sizes.loss_dtype),
        ),
    )
    units = [ParamGroup(fqn=ROOT, parameters=parameters_of(head))]
    units += [ParamGroup(fqn=module.fqn, parameters=parameters_of(module)) for module in modules]
    return ModelSpec(name=name, family="mlp", modules=(*modules, head), units=tuple(units))


FAMILY = Family(sizes=MlpSizes, build=build)
