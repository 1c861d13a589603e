"""Products of sizes that tensor cores do not take whole: GPT-2's vocabulary before and after it is padded."""

from __future__ import annotations

import pytest

from zsim import bands, compute
from zsim.costs import Costs
from zsim.devices import load_device
from zsim.plan import plan
from zsim.scenario import parse
from zsim.slowdown import simulate_step

A100 = load_device("a100-80")


def step(vocabulary: int) -> tuple[int, float]:
    """Nanoseconds of a step of GPT-2 124M on one A100, and the half-width of its compute."""
    sizes = f"num_layers = 12, hidden_size = 768, num_heads = 12, vocabulary = {vocabulary}, attention = \"sdpa\""
    text = f"""
model = {{ family = "gpt", sizes = {{ {sizes} }} }}
batch = {{ micro_batch = 12, sequence_length = 1024 }}
cluster = {{ preset = "dgx-a100" }}
strategy = {{ name = "ddp" }}
precision = {{ parameters = "bf16", reduce = "bf16" }}
execution = {{ compile = true }}
"""
    case = parse(text.encode(), where="gpt2.toml")
    program, costs = plan(case, device="cuda"), Costs(cluster=case.cluster, execution=case.executed)
    timeline = simulate_step(program, costs=costs)
    return timeline.step_time_ns, bands.parts(program, timeline, costs=costs).compute.width


def test_padding_gpt_2_s_vocabulary_saves_some_tenths_of_a_step_and_is_less_certain_without() -> None:
    """50,257 to 50,304 is said to make a step a quarter faster, by those who padded it."""
    odd, padded = step(50_257), step(50_304)
    assert 1.1 < odd[0] / padded[0] < 1.4
    assert odd[1] > padded[1]


@pytest.mark.parametrize(("dtype", "odd"), [("bfloat16", True), ("float16", True), ("float32", False)])
def test_an_odd_size_takes_twice_as_long_in_two_bytes(dtype: str, odd: bool) -> None:
    even, other = (compute.product_s((1, 4096, n, 4096), A100, dtype) for n in (8192, 8191))
    assert other / even == pytest.approx(2 if odd else 1)
    assert compute.is_misaligned((1, 4096, 8191, 4096), dtype) is odd
