"""Memory that no strategy knows of: the batch and the module's buffers, by hand and
in the verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.folders import PUBLISHED
from zsim.autograd.traced.model import FAMILY, TracedModel
from zsim.errors import ScenarioError
from zsim.ir.ledger_replay import replay
from zsim.ir.ops import ACCUMULATE
from zsim.memory.fits import assess
from zsim.memory.inputs_and_buffers import belongings
from zsim.memory.waterfall import waterfall
from zsim.scenario.derived import derived
from zsim.scenario.plan import planned
from zsim.scenario.scenario import Scenario, parse

TRACE = PUBLISHED / "torchtitan-micro-batch-2.json"


def scenario(
    model: str, *, batch: str = "micro_batch = 3", strategy: str = 'name = "ddp"',
    precision: str = "fp32",
) -> Scenario:
    text = f"""
model = {{ {model} }}
batch = {{ {batch} }}
cluster = {{ preset = "dgx-h100" }}
strategy = {{ {strategy} }}
precision = {{ parameters = "{precision}" }}
"""
    return parse(text.encode(), where="x.toml", folder=TRACE.parent)


def figures(case: Scenario) -> dict[str, tuple[int, int]]:
    return {item.name: (item.nbytes, item.high) for item in belongings(case)}


TRACED, AT, FSDP2 = (
    f'traced = "{TRACE.name}"', "micro_batch = 2, sequence_length = 8192", 'name = "fsdp2"',
)
MLP = 'family = "mlp", sizes = { dims = [5, 7], hidden = 4, num_classes = 2 }'


@pytest.mark.parametrize(("case", "nbytes"), [
    (scenario('preset = "gpt-tiny"', batch="micro_batch = 3, sequence_length = 10"), 3 * 10 * 16),
    (
        scenario(
            'preset = "gpt-tiny"', batch="micro_batch = 3, sequence_length = 10, forwards = 2"
        ),
        2 * 3 * 10 * 16,
    ),
    (scenario(MLP), 3 * (5 * 4 + 8)), (scenario(MLP, precision="bf16"), 3 * (5 * 2 + 8)),
    (scenario(MLP, precision="bf16", strategy='name = "fsdp2"'), 3 * (5 * 4 + 8)),
])
def test_a_batch_is_what_a_model_takes_and_its_targets(case: Scenario, nbytes: int) -> None:
    assert figures(case) == {"inputs": (nbytes, 2 * nbytes)}


def test_at_most_all_micro_batches_of_a_step_are_there_and_one_of_the_next() -> None:
    case = scenario(MLP, batch="micro_batch = 1, accumulation = 4")
    assert figures(case) == {"inputs": (28, 5 * 28)}


@pytest.mark.parametrize("how", ["fp32", "fused"])
@pytest.mark.parametrize(("precision", "lacks"), [("bf16", 2), ("fp32", 0)])
def test_a_float32_buffer_of_gradients_is_named_and_counted_besides(
    how: str, precision: str, lacks: int
) -> None:
    """The Program has gradients in the parameters' dtype, and frees them after the step."""
    plain = scenario(MLP, precision=precision)
    case = plain.with_(execution={"accumulation": how})
    numel = sum(parameter.numel for parameter in case.model.parameters)
    inputs = figures(plain)["inputs"]
    assert figures(case) == {"inputs": inputs, "gradient_buffer": (lacks * numel, 4 * numel)}
    before, after = (assess(planned(each)) for each in (plain, case))
    assert after.allocated_bytes == before.allocated_bytes
    assert after.needed.nbytes - before.needed.nbytes == lacks * numel
    assert after.needed.high - before.needed.high == 4 * numel
    stages = {stage.name: stage.nbytes for stage in waterfall(case, after)}
    assert stages.get("gradient_buffer", 0) == lacks * numel


@pytest.mark.parametrize(("stage", "share"), [("zero1", 1), ("zero2", 8), ("zero3", 8)])
def test_zero_has_its_float32_gradients_in_the_program_and_none_are_assumed(
    stage: str, share: int
) -> None:
    """Twice the bytes of two-byte gradients when the optimizer steps: of all gradients in ZeRO-1,
    else of one of eight shards."""
    model = 'family = "mlp", sizes = { dims = [16, 16], hidden = 16, num_classes = 16 }'
    plain = scenario(model, precision="bf16", strategy=f'name = "{stage}"')
    case = plain.with_(execution={"accumulation": "fp32"})
    assert figures(case) == figures(plain)
    assert case.fingerprint != plain.fingerprint
    numel = sum(parameter.numel for parameter in case.model.parameters)
    held = [
        replay(planned(each).program.ranks[0])["steady"].held["gradients"]
        for each in (plain, case)
    ]
    assert held == [2 * numel // share, 4 * numel // share]
    kernels = [
        kernel for op in planned(case).program.ranks[0].steady for kernel in op.kernels
        if kernel.operator == ACCUMULATE
    ]
    assert sum(kernel.nbytes for kernel in kernels) == (2 + 8) * numel


def test_two_byte_parameters_are_not_stepped_by_float32_gradients() -> None:
    with pytest.raises(ScenarioError, match='execution.accumulation: expected eager without'):
        scenario(MLP, precision="bf16").with_(
            precision={"parameters": "bf16", "master": False}, execution={"accumulation": "fp32"}
        )


def test_a_trace_says_what_its_inputs_and_buffers_take() -> None:
    case = scenario(TRACED, batch=AT, strategy=FSDP2, precision="bf16")
    assert figures(case) == {"inputs": (262_144, 524_288), "buffers": (4_194_304, 4_194_304)}


def test_transformers_models_hold_their_rotary_frequencies(tmp_path: Path) -> None:
    sizes = (
        '"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, '
        '"num_attention_heads": 2'
    )
    (tmp_path / "config.json").write_text(f'{{"model_type": "llama", {sizes}}}')
    text = (
        'model = { huggingface = "config.json" }\nbatch = { micro_batch = 1, sequence_length = 8 '
        '}\ncluster = { preset = "dgx-h100" }\n'
    )
    case = parse(f'{text}strategy = {{ name = "ddp" }}\n'.encode(), where="x.toml", folder=tmp_path)
    assert figures(case) == {
        "inputs": (128, 256), "buffers": (64, 64)
    }  # inv_freq and the original of it, 8 float32 each


def test_a_module_with_large_buffers_does_not_fit_and_the_waterfall_says_why() -> None:
    case = scenario(TRACED, batch=AT, strategy=FSDP2, precision="bf16")
    assert isinstance(case.model, TracedModel)
    assert case.model.family == FAMILY
    before = assess(planned(case))
    large = derived(case, model=replace(case.model, buffer_nbytes=2**36))
    after = assess(planned(large))
    assert (before.verdict, after.verdict) == ("FITS", "OOM")
    assert after.needed.nbytes - before.needed.nbytes == 2**36 - 4_194_304
    assert after.allocated_bytes == before.allocated_bytes
    stages = {stage.name: stage.nbytes for stage in waterfall(large, after)}
    assert (stages["inputs"], stages["buffers"]) == (262_144, 2**36)
