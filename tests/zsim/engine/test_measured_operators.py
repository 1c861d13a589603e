"""Operators of a real H200's step against their predictions.

The record's own profile; no constant was fitted to it."""

from __future__ import annotations

import json
from collections import Counter

import pytest

import zsim
from tests.support.folders import ROOT
from zsim.engine.costs import Costs
from zsim.engine.error_bands import COMPUTE
from zsim.scenario.plan import planned

PROFILE = json.loads((ROOT / "tests/measured/gpu.json").read_text())["profile"]
MEASURED = {name: ns for name, (_, ns) in PROFILE["kernel_ns"].items()}
TORCH_TOOK = {"attention_kernels": "cudnn"}
"""Kernels of cuDNN, which torch took by their names."""


@pytest.fixture(scope="module")
def predicted() -> Counter[str]:
    """Nanoseconds of each operator, forward and backward apart, of one rank alone on its GPU."""
    scenario = zsim.Scenario(
        **PROFILE["scenario"], execution={**TORCH_TOOK, "products": "alone"}
    )
    program = planned(scenario).program.ranks[0]
    costs, times = Costs(cluster=scenario.cluster, execution=scenario.executed), Counter[str]()
    for op in program.steady:
        for kernel in op.kernels:
            times[f"{kernel.operator} {op.kind}"] += costs.kernel_ns(kernel)
    return times


@pytest.mark.parametrize(("operators", "measured", "within"), [
    (("linear forward", "linear backward", "head forward", "head backward"), ("aten::mm",), 0.05),
    (("attention forward",), ("aten::_cudnn_attention_forward",), 0.05),
    # published rates of backward are of attention that is not causal
    (("attention_backward backward",), ("aten::_cudnn_attention_backward",), 0.2),
    (("log_softmax forward",), ("aten::_log_softmax",), 0.05),
    (("log_softmax backward",), ("aten::_log_softmax_backward_data",), 0.05),
    (("rms_norm forward",), ("aten::_fused_rms_norm",), 0.08),
    (("silu forward", "silu backward"), ("aten::silu", "aten::silu_backward"), 0.05),
    (("adamw optimizer",), (
        "aten::_foreach_mul_", "aten::_foreach_lerp_", "aten::_foreach_addcmul_",
        "aten::_foreach_sqrt", "aten::_foreach_div_", "aten::_foreach_add_",
        "aten::_foreach_addcdiv_",
    ), 0.15),
])
def test_operators_take_what_they_took_on_an_h200(operators, measured, within, predicted):
    assert within < COMPUTE["assumed"]
    ratio = sum(predicted[name] for name in operators) / sum(MEASURED[name] for name in measured)
    assert abs(ratio - 1) <= within
