"""Checks that a ModelSpec can run: sizes that divide, positions for every token, no empty model."""

from __future__ import annotations

from collections.abc import Iterator

from zsim.errors import ScenarioError
from zsim.models.operators import Operator
from zsim.models.spec import ModelSpec


def fit_problems(model: ModelSpec, sequence_length: int) -> tuple[str, ...]:
    """Refusals of `model` on sequences of that length, each once, with the scenario's key first."""
    refusals: list[str] = []
    if model.family == "mlp" and sequence_length != 1:
        refusals.append(f"batch.sequence_length: expected 1 for an mlp, which has no sequences, "
                     f"found {sequence_length}")
    if model.modules and not model.parameters:
        refusals.append("model: expected parameters, found none")
    for module in model.modules:
        for operator in module.operators:
            refusals += _problems(operator, sequence_length)
    return tuple(dict.fromkeys(refusals))[:20]


def require_dividing_heads(num_heads: int, hidden_size: int) -> None:
    """ScenarioError, with the nearest numbers of heads, where `num_heads` do not divide
    `hidden_size`."""
    if num_heads >= 1 and hidden_size % num_heads == 0:
        return
    around = (range(min(num_heads, hidden_size), 0, -1), range(num_heads + 1, hidden_size + 1))
    nearest = [
        next((heads for heads in heads_on_one_side if heads and hidden_size % heads == 0), None)
        for heads_on_one_side in around
    ]
    raise ScenarioError((f"model.sizes.num_heads: expected a divisor of hidden_size "
                         f"{hidden_size}, found {num_heads}; the nearest: "
                         f"{' and '.join(map(str, filter(None, nearest)))}",))


def _problems(operator: Operator, sequence_length: int) -> Iterator[str]:
    kind, heads = operator.kind, operator.num_heads
    if kind == "linear" and min(operator.in_features, operator.out_features) < 1:
        yield (
            f"model: {operator.name}: expected features of at least 1, found an empty linear layer"
        )
    if kind == "embedding" and min(operator.num_embeddings, operator.out_features) < 1:
        yield (
            f"model: {operator.name}: expected a vocabulary and features of at least 1, found an "
            f"empty embedding"
        )
    if kind == "positions" and operator.num_embeddings < sequence_length:
        yield (
            f"batch.sequence_length: expected at most {operator.num_embeddings}, the model's "
            f"positions, "
            f"found {sequence_length}"
        )
    shared, width = operator.num_kv_heads, operator.head_dim
    if kind == "attention" and (min(heads, shared, width) < 1 or heads % shared):
        yield f"model: {heads} heads cannot share {shared} key-value heads of {width} features"
    if kind == "rotary" and operator.head_dim % 2:
        yield f"model: expected an even head size for rotary positions, found {operator.head_dim}"
