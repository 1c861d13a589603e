"""Products of sizes that tensor cores do not take whole: GPT-2's vocabulary before and after it is
padded."""

from __future__ import annotations

import pytest

from zsim.cluster.devices import load_device
from zsim.engine.bands import error_bands
from zsim.engine.costs import kernel_time
from zsim.engine.costs.op_costs import Costs
from zsim.engine.simulate_step import simulate_step
from zsim.scenario.plan import plan
from zsim.scenario.scenario import parse

A100 = load_device("a100-80")


def step(vocabulary: int, *, length: int = 1024, compiled: str = "false") -> tuple[int, float]:
    """Nanoseconds of a step of GPT-2 124M on one A100, and the half-width of its compute."""
    sizes = (
        f"num_layers = 12, hidden_size = 768, num_heads = 12, vocabulary = {vocabulary}, attention "
        f"= \"sdpa\""
    )
    text = f"""
model = {{ family = "gpt", sizes = {{ {sizes} }} }}
batch = {{ micro_batch = 11, sequence_length = {length} }}
cluster = {{ preset = "dgx-a100" }}
strategy = {{ name = "ddp" }}
precision = {{ parameters = "bf16", reduce = "bf16" }}
execution = {{ compile = {compiled}, norms = "fused" }}
"""
    case = parse(text.encode(), where="gpt2.toml")
    program, costs = plan(case, device="cuda"), Costs(cluster=case.cluster, execution=case.executed)
    timeline = simulate_step(program, costs=costs)
    shares = error_bands.step_shares(program, timeline, costs=costs)
    return timeline.step_time_ns, shares.compute.width


def test_padding_gpt_2_s_vocabulary_saves_tenths_of_a_step_and_makes_it_more_certain() -> None:
    """50,257 to 50,304 is said to make a step a quarter faster, by those who padded it."""
    odd, padded = step(50_257), step(50_304)
    assert 1.1 < odd[0] / padded[0] < 1.4
    assert odd[1] > padded[1]


def test_torch_compile_pads_the_head_itself_unless_it_compiles_blocks_alone() -> None:
    """A copy of the factors is left: a reproduction of GPT-2 went from 96 to 93 ms."""
    odd, padded = (step(size, compiled="true") for size in (50_257, 50_304))
    assert 1.005 < odd[0] / padded[0] < 1.06
    assert odd[1] == pytest.approx(padded[1], rel=0.02)
    apart = [step(size, compiled='"blocks"') for size in (50_257, 50_304)]
    assert apart[0][0] / apart[1][0] > 1.1
    assert apart[0][1] > apart[1][1]


@pytest.mark.parametrize(
    ("dtype", "odd"), [("bfloat16", True), ("float16", True), ("float32", False)]
)
def test_an_odd_size_takes_twice_as_long_in_two_bytes(dtype: str, odd: bool) -> None:
    even, other = (kernel_time.product_s((1, 4096, n, 4096), A100, dtype) for n in (8192, 8191))
    assert other / even == pytest.approx(2 if odd else 1)
    assert kernel_time.is_misaligned((1, 4096, 8191, 4096), dtype) is odd


def test_hopper_multiplies_an_odd_size_with_the_instructions_of_older_gpus() -> None:
    """GPT-2's head at a sixth of the rate, as measured (test_measured_operators.py)."""
    h100, shape = load_device("h100-80"), (1, 8192, 50_257, 768)
    odd, padded = (
        kernel_time.product_s(each, h100, "bfloat16") for each in (shape, (1, 8192, 50_304, 768))
    )
    assert odd / padded == pytest.approx(1 / 0.17, rel=0.01)


@pytest.mark.parametrize("length", [1023, 1025])
def test_an_odd_number_of_tokens_costs_what_it_has_of_them(length: int) -> None:
    """Tokens are rows of what a linear reads and writes, and what its weight's gradient sums over;
    no memory is contiguous along them."""
    even, odd = step(50_304), step(50_304, length=length)
    assert odd[0] / even[0] == pytest.approx(length / 1024, rel=0.02)
    assert odd[1] == pytest.approx(even[1], rel=0.01)


def test_a_weight_s_gradient_lies_along_features_and_its_input_s_along_them_too() -> None:
    tokens, wide, narrow = 11 * 1023, 50_257, 768
    forward, of_input, of_weight = (
        (1, tokens, wide, narrow), (1, tokens, narrow, wide), (1, wide, narrow, tokens),
    )
    assert kernel_time.is_misaligned(forward, "bfloat16")
    assert kernel_time.is_misaligned(of_input, "bfloat16")
    assert kernel_time.is_misaligned(of_weight, "bfloat16", transposed=True)
    aligned = (1, tokens, 50_304, narrow), (1, tokens, narrow, 50_304)
    assert not any(kernel_time.is_misaligned(shape, "bfloat16") for shape in aligned)
    assert not kernel_time.is_misaligned((1, 50_304, narrow, tokens), "bfloat16", transposed=True)
