"""The work of operators: FLOPs and bytes by closed forms, and laws that hold for every operator of
every preset."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.autograd.aten.operator_calls import Call, calls
from zsim.autograd.aten.sdpa import without_kernel
from zsim.autograd.lowering.lower_module import lower_each
from zsim.ir.ops import Alloc, Free
from zsim.models.families import build, huggingface, load_preset, presets
from zsim.models.families.gpt import GptSizes
from zsim.models.families.layers import linear
from zsim.models.operators import Operator, OperatorKind
from zsim.models.training_options import Batch, Device, Dtype, Optimizer
from zsim.strategies.building.optimizers import kernels

small = st.integers(1, 64)


def _attention(
    implementation: str, *, heads: int = 4, shared: int = 4, head_dim: int = 8, causal: bool = True
) -> Operator:
    return Operator(
        kind="attention", name="attn", inputs=("q", "k", "v"), output="mixed", num_heads=heads,
        num_kv_heads=shared, head_dim=head_dim, implementation=implementation, causal=causal,
    )


def _flops(made: tuple[Call, ...]) -> tuple[int, int]:
    return sum(call.flops for call in made), sum(call.backward_flops for call in made)


def _operators(name: str) -> list[Operator]:
    return [
        op for module in load_preset(name, sequence_length=16).modules for op in module.operators
    ]


@given(b=small, s=small, m=small, n=small)
def test_a_linear_is_two_flops_per_weight_and_token_and_twice_that_backward(
    b: int, s: int, m: int, n: int
) -> None:
    (call,) = calls(
        linear("fc", "x", "y", m, n), batch=Batch(micro_batch=b, sequence_length=s), dtype="float32"
    )
    assert call == Call(
        operator="linear", inputs=("x",), output="y", nbytes=4 * b * s * n, saves=("x",),
        gradients=("x", "fc.weight", "fc.bias"), summed=(("fc.bias", ()),),
        parameters=("fc.weight", "fc.bias"), addmm=True, flops=2 * b * s * m * n,
        backward_flops=4 * b * s * m * n, moved=4 * (b * s * m + m * n + b * s * n),
        backward_moved=8 * (b * s * m + m * n + b * s * n), shape=(1, b * s, n, m),
    )


@given(b=small, s=small, shared=st.integers(1, 4), group=st.integers(1, 4), d=small)
def test_explicit_attention_is_dense_in_flops_however_the_heads_are_shared(
    b: int, s: int, shared: int, group: int, d: int
) -> None:
    batch = Batch(micro_batch=b, sequence_length=s)
    made = calls(
        _attention("explicit", heads=shared * group, shared=shared, head_dim=d), batch=batch,
        dtype="bfloat16",
    )
    dense = 4 * b * s * s * shared * group * d
    assert _flops(made) == (dense, 2 * dense)


@given(b=small, s=small, heads=st.integers(1, 8), half=small)
def test_causal_sdpa_does_half_the_work_of_dense_sdpa_and_recomputes_the_scores_backward(
    b: int, s: int, heads: int, half: int
) -> None:
    """Backward has five matmuls where forward has two (Dao 2022, FlashAttention, algorithm 4)."""
    batch, d = Batch(micro_batch=b, sequence_length=s), 2 * half
    causal = calls(
        _attention("sdpa", heads=heads, shared=heads, head_dim=d), batch=batch, dtype="float32"
    )
    dense = calls(
        _attention("sdpa", heads=heads, shared=heads, head_dim=d, causal=False), batch=batch,
        dtype="float32",
    )
    work = 4 * b * s * s * heads * d
    assert _flops(dense) == (work, work * 5 // 2)
    assert _flops(causal) == (work // 2, work * 5 // 4)


def test_explicit_attention_keeps_the_probabilities_and_sdpa_does_not() -> None:
    batch = Batch(micro_batch=2, sequence_length=128)
    scores = 4 * 2 * 4 * 128 * 128
    made = {
        name: calls(_attention(name), batch=batch, dtype="float32") for name in ("explicit", "sdpa")
    }
    assert max(call.nbytes for call in made["explicit"]) == scores
    assert [(call.nbytes, call.keeps) for call in made["sdpa"]] == [
        (4 * 2 * 128 * 32, (("mixed.logsumexp", 4 * 2 * 128 * 4),))
    ]


def test_attention_kernels_of_cuda_round_rows_up_and_keep_the_random_state() -> None:
    """Rows of 100: flash rounds them to 128 in backward, memory-efficient attention to 32 in both;
    heads of 40 to 64."""
    batch = Batch(micro_batch=2, sequence_length=100)

    def made(dtype: Dtype, *, shared: int) -> Call:
        (call,) = calls(
            _attention("sdpa", shared=shared, head_dim=40), batch=batch, dtype=dtype, device="cuda"
        )
        return call

    flash = made("bfloat16", shared=4)
    assert flash.keeps == (
        ("mixed.logsumexp", 4 * 2 * 4 * 100), ("mixed.random_state", 16), ("mixed.unused", 8),
    )
    assert flash.backward_scratch == (4 * 2 * 4 * 128, 4 * 2 * 4 * 128 * 64)
    expanded = 2 * 2 * 100 * 4 * 40
    assert made("bfloat16", shared=2).backward_scratch == (
        *flash.backward_scratch, expanded, expanded,
    )
    efficient = made("float32", shared=4)
    assert efficient.keeps == (
        ("mixed.logsumexp", 4 * 2 * 4 * 128), ("mixed.seed", 8), ("mixed.offset", 8),
    )
    assert efficient.backward_scratch == (4 * 2 * 4 * 128,)
    assert (
        len(calls(_attention("sdpa", shared=2), batch=batch, dtype="float32", device="cuda")) > 10
    ), "the composite"
    assert (
        len(calls(_attention("sdpa", head_dim=42), batch=batch, dtype="float32", device="cuda"))
        > 10
    ), "the composite"


@pytest.mark.parametrize(
    ("width", "columns"),
    [(16, 32), (96, 96), (104, 128), (128, 128), (136, 192), (160, 192), (200, 256)],
)
def test_scratch_of_flash_attention_rounds_heads_to_32_up_to_128_and_to_64_above(
    width: int, columns: int
) -> None:
    """flash_api.cpp, mha_bwd: round_multiple(head_size, head_size <= 128 ? 32 : 64)."""
    batch = Batch(micro_batch=2, sequence_length=100)
    (call,) = calls(
        _attention("sdpa", head_dim=width), batch=batch, dtype="bfloat16", device="cuda"
    )
    assert call.backward_scratch[1] == 4 * 2 * 4 * 128 * columns


@pytest.mark.parametrize(("attention", "shared", "dtype", "device", "message"), [
    ("efficient", 4, "float32", "cpu", "memory-efficient attention has no kernel on a CPU"),
    ("efficient", 2, "bfloat16", "cuda", "memory-efficient attention has no kernel for "
                                         "grouped keys and values"),
    ("efficient", 4, "float32", "cuda", ""),
    ("flash", 4, "float32", "cuda", "flash attention has no kernel for float32 on CUDA"),
    ("flash", 4, "float32", "cpu", ""), ("math", 2, "float32", "cuda", ""),
])
def test_a_kernel_that_torch_does_not_have_is_named(
    attention: str, shared: int, dtype: Dtype, device: Device, message: str
) -> None:
    nbytes = 4 if dtype == "float32" else 2
    assert (
        without_kernel(_attention(attention, shared=shared), device=device, nbytes=nbytes)
        == message
    )


@pytest.mark.parametrize(
    ("width", "dtype", "multiple"),
    [(10, "float32", 4), (12, "float32", 0), (12, "bfloat16", 8), (24, "bfloat16", 0)],
)
def test_memory_efficient_attention_that_is_asked_for_wants_heads_that_it_has_a_kernel_for(
    width: int, dtype: Dtype, multiple: int
) -> None:
    message = (
        f"memory-efficient attention has no kernel for heads of {width}, which is no multiple of "
        f"{multiple}"
        if multiple
        else ""
    )
    nbytes = 4 if dtype == "float32" else 2
    assert (
        without_kernel(_attention("efficient", head_dim=width), device="cuda", nbytes=nbytes)
        == message
    )


def test_a_forward_of_a_gpt_is_two_flops_per_token_and_matmul_weight_plus_attention() -> None:
    """Kaplan et al. 2020, table 1: 2·N per token, and 4·s·d per token and layer for causal-as-dense
    attention."""
    spec, batch = load_preset("gpt-2-124m"), Batch(micro_batch=2, sequence_length=512)
    operators = [op for module in spec.modules for op in module.operators]
    weights = 12 * 12 * 768**2 + 50257 * 768
    forward = 2 * 512 * (2 * weights + 12 * 4 * 512 * 768)
    assert _flops(
        tuple(call for op in operators for call in calls(op, batch=batch, dtype="float32"))
    ) == (forward, 2 * forward)


SIZES = {
    "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 160,
    "vocab_size": 320,
}
CONFIGS = (
    SIZES | {"model_type": "llama"}, SIZES | {"model_type": "gemma", "num_key_value_heads": 4},
    SIZES | {"model_type": "phi3"},
    {
        "model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 320,
        "n_positions": 64,
    },
)


def test_every_kind_of_operator_is_in_some_preset_or_module_of_transformers() -> None:
    kinds = {op.kind for name in ("mlp-tiny", "gpt-tiny", "llama-tiny") for op in _operators(name)}
    kinds |= {
        op.kind for config in CONFIGS for module in huggingface.from_config(config).modules
        for op in module.operators
    }
    assert kinds == set(get_args(OperatorKind)) - {
        "traced", "cast"
    }  # a cast is there where loss_dtype asks for it


@pytest.mark.parametrize("name", presets())
def test_only_matmuls_count_flops_and_everything_moves_bytes(name: str) -> None:
    batch = Batch(micro_batch=1, sequence_length=16)
    for op in _operators(name):
        made = calls(op, batch=batch, dtype="float32")
        assert (_flops(made)[0] > 0) == (op.kind in ("linear", "attention")), op
        assert sum(call.moved for call in made) > 0, op
        still = [call for call in made if not call.moved]
        assert all(call.flops == call.backward_flops == 0 for call in still), op
        # the gradient of a view is copied where it cannot be a view
        assert all(call.view or not call.backward_moved for call in still), op


@pytest.mark.parametrize("name", ["mlp-tiny", "gpt-tiny", "llama-tiny"])
def test_work_grows_with_the_micro_batch_and_flops_do_not_depend_on_the_dtype(name: str) -> None:
    first, two = Batch(micro_batch=1, sequence_length=16), Batch(micro_batch=2, sequence_length=16)
    for op in _operators(name):
        single, double = (calls(op, batch=batch, dtype="float32") for batch in (first, two))
        assert _flops(double) == tuple(2 * flops for flops in _flops(single))
        assert _flops(calls(op, batch=first, dtype="bfloat16")) == _flops(single)
        casts = op.kind == "rms_norm"  # in float32 whatever the dtype, with a cast before and after
        narrow, whole = (
            sum(call.moved for call in made)
            for made in (calls(op, batch=first, dtype="bfloat16"), single)
        )
        assert (narrow >= whole if casts else narrow <= whole < 4 * narrow), op


@pytest.mark.parametrize("name", ["mlp-tiny", "gpt-tiny", "llama-tiny"])
def test_the_last_call_makes_the_value_that_the_operator_promises(name: str) -> None:
    for op in _operators(name):
        made = calls(op, batch=Batch(micro_batch=1, sequence_length=16), dtype="float32")
        assert made[-1].output == op.output
        known = {*op.inputs}
        for call in made:
            assert set(call.inputs) <= known
            known |= {call.output, *call.also}


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
def test_a_gpt_block_keeps_for_backward_what_its_operators_need(attention):
    """Elements per token of width d: d each of x, n1, q, k, v, mixed, h, n2; 4d of wide and act.

    Each norm has two statistics. sdpa keeps a float32 logsumexp per head besides; explicit
    attention the probabilities and the mask.
    """
    width, heads, length, batch = 8, 2, 4, Batch(micro_batch=3, sequence_length=4)

    def held(num_layers: int) -> int:
        model = build(
            "gpt",
            GptSizes(
                num_layers=num_layers, hidden_size=width, num_heads=heads, vocabulary=5,
                attention=attention,
            ),
            name="x", sequence_length=length,
        )
        events = [
            event for module in lower_each(model, batch=batch, dtype="float32")
            for event in module.forward.memory
        ]
        sizes = {event.buffer: event.nbytes for event in events if isinstance(event, Alloc)}
        return sum(sizes.values()) - sum(
            sizes[event.buffer] for event in events if isinstance(event, Free)
        )

    tokens = 3 * length
    kept = 4 * tokens * (8 * width + 2 * 4 * width + 4)
    kept += (
        4 * tokens * heads if attention == "sdpa" else 4 * tokens * length * heads + length * length
    )
    assert held(3) - held(2) == kept


def test_a_fused_step_reads_and_writes_parameter_and_states_and_reads_the_gradient():
    fused = Optimizer(name="adamw", implementation="fused")
    (step,) = kernels((10, 6), optimizer=fused, dtype="float32", device="cuda")
    assert step.nbytes == 7 * 16 * 4
