"""Kernels that CUDA takes: those of attention, and families beside traces of the same modules."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support.cases.sampling import one_in
from tests.support.watched_calls import WatchedCalls
from tests.zreal.tracing.test_trace import records
from zreal.modules import modules
from zreal.modules.numerics import batches
from zreal.tracing.fakes.device_kernels import KernelChoices
from zreal.tracing.trace import trace
from zsim.autograd.lowered import LoweredModule
from zsim.autograd.lowering.lower_model import lower
from zsim.autograd.traced.model import TracedModel
from zsim.ir.ops import Alloc, Free
from zsim.models.checkpointing import Checkpointing
from zsim.models.families import gpt, huggingface, llama
from zsim.models.spec import ModelSpec
from zsim.models.training_options import Batch, Dtype

WIDTHS = (8, 10, 12, 16, 20, 24)
"""Widths of heads. Flash attention wants a multiple of 8, memory-efficient attention one of 4 in
float32."""


def family(
    name: str, width: int, batch: Batch, *, num_heads: int = 2, num_kv_heads: int = 0
) -> ModelSpec:
    """Two blocks, with as many heads for keys and values as for queries unless told otherwise."""
    length, hidden = batch.sequence_length, num_heads * width
    if name == "gpt":
        sizes = gpt.GptSizes(
            num_layers=2, hidden_size=hidden, num_heads=num_heads, vocabulary=11, attention="sdpa"
        )
        return gpt.build(sizes, name=name, sequence_length=length)
    shared = num_kv_heads or num_heads
    own = llama.LlamaSizes(
        num_layers=2, hidden_size=hidden, num_heads=num_heads, num_kv_heads=shared, feed_forward=40,
        vocabulary=11, attention="sdpa",
    )
    return llama.build(own, name=name, sequence_length=length)


def traced(spec: ModelSpec, batch: Batch, dtype: Dtype, **options: Any) -> Any:
    data = batches.inputs(spec, batch, seed=0, rank=0, step=0, micro_batch=0)
    return trace(modules.build(spec, seed=0), data, dtype=dtype, device="cuda", **options)


Change = tuple[bool, int]
"""Made (True) or freed (False), and the number of bytes."""


def changes(
    lowered: tuple[LoweredModule, ...]
) -> tuple[list[list[list[Change]]], list[Counter[Change]]]:
    """Changes of each forward, in order but for those that go together, and of each backward.

    Those of a backward are counted, as a node makes gradients and scratch together.
    """
    passes = [side.memory for module in lowered for side in (module.forward, module.backward)]
    nbytes = {
        event.buffer: event.nbytes for memory in passes for event in memory
        if isinstance(event, Alloc)
    }
    seen = [
        [
            (isinstance(event, Alloc), nbytes[event.buffer]) for event in memory
            if isinstance(event, Alloc | Free)
        ]
        for memory in passes
    ]
    stretches = [
        [(made, list(of)) for made, of in itertools.groupby(side, key=lambda change: change[0])]
        for side in seen[::2]
    ]
    return [[of if made else sorted(of) for made, of in side] for side in stretches], [
        Counter(side) for side in seen[1::2]
    ]


@pytest.mark.parametrize(
    ("name", "width", "dtype"),
    one_in(2, itertools.product(["gpt", "llama"], WIDTHS, ["bfloat16", "float32"])),
)
def test_heads_of_any_width_take_on_cuda_what_a_trace_of_the_module_takes(
    name: str, width: int, dtype: Dtype
) -> None:
    batch = Batch(micro_batch=2, sequence_length=20)
    spec = family(name, width, batch)
    model = traced(spec, batch, dtype)
    assert changes(model.lowered) == changes(lower(spec, batch=batch, dtype=dtype, device="cuda"))
    expected = records(spec, batch, name="fsdp2", dtype=dtype, device="cuda")
    assert records(model, batch, name="fsdp2", dtype=dtype, device="cuda") == expected


@pytest.mark.parametrize(("batch", "num_heads", "num_kv_heads"), [
    # keys and values are padded before they are expanded
    (Batch(micro_batch=2, sequence_length=20), 4, 2),
    # one head lies by token as it lies by head
    (Batch(micro_batch=1, sequence_length=20), 1, 1),
    (Batch(micro_batch=2, sequence_length=1), 4, 4),
])
def test_padded_heads_are_copied_where_they_do_not_lie_by_token_already(
    batch: Batch, num_heads: int, num_kv_heads: int
) -> None:
    spec = family("llama", 20, batch, num_heads=num_heads, num_kv_heads=num_kv_heads)
    model = traced(spec, batch, "bfloat16")
    assert changes(model.lowered) == changes(
        lower(spec, batch=batch, dtype="bfloat16", device="cuda")
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_heads_of_transformers_that_are_turned_lie_by_head_and_are_padded_as_they_lie(
    num_kv_heads: int, dtype: Dtype
) -> None:
    transformers = pytest.importorskip("transformers")
    given = {
        **{
            "num_hidden_layers": 2, "hidden_size": 80, "num_attention_heads": 4,
            "num_key_value_heads": num_kv_heads,
        },
        **{"intermediate_size": 40, "vocab_size": 11, "use_cache": False},
    }
    spec = huggingface.from_config({"model_type": "llama", **given})
    tokens = torch.zeros(2, 20, dtype=torch.int64)
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**given))
    model = trace(module, {"input_ids": tokens, "labels": tokens}, dtype=dtype, device="cuda")
    expected = lower(
        spec, batch=Batch(micro_batch=2, sequence_length=20), dtype=dtype, device="cuda"
    )
    for of_trace, of_family in zip(changes(model.lowered), changes(expected), strict=True):
        assert of_trace[1] == of_family[1]  # the first block


ASKED = {
    "full": Checkpointing(mode="full"),
    "no early stop": Checkpointing(mode="full", early_stop=False),
    "attention kept": Checkpointing(mode="selective", save=("attention",)),
    "linears kept": Checkpointing(mode="selective", save=("linear",)),
}


@cache
def recomputed(width: int, dtype: Dtype, batch: Batch) -> tuple[ModelSpec, TracedModel]:
    """A model, and the trace of it with each checkpointing that is asked for."""
    spec = family("llama", width, batch)
    return spec, traced(spec, batch, dtype, checkpointing=list(ASKED.values()))


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize(("width", "dtype"), [(16, "bfloat16"), (20, "bfloat16"), (10, "float32")])
def test_what_is_recomputed_of_attention_is_what_a_trace_recomputes(
    width: int, dtype: Dtype, asked: Checkpointing
) -> None:
    """Padded attention keeps the kernel's wide output under a policy; pads and the copy of its part
    are made again. The composite, which heads of 10 in float32 take, keeps nothing."""
    batch = Batch(micro_batch=2, sequence_length=20)
    spec, model = recomputed(width, dtype, batch)
    seen = model.modules_for(
        batch, dtype=dtype, device="cuda", casts_input=True, checkpointing=asked
    )
    assert changes(seen) == changes(
        lower(spec, batch=batch, dtype=dtype, device="cuda", checkpointing=asked)
    )


MASKS: dict[str, Callable[[torch.dtype], Tensor | None]] = {
    "none": lambda _: None, "boolean": lambda _: torch.ones(7, 7, dtype=torch.bool).tril(),
    "added": lambda dtype: torch.zeros(7, 7, dtype=dtype),
}


@pytest.mark.parametrize(("mask", "dtype", "width"), [
    ("none", torch.float32, 10), ("boolean", torch.float32, 10), ("added", torch.float32, 10),
    ("boolean", torch.bfloat16, 20), ("added", torch.bfloat16, 20), ("none", torch.float64, 16),
])
def test_where_no_fused_kernel_takes_the_heads_torchs_own_composite_runs(
    mask: str, dtype: torch.dtype, width: int
) -> None:
    def run(of_cuda: bool) -> list[str]:
        torch.manual_seed(0)
        heads = [torch.randn(2, 4, 7, width, dtype=dtype, requires_grad=True) for _ in range(3)]
        own = KernelChoices("cuda") if of_cuda else sdpa_kernel(SDPBackend.MATH)
        operators: list[str] = []
        with WatchedCalls(lambda func, *_: operators.append(str(func))), own:
            functional.scaled_dot_product_attention(
                *heads, attn_mask=MASKS[mask](dtype)
            ).sum().backward()
        return operators

    assert run(of_cuda=True) == run(of_cuda=False)


def test_values_of_another_width_than_queries_are_not_for_flash_attention() -> None:
    """Latent attention has queries with a part more: check_head_dim_size_flash in sdp_utils.cpp
    wants one width of all three."""

    class Latent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(16, 48)

        def forward(self, x: Tensor) -> Tensor:
            query, value = (
                self.project(x).unflatten(-1, (2, 24)).transpose(1, 2).split([16, 8], dim=-1)
            )
            return functional.scaled_dot_product_attention(query, query, value, is_causal=True)

    model = trace(
        Latent, [((3, 20, 16), "bfloat16")], units=["project"], dtype="bfloat16", device="cuda"
    )
    made = [
        (event.buffer, event.nbytes) for module in model.lowered for event in module.forward.memory
        if isinstance(event, Alloc)
    ]
    attention = [nbytes for name, nbytes in made if "_scaled_dot_product" in name]
    assert all("_efficient_attention" in name for name, _ in made if "_scaled_dot_product" in name)
    # as wide as the values, and of each row, padded to 32, a float
    assert attention[:2] == [2 * 3 * 2 * 20 * 8, 4 * 3 * 2 * 32]


@pytest.mark.parametrize("length", [20, 32])
def test_rows_of_a_mask_are_padded_to_16_for_memory_efficient_attention(length: int) -> None:
    """attention.cpp, pad_bias: the padded mask is a copy, and one that needs none is taken as it
    is."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(16, 16)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            heads = self.project(x).unflatten(-1, (2, 8)).transpose(1, 2)
            return functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)

    model = trace(
        Masked, [((3, length, 16), "float32"), ((length, length), "float32")], units=["project"],
        device="cuda",
    )
    forward = [event for module in model.lowered for event in module.forward.memory]
    made = [(event.buffer, event.nbytes) for event in forward if isinstance(event, Alloc)]
    pads = [nbytes for name, nbytes in made if "constant_pad_nd" in name]
    assert any("_scaled_dot_product_efficient_attention" in name for name, _ in made)
    assert pads == ([4 * 20 * 32] if length == 20 else [])
