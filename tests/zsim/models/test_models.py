"""Families and presets: parameter counts as published, names as torch has them, errors that can be
mended."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.errors import ScenarioError
from zsim.models.families import FAMILIES, gpt, llama, load_preset, mlp, preset, presets
from zsim.models.spec import ROOT, ModelSpec, Module, Parameter, ParamGroup

PUBLISHED = {
    "gpt-2-124m": 124_439_808, "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320,
    "llama-2-34b": 33_743_970_304, "llama-2-70b": 68_976_648_192, "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496, "llama-3-405b": 405_853_388_800, "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
}
MPT = {
    "mpt-125m": (12, 768), "mpt-350m": (24, 1024), "mpt-760m": (24, 1536), "mpt-1b": (24, 2048),
    "mpt-3b": (32, 2560), "mpt-7b": (32, 4096), "mpt-13b": (40, 5120), "mpt-30b": (48, 7168),
    "mpt-70b": (80, 8192),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_exactly_the_published_number_of_parameters(name: str) -> None:
    assert load_preset(name).num_parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", MPT)
def test_an_mpt_preset_has_the_parameters_of_its_closed_form(name: str) -> None:
    layers, d = MPT[name]
    assert (
        load_preset(name).num_parameters
        == layers * (12 * d * d + 13 * d) + 2 * d + 50368 * d + 2048 * d
    )


def test_a_loss_in_float32_reads_a_wide_copy_of_the_logits() -> None:
    sizes = gpt.GptSizes(
        num_layers=1, hidden_size=8, num_heads=2, vocabulary=11, loss_dtype="float32"
    )
    operators = gpt.build(sizes, name="gpt", sequence_length=8).modules[-1].operators
    assert [(op.kind, op.inputs, op.output, op.dtype) for op in operators[1:]] == [
        ("linear", ("n",), "logits", ""), ("cast", ("logits",), "logits_wide", "float32"),
        ("cross_entropy", ("logits_wide", "targets"), "loss", "float32"),
    ]


def test_gpt_3_is_within_three_thousandths_of_175e9_parameters() -> None:
    assert abs(load_preset("gpt-3-175b").num_parameters - 175e9) <= 0.003 * 175e9


def test_the_presets_are_these_and_each_says_where_its_sizes_come_from() -> None:
    small = {f"{family}-{size}" for family in ("mlp", "gpt", "llama") for size in ("tiny", "small")}
    assert set(PUBLISHED) | set(MPT) | small | {"gpt-3-175b", "mlp-uneven"} == set(presets())
    assert all(len(preset(name).source) > 20 for name in presets())


@pytest.mark.parametrize("name", presets())
def test_units_own_each_parameter_once_with_the_root_first(name: str) -> None:
    spec = load_preset(name, sequence_length=16)
    fqns = [parameter.fqn for parameter in spec.parameters]
    blocks = [module.fqn for module in spec.modules if module.unit != ROOT]
    assert len(fqns) == len(set(fqns))
    assert [unit.fqn for unit in spec.units] == [ROOT, *blocks]
    assert blocks == [f"blocks.{i}" for i in range(len(blocks))]
    used = {
        fqn for module in spec.modules for op in module.operators for fqn in (op.weight, op.bias)
        if fqn
    }
    assert used == set(fqns)


@pytest.mark.parametrize("name", presets())
def test_operators_read_only_values_that_are_there(name: str) -> None:
    for module in load_preset(name, sequence_length=16).modules:
        known = {"x", "tokens", "targets"}
        for operator in module.operators:
            assert set(operator.inputs) <= known, operator.name
            known.add(operator.output)


def test_a_gpt_block_owns_its_parameters_in_torch_order_and_the_root_the_tied_embedding() -> None:
    sizes = gpt.GptSizes(num_layers=1, hidden_size=8, num_heads=2, vocabulary=11, max_positions=5)
    spec = gpt.build(sizes, name="g", sequence_length=4)
    linears = {"attn.q": (8, 8), "attn.k": (8, 8), "attn.v": (8, 8), "attn.proj": (8, 8)}
    expected = [("ln_1.weight", (8,)), ("ln_1.bias", (8,))]
    for name, shape in linears.items():
        expected += [(f"{name}.weight", shape), (f"{name}.bias", shape[:1])]
    expected += [("ln_2.weight", (8,)), ("ln_2.bias", (8,))]
    expected += [
        ("mlp.fc.weight", (32, 8)), ("mlp.fc.bias", (32,)), ("mlp.proj.weight", (8, 32)),
        ("mlp.proj.bias", (8,)),
    ]
    root = (
        ("wte.weight", (11, 8)), ("wpe.weight", (5, 8)), ("ln_f.weight", (8,)), ("ln_f.bias", (8,)),
    )
    assert spec.units == (
        ParamGroup(
            fqn=ROOT, parameters=tuple(Parameter(fqn=fqn, shape=shape) for fqn, shape in root)
        ),
        ParamGroup(
            fqn="blocks.0",
            parameters=tuple(
                Parameter(fqn=f"blocks.0.{fqn}", shape=shape) for fqn, shape in expected
            ),
        ),
    )


def test_a_tied_llama_head_names_the_embedding_and_saves_its_parameters() -> None:
    def spec(tied: bool) -> ModelSpec:
        sizes = llama.LlamaSizes(
            num_layers=1, hidden_size=8, num_heads=2, feed_forward=12, vocabulary=11, tied=tied
        )
        return llama.build(sizes, name="l", sequence_length=4)

    assert spec(False).num_parameters - spec(True).num_parameters == 8 * 11
    assert spec(True).modules[-1].operators[1].weight == "wte.weight"


@given(
    dims=st.lists(st.integers(1, 200), min_size=2, max_size=6), hidden=st.integers(1, 300),
    classes=st.integers(1, 50),
)
def test_an_mlp_of_uneven_widths_has_the_parameters_of_its_linears(
    dims: list[int], hidden: int, classes: int
) -> None:
    spec = mlp.build(
        mlp.MlpSizes(dims=tuple(dims), hidden=hidden, num_classes=classes), name="m",
        sequence_length=1,
    )
    blocks = [(a * hidden + hidden) + (hidden * b + b) for a, b in pairwise(dims)]
    assert [unit.numel for unit in spec.units] == [dims[-1] * classes + classes, *blocks]


def test_an_mlp_has_no_first_root_module() -> None:
    modules: tuple[Module, ...] = load_preset("mlp-tiny").modules
    assert [(module.fqn, module.unit) for module in modules] == [
        ("blocks.0", "blocks.0"), ("blocks.1", "blocks.1"), ("blocks.2", "blocks.2"),
        ("head", ROOT),
    ]


@given(
    layers=st.integers(1, 4), groups=st.integers(1, 4), shared=st.integers(1, 4),
    half=st.integers(1, 8), wide=st.integers(1, 64),
)
def test_a_llama_has_the_parameters_of_its_closed_form(
    layers: int, groups: int, shared: int, half: int, wide: int
) -> None:
    heads, head_dim = groups * shared, 2 * half
    d = heads * head_dim
    sizes = llama.LlamaSizes(
        num_layers=layers, hidden_size=d, num_heads=heads, num_kv_heads=shared, feed_forward=wide,
        vocabulary=7,
    )
    block = 2 * d * d + 2 * d * shared * head_dim + 3 * d * wide + 2 * d
    assert (
        llama.build(sizes, name="l", sequence_length=3).num_parameters
        == layers * block + 2 * 7 * d + d
    )


def test_learned_positions_left_open_follow_the_sequence_length() -> None:
    spec = load_preset("gpt-tiny", sequence_length=48)
    assert next(
        parameter for parameter in spec.parameters if parameter.fqn == "wpe.weight"
    ).shape == (48, 64)


def test_a_preset_can_be_cut_to_fewer_layers_and_given_another_attention() -> None:
    spec = load_preset("gpt-tiny", num_layers=2, attention="sdpa")
    assert [unit.fqn for unit in spec.units] == [ROOT, "blocks.0", "blocks.1"]
    attention = [op for module in spec.modules for op in module.operators if op.kind == "attention"]
    assert [op.implementation for op in attention] == ["sdpa", "sdpa"]


@pytest.mark.parametrize("name", ["gpt-tiny", "mlp-tiny", "llama-tiny"])
@pytest.mark.parametrize("layers", [0, 99])
def test_a_preset_cannot_have_more_layers_than_it_has_or_none(name: str, layers: int) -> None:
    with pytest.raises(
        ScenarioError,
        match=r"^model\.num_layers: expected 1 to \d, the layers of the preset, found",
    ):
        load_preset(name, num_layers=layers)


def test_an_unknown_preset_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(ScenarioError) as caught:
        load_preset("llama-3-8")
    assert caught.value.problems == ('model.preset: unknown model "llama-3-8", did you mean '
                                     'llama-3-8b?',)


@pytest.mark.parametrize(("name", "same"), [
    ("llama-3.1-8b", "llama-3-8b"), ("Llama 3.3 70B", "llama-3-70b"),
    ("meta-llama/Llama-3.1-8B-Instruct", "llama-3-8b"), ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
    ("mosaicml/mpt-7b-instruct", "mpt-7b"), ("MPT 30B", "mpt-30b"),
])
def test_a_model_that_a_preset_of_another_name_has_the_sizes_of_is_refused_with_that(
    name: str, same: str
) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_preset(name)
    assert caught.value.problems == (f'model.preset: unknown model "{name}", did you mean {same} '
                                     f'(same sizes)?',)


@pytest.mark.parametrize("name", ["llama-3.1-9b", "mpt-8b"])
def test_a_model_of_sizes_that_no_preset_has_is_only_near_one(name: str) -> None:
    with pytest.raises(ScenarioError, match="did you mean") as caught:
        load_preset(name)
    assert "same sizes" not in str(caught.value)


def test_an_unknown_preset_like_no_other_is_answered_with_where_to_look() -> None:
    with pytest.raises(ScenarioError) as caught:
        load_preset("x" * 500)
    assert caught.value.problems == (f'model.preset: unknown model "{"x" * 60}"; `zsim list '
                                     f'models` names them',)


def test_every_family_file_is_in_the_table() -> None:
    folder = Path(mlp.__file__).parent
    others = {
        "__init__", "aliases", "huggingface", "layers", "llama_like", "size_checks", "transformers"
    }
    assert {file.stem for file in folder.glob("*.py")} - others == set(FAMILIES)


@pytest.mark.parametrize(("heads", "nearest"), [(0, "1"), (3, "2 and 4"), (65, "64")])
def test_heads_that_do_not_divide_the_hidden_size_are_refused(heads: int, nearest: str) -> None:
    complaint = (
        f"model.sizes.num_heads: expected a divisor of hidden_size 64, found {heads}; the nearest: "
        f"{nearest}"
    )
    with pytest.raises(ScenarioError) as caught:
        gpt.build(
            gpt.GptSizes(num_layers=1, hidden_size=64, num_heads=heads, vocabulary=5), name="",
            sequence_length=1,
        )
    assert caught.value.problems == (complaint,)
    sizes = llama.LlamaSizes(
        num_layers=1, hidden_size=64, num_heads=heads, feed_forward=5, vocabulary=5
    )
    with pytest.raises(ScenarioError) as caught:
        llama.build(sizes, name="", sequence_length=1)
    assert caught.value.problems == (complaint,)
