"""The real module of a ModelSpec: its parameters and FLOPs, the numbers of torch's own layers, the
same every time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from zreal.modules import modules
from zreal.modules.initial_values import DTYPES
from zreal.modules.numerics import batches
from zreal.modules.operators import apply
from zsim.autograd.aten.operator_calls import calls
from zsim.autograd.lowering.lower_model import lower
from zsim.models.families import gpt, llama, load_preset
from zsim.models.operators import Operator
from zsim.models.spec import ModelSpec
from zsim.models.training_options import Batch

TINY = ("mlp-tiny", "mlp-uneven", "gpt-tiny", "llama-tiny")
BATCH = Batch(micro_batch=2, sequence_length=16)


def _batch(name: str) -> Batch:
    return Batch(micro_batch=3) if name.startswith("mlp") else BATCH


def _spec(name: str, attention: str | None = None) -> ModelSpec:
    return load_preset(name, sequence_length=_batch(name).sequence_length, attention=attention)


def _data(
    spec: ModelSpec, batch: Batch, *, seed: int = 0, rank: int = 0, dtype: str = "float32"
) -> tuple[Tensor, Tensor]:
    return batches.inputs(spec, batch, seed=seed, rank=rank, step=0, micro_batch=0, dtype=dtype)


def _loss(
    name: str, *, attention: str | None = None, dtype: str = "float32"
) -> tuple[modules.Model, Tensor]:
    spec = _spec(name, attention)
    model = modules.build(spec, seed=1, dtype=dtype)
    loss: Tensor = model(*_data(spec, _batch(name), dtype=dtype))
    return model, loss


@pytest.mark.parametrize("name", [*TINY, "gpt-small", "llama-small"])
def test_a_module_has_the_parameters_of_its_spec_by_fqn_and_shape(name: str) -> None:
    spec = _spec(name)
    shapes = {
        fqn: tuple(parameter.shape)
        for fqn, parameter in modules.build(spec, seed=0).named_parameters()
    }
    assert shapes == {parameter.fqn: parameter.shape for parameter in spec.parameters}
    assert (
        sum(parameter.numel() for parameter in modules.build(spec, seed=0).parameters())
        == spec.num_parameters
    )


@pytest.mark.parametrize("name", TINY)
def test_each_unit_lists_its_parameters_in_the_order_of_torch(name: str) -> None:
    spec = _spec(name)
    model = modules.build(spec, seed=0)
    for index, block in enumerate(model.blocks):
        unit = spec.units[index + 1]
        assert [f"blocks.{index}.{fqn}" for fqn, _ in block.named_parameters()] == [
            p.fqn for p in unit.parameters
        ]
    root = [fqn for fqn, _ in model.named_parameters() if not fqn.startswith("blocks.")]
    assert root == [parameter.fqn for parameter in spec.units[0].parameters]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
@pytest.mark.parametrize("name", TINY)
def test_backward_gives_every_parameter_a_finite_gradient_of_its_dtype(
    name: str, attention: str, dtype: str
) -> None:
    model, loss = _loss(name, attention=attention, dtype=dtype)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.shape == ()
    for fqn, parameter in model.named_parameters():
        assert parameter.grad is not None, fqn
        assert parameter.grad.dtype == DTYPES[dtype]
        assert bool(parameter.grad.isfinite().all()), fqn
        assert bool(parameter.grad.any()), fqn


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_explicit_attention_and_sdpa_give_the_same_loss_and_gradients(name: str) -> None:
    (explicit, explicit_loss), (fused, fused_loss) = (
        _loss(name, attention=kind) for kind in ("explicit", "sdpa")
    )
    for loss in (explicit_loss, fused_loss):
        loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(explicit_loss, fused_loss)
    for of_explicit, of_fused in zip(explicit.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(of_explicit.grad, of_fused.grad, rtol=1e-4, atol=1e-6)


def test_a_gpt_block_computes_what_the_encoder_layer_of_torch_does() -> None:
    sizes = gpt.GptSizes(num_layers=1, hidden_size=32, num_heads=4, vocabulary=7)
    block = modules.build(gpt.build(sizes, name="g", sequence_length=9), seed=3).blocks[0]
    ours = dict(block.named_parameters())
    layer = nn.TransformerEncoderLayer(
        32, 4, 128, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    theirs = {
        f"self_attn.in_proj_{kind}": torch.cat([ours[f"attn.{part}.{kind}"] for part in "qkv"])
        for kind in ("weight", "bias")
    }
    names = {"self_attn.out_proj": "attn.proj", "linear1": "mlp.fc", "linear2": "mlp.proj"}
    names |= {"norm1": "ln_1", "norm2": "ln_2"}
    theirs |= {
        f"{a}.{kind}": ours[f"{b}.{kind}"] for a, b in names.items() for kind in ("weight", "bias")
    }
    layer.load_state_dict(theirs)
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    mask = nn.Transformer.generate_square_subsequent_mask(9)
    torch.testing.assert_close(block(x), layer(x, src_mask=mask, is_causal=True))


def test_rotary_scores_depend_only_on_how_far_apart_two_tokens_are() -> None:
    op = Operator(kind="rotary", name="r", inputs=("q",), output="qr", num_heads=1, head_dim=8)
    query, key = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    turned = [
        apply(op, {"q": row.expand(1, 12, 8)}, weight=None, bias=None) for row in (query, key)
    ]
    scores = (turned[0] @ turned[1].transpose(-2, -1))[0]
    for distance in range(-11, 12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    torch.testing.assert_close(scores.diagonal(), (query @ key).expand(12))


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_a_token_never_sees_a_later_one(name: str) -> None:
    spec = _spec(name)
    block = modules.build(spec, seed=0).blocks[0]
    x = torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[:, 10:] += 1.0
    assert torch.equal(block(x)[:, :10], block(changed)[:, :10])
    assert not torch.equal(block(x)[:, 10:], block(changed)[:, 10:])


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_flops_of_explicit_attention_equal_those_that_torch_counts(name: str) -> None:
    assert _counted(name, "explicit") == _predicted(name, "explicit")


@pytest.mark.parametrize("name", ["mlp-tiny", "mlp-uneven"])
def test_flops_of_an_mlp_equal_those_that_torch_counts(name: str) -> None:
    assert _counted(name, None) == _predicted(name, None)



def _counted(name: str, attention: str | None) -> tuple[int, int]:
    spec = _spec(name, attention)
    model, data = modules.build(spec, seed=0), _data(spec, _batch(name))
    with FlopCounterMode(display=False) as forward:
        loss = model(*data)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def _predicted(name: str, attention: str | None) -> tuple[int, int]:
    lowered = lower(_spec(name, attention), batch=_batch(name), dtype="float32")
    return (
        sum(kernel.flops for module in lowered for kernel in module.forward.kernels),
        sum(kernel.flops for module in lowered for kernel in module.backward.kernels),
    )


@pytest.mark.parametrize("causal", [True, False])
def test_flops_of_sdpa_are_those_of_torch_halved_when_causal(causal: bool) -> None:
    op = Operator(
        kind="attention", name="a", inputs=("q", "k", "v"), output="o", num_heads=4, num_kv_heads=4,
        head_dim=8, implementation="sdpa", causal=causal,
    )
    (call,) = calls(op, batch=BATCH, dtype="float32")
    shape = (2, 4, 16, 8)
    share = 2 if causal else 1
    assert call.flops * share == sdpa_flop_count(shape, shape, shape)
    assert call.backward_flops * share == sdpa_backward_flop_count(shape, shape, shape, shape)


@pytest.mark.parametrize("name", TINY)
def test_parameters_come_from_the_seed_and_the_fqn_alone(name: str) -> None:
    first, again, other = (modules.build(_spec(name), seed=seed).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(first[fqn], again[fqn]) for fqn in first)
    assert not any(torch.equal(first[fqn], other[fqn]) for fqn in first)
    torch.manual_seed(99)
    shallow = modules.build(_spec(name), seed=5).blocks[0].state_dict()
    assert all(torch.equal(shallow[fqn], first[f"blocks.0.{fqn}"]) for fqn in shallow)


def test_bfloat16_parameters_are_the_rounded_float32_ones() -> None:
    spec = _spec("llama-tiny")
    wide, narrow = (
        modules.build(spec, seed=5, dtype=dtype).state_dict() for dtype in ("float32", "bfloat16")
    )
    assert all(torch.equal(wide[fqn].bfloat16(), narrow[fqn]) for fqn in wide)


@pytest.mark.parametrize("name", TINY)
def test_inputs_differ_by_seed_rank_step_and_micro_batch_and_by_nothing_else(name: str) -> None:
    spec, batch = _spec(name), _batch(name)
    keys = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]

    def made(key: tuple[int, int, int, int]) -> Tensor:
        seed, rank, step, micro_batch = key
        return batches.inputs(
            spec, batch, seed=seed, rank=rank, step=step, micro_batch=micro_batch
        )[0]

    torch.manual_seed(0)
    first = [made(key) for key in keys]
    torch.manual_seed(1)
    for i, again in enumerate(keys):
        for j, tensor in enumerate(first):
            assert torch.equal(made(again), tensor) == (i == j)


def test_the_targets_of_a_language_model_are_its_tokens_one_later() -> None:
    spec = _spec("gpt-tiny")
    tokens, targets = _data(spec, BATCH)
    assert (tokens.shape, tokens.dtype, targets.shape) == ((2, 16), torch.int64, (2, 16))
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 257


def test_the_input_of_an_mlp_is_one_float_vector_per_sequence() -> None:
    x, targets = _data(_spec("mlp-uneven"), Batch(micro_batch=3), dtype="bfloat16")
    assert (x.shape, x.dtype, targets.shape, targets.dtype) == (
        (3, 25), torch.bfloat16, (3,), torch.int64,
    )


def test_values_are_dropped_after_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = llama.LlamaSizes(
        num_layers=1, hidden_size=8, num_heads=2, feed_forward=12, vocabulary=11
    )
    block = modules.build(llama.build(sizes, name="l", sequence_length=4), seed=0).blocks[0]
    log = []

    def spy(
        op: Operator, values: dict[str, Tensor], *, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        log.append(
            (op.name.removeprefix("blocks.0."), " ".join(sorted(values.keys() - {"tokens"})))
        )
        return apply(op, values, weight=weight, bias=bias)

    monkeypatch.setattr(modules, "apply", spy)
    block(torch.zeros(1, 4, 8))
    assert log == [
        ("norm_1", "x"), ("attn.q", "n1 x"), ("attn.k", "n1 q x"), ("attn.v", "k n1 q x"),
        ("attn.rotary_q", "k q v x"), ("attn.rotary_k", "k qr v x"), ("attn", "kr qr v x"),
        ("attn.o", "mixed x"), ("add_1", "a x"), ("norm_2", "h"), ("mlp.gate", "h n2"),
        ("mlp.up", "gate h n2"), ("mlp.swiglu", "gate h up"), ("mlp.down", "act h"),
        ("add_2", "h m"),
    ]


def test_a_tied_head_is_the_embedding_itself_and_gets_one_gradient() -> None:
    model, loss = _loss("gpt-tiny")
    loss.backward()  # type: ignore[no-untyped-call]
    assert "lm_head.weight" not in dict(model.named_parameters())
    gradient = dict(model.named_parameters())["wte.weight"].grad
    assert gradient is not None
    assert bool(gradient.any(dim=1).all()), (
        "rows of tokens that never occur get theirs from the head"
    )
