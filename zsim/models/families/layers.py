"""Pieces that the families share: operators with their usual names, and the parameters that
operators have."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from zsim.models.operators import Operator
from zsim.models.spec import ROOT, ModelSpec, Module, Parameter, ParamGroup


def linear(
    name: str, source: str, output: str, in_features: int, out_features: int, *, bias: bool = True
) -> Operator:
    """A linear layer whose parameters are `name.weight` and, with `bias`, `name.bias`."""
    return Operator(
        kind="linear",
        name=name,
        inputs=(source,),
        output=output,
        weight=f"{name}.weight",
        bias=f"{name}.bias" if bias else "",
        in_features=in_features,
        out_features=out_features,
    )


def elementwise(kind: str, name: str, inputs: tuple[str, ...], output: str, width: int) -> Operator:
    """A residual, gelu or swiglu of `width` features."""
    return Operator(kind=kind, name=name, inputs=inputs, output=output, out_features=width)  # type: ignore[arg-type]


def dropped(share: float, name: str, value: str, width: int) -> tuple[tuple[Operator, ...], str]:
    """Dropout of `value`, none for a share of 0, and the name of what there is then."""
    return called_dropout(share, name, value, width) if share else ((), value)


def called_dropout(
    share: float, name: str, value: str, width: int
) -> tuple[tuple[Operator, ...], str]:
    """Dropout of `value` by a module, which is called for a share of 0 too and does nothing; and
    the name of what there is."""
    output = f"{value}_dropped"
    return (
        replace(elementwise("dropout", name, (value,), output, width), dropout=share),
    ), output


def norm(kind: str, name: str, source: str, output: str, width: int) -> Operator:
    """A layer_norm (weight and bias) or an rms_norm (weight)."""
    return Operator(
        kind=kind,  # type: ignore[arg-type]
        name=name,
        inputs=(source,),
        output=output,
        weight=f"{name}.weight",
        bias=f"{name}.bias" if kind == "layer_norm" else "",
        out_features=width,
    )


LossDtype = Literal["model", "float32"]
"""Dtype of the loss: that of the logits, or float32 after a cast, as in torchtitan and Hugging
Face."""


def cross_entropy(vocabulary: int, loss_dtype: LossDtype) -> tuple[Operator, ...]:
    """The mean cross-entropy of the logits against the targets, after a cast where one is asked
    for."""
    loss = Operator(
        kind="cross_entropy", name="loss", inputs=("logits", "targets"), output="loss",
        out_features=vocabulary,
    )
    if loss_dtype == "model":
        return (loss,)
    wide = replace(
        loss, kind="cast", name="logits", inputs=("logits",), output="logits_wide",
        dtype=loss_dtype,
    )
    return (wide, replace(loss, inputs=(wide.output, "targets"), dtype=loss_dtype))


def parameter_shapes(operator: Operator) -> tuple[Parameter, ...]:
    """The parameters of one operator, weight first, in torch's layout (linear: out × in)."""
    weight_shape = {
        "linear": (operator.out_features, operator.in_features),
        "embedding": (operator.num_embeddings, operator.out_features),
        "positions": (operator.num_embeddings, operator.out_features),
        "position_embedding": (operator.num_embeddings, operator.out_features),
        "conv1d": (operator.in_features, operator.out_features),
    }.get(operator.kind, (operator.out_features,))
    shapes = ((operator.weight, weight_shape), (operator.bias, (operator.out_features,)))
    return tuple(Parameter(fqn=fqn, shape=shape) for fqn, shape in shapes if fqn)


def parameters_of(*modules: Module) -> tuple[Parameter, ...]:
    """The parameters of `modules` in order of first use; a tied one counts once."""
    owned: dict[str, Parameter] = {}
    for module in modules:
        for operator in module.operators:
            for parameter in parameter_shapes(operator):
                owned.setdefault(parameter.fqn, parameter)
    return tuple(owned.values())


def embedding(kind: str, name: str, source: str, output: str, *, rows: int, width: int) -> Operator:
    """A table `name.weight` of `rows` × `width`: looked up by tokens ("embedding") or added by
    place ("positions")."""
    return Operator(
        kind=kind,  # type: ignore[arg-type]
        name=name,
        inputs=(source,),
        output=output,
        weight=f"{name}.weight",
        num_embeddings=rows,
        out_features=width,
    )


def head(final_norm: Operator, *, vocabulary: int, tied: bool, loss_dtype: LossDtype) -> Module:
    """The root's last module: the final norm from "x" to "n", the logits (with the embedding's
    weight if `tied`), the loss."""
    logits = linear("lm_head", "n", "logits", final_norm.out_features, vocabulary, bias=False)
    if tied:
        logits = replace(logits, weight="wte.weight")
    return Module(
        fqn="head", unit=ROOT,
        operators=(final_norm, logits, *cross_entropy(vocabulary, loss_dtype)),
    )


def language_model(
    name: str, *, family: str, embed: Module, blocks: tuple[Module, ...], head: Module
) -> ModelSpec:
    """A decoder with one unit per block and one, the root's, for embedding and head."""
    units = [ParamGroup(fqn=ROOT, parameters=parameters_of(embed, head))]
    units += [ParamGroup(fqn=block.fqn, parameters=parameters_of(block)) for block in blocks]
    return ModelSpec(name=name, family=family, modules=(embed, *blocks, head), units=tuple(units))
