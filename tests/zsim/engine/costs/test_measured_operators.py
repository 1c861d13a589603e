"""Operators of steps on a real H200 and a real H100 against their predictions.

The record's own profiles. Three constants are of them: rates of products of odd sizes and of
elements one by one, and what a launch over many tensors adds."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from typing import Any

import pytest

import zsim
from tests.support.folders import ROOT
from zsim.engine.bands.error_bands import COMPUTE
from zsim.engine.costs.op_costs import Costs
from zsim.scenario.plan import planned

H200 = json.loads((ROOT / "tests/measured/gpu.json").read_text())["profile"]
H100 = json.loads((ROOT / "tests/measured/gpu_h100.json").read_text())["profiles"]["measured"]
PROFILES = {
    "H200": H200, "H100": H100["llama-3.2-1b-fsdp2-4x2048"], "GPT-2": H100["gpt-2-124m-ddp-8x1024"],
    "DDP": H100["llama-3.2-1b-ddp-1x2048"],
}
TORCH_TOOK = {"attention_kernels": "cudnn"}
"""Kernels of cuDNN, which torch took by their names."""
ADAMW = (
    "aten::_foreach_mul_", "aten::_foreach_lerp_", "aten::_foreach_addcmul_", "aten::_foreach_sqrt",
    "aten::_foreach_div_", "aten::_foreach_add_", "aten::_foreach_addcdiv_",
)
PRODUCTS = ("linear forward", "linear backward", "head forward", "head backward")


@cache
def predicted(name: str) -> Counter[str]:
    """Nanoseconds of each operator, forward and backward apart, of one rank alone on its GPU."""
    scenario = zsim.Scenario(
        **PROFILES[name]["scenario"], execution={**TORCH_TOOK, "products": "alone"}
    )
    program = planned(scenario).program.ranks[0]
    costs, times = Costs(cluster=scenario.cluster, execution=scenario.executed), Counter[str]()
    for op in program.steady:
        for kernel in op.kernels:
            casts = kernel.operator == "copy" and kernel.singly
            times[f"{'cast' if casts else kernel.operator} {op.kind}"] += costs.kernel_ns(kernel)
    return times


def ratio(name: str, operators: tuple[str, ...], measured: dict[str, Any], of: tuple[str, ...]):
    """Predicted over measured time of `operators`, which torch's kernels `of` are."""
    return sum(predicted(name)[each] for each in operators) / sum(measured[each][1] for each in of)


@pytest.mark.parametrize("gpu", ["H200", "H100"])
@pytest.mark.parametrize(("operators", "kernels", "within"), [
    (PRODUCTS, ("aten::mm",), 0.05),
    (("attention forward",), ("aten::_cudnn_attention_forward",), 0.05),
    (("attention_backward backward",), ("aten::_cudnn_attention_backward",), 0.05),
    (("log_softmax forward",), ("aten::_log_softmax",), 0.05),
    (("log_softmax backward",), ("aten::_log_softmax_backward_data",), 0.05),
    # an H100 reaches more of its bandwidth here than in other operators
    (("rms_norm forward",), ("aten::_fused_rms_norm",), 0.14),
    (("silu forward", "silu backward"), ("aten::silu", "aten::silu_backward"), 0.25),
    (("adamw optimizer",), ADAMW, 0.05),
    (("cast copy",), ("aten::_chunk_cat",), 0.1),
    # strided halves one by one; others reach more than the share of the memory that is fitted
    (
        ("rotary forward", "rotary backward", "multiply forward", "multiply backward"),
        ("aten::mul", "aten::neg", "aten::sub", "aten::cat"), 0.2,
    ),
])
def test_operators_take_what_they_took_on_a_gpu(gpu, operators, kernels, within) -> None:
    assert within < COMPUTE["assumed"]
    assert abs(ratio(gpu, operators, PROFILES[gpu]["kernel_ns"], kernels) - 1) <= within


@pytest.mark.parametrize(("gpu", "gathers"), [
    # the fake process group writes each gather eight times
    ("H200", ("aten::copy_",)), ("H100", ("aten::copy_",)), ("GPT-2", ()), ("DDP", ()),
])
def test_the_kernels_of_a_step_take_what_they_took_together(gpu, gathers) -> None:
    measured = sum(
        took for name, (_, took) in PROFILES[gpu]["kernel_ns"].items() if name not in gathers
    )
    assert abs(sum(predicted(gpu).values()) / measured - 1) <= 0.05


def test_explicit_attention_copies_heads_and_masks_one_by_one() -> None:
    kernels = PROFILES["GPT-2"]["kernels"]
    heads = {name: row for name, row in kernels.items() if "direct_copy" in name and row[0] == 96}
    assert len(heads) == 1
    assert abs(ratio("GPT-2", ("clone forward", "clone backward"), heads, tuple(heads)) - 1) <= 0.2
    copies = (
        "clone forward", "clone backward", "mask_scores forward", "mask_scores backward",
        "move_gradient copy", "move_gradient optimizer", "copy optimizer",
    )
    measured = PROFILES["GPT-2"]["kernel_ns"]
    assert abs(ratio("GPT-2", copies, measured, ("aten::masked_fill_", "aten::copy_")) - 1) <= 0.1


def test_softmax_s_backward_multiplies_first_on_a_gpu() -> None:
    scores = (
        "scale_scores forward", "scale_scores backward", "softmax forward", "softmax backward",
        "softmax_product backward",
    )
    kernels = ("aten::mul", "aten::_softmax", "aten::_softmax_backward_data")
    assert abs(ratio("GPT-2", scores, PROFILES["GPT-2"]["kernel_ns"], kernels) - 1) <= 0.2


def test_products_of_gpt_2_take_what_they_took_with_a_head_of_50257_columns() -> None:
    kernels = PROFILES["GPT-2"]["kernel_ns"]
    assert abs(ratio("GPT-2", PRODUCTS, kernels, ("aten::mm", "aten::addmm")) - 1) <= 0.06
    odd = {name: row for name, row in PROFILES["GPT-2"]["kernels"].items() if "align1" in name}
    assert len(odd) == 3
    assert abs(ratio("GPT-2", PRODUCTS[2:], odd, tuple(odd)) - 1) <= 0.02
