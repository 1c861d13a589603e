"""Lowering modules that are alike once is lowering each of them."""

from dataclasses import replace

import pytest

from zsim.autograd.lowering.lower_model import lower
from zsim.autograd.lowering.lower_module import lower_each
from zsim.models.families import gpt, llama, mlp
from zsim.models.families.gpt import GptSizes
from zsim.models.families.llama import LlamaSizes
from zsim.models.families.mlp import MlpSizes
from zsim.models.training_options import Batch

BATCH = Batch(micro_batch=2, sequence_length=8)


def models(layers):
    dims = {"even": (8,) * (layers + 1), "narrow once": (8, 8, 8, 8, 5, *(8,) * layers)}
    yield from (
        mlp.build(MlpSizes(dims=dims[name], hidden=6, num_classes=3), name=name, sequence_length=1)
        for name in dims
    )
    small = GptSizes(num_layers=layers, hidden_size=8, num_heads=2, vocabulary=11)
    yield gpt.build(small, name="gpt", sequence_length=8)
    yield gpt.build(replace(small, tied=False, attention="sdpa"), name="gpt", sequence_length=8)
    grouped = LlamaSizes(
        num_layers=layers, hidden_size=8, num_heads=4, num_kv_heads=2, feed_forward=12,
        vocabulary=11,
    )
    yield llama.build(grouped, name="llama", sequence_length=8)
    yield llama.build(
        replace(grouped, attention="explicit", qkv_bias=True), name="llama", sequence_length=8
    )


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 12, 13])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_modules_traced_once_are_what_tracing_each_gives(layers, dtype):
    for model in models(layers):
        for casts_input in (False, True):
            options = {"batch": BATCH, "dtype": dtype, "casts_input": casts_input}
            assert lower(model, **options) == lower_each(model, **options)


def test_blocks_that_differ_in_one_size_are_traced_apart():
    wide = GptSizes(num_layers=6, hidden_size=8, num_heads=2, vocabulary=11)
    model = gpt.build(wide, name="gpt", sequence_length=8)
    odd = gpt.build(replace(wide, feed_forward=20), name="odd", sequence_length=8)
    index = next(i for i, module in enumerate(model.modules) if module.fqn == "blocks.3")
    modules = (*model.modules[:index], odd.modules[index], *model.modules[index + 1 :])
    mixed = replace(model, modules=modules)
    assert lower(mixed, batch=BATCH, dtype="float32") == lower_each(
        mixed, batch=BATCH, dtype="float32"
    )
