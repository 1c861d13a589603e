"""RMSNorms of single calls: how many bytes they move, by hand and by the calls of models that have
them, eager and compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zsim.cluster.devices import load_device
from zsim.engine import kernel_time
from zsim.engine.costs import Costs
from zsim.engine.execution import EAGER, Execution
from zsim.ir.ops import NORM_STEP, Kernel
from zsim.scenario.plan import plan
from zsim.scenario.scenario import parse

H100 = load_device("h100-80")
NORM = Kernel("rms_norm", 0, 2**30, "bfloat16")
COMPOSITE = Execution(norms="composite")
TEXT = """
model = { huggingface = "config.json" }
batch = { micro_batch = 1, sequence_length = 64 }
cluster = { preset = "dgx-h100" }
strategy = { name = "ddp" }
precision = { parameters = "bf16", reduce = "fp32" }
"""
CONFIG = (
    '{"model_type": "llama", "vocab_size": 50, "hidden_size": 64, "intermediate_size": 128, '
    '"num_hidden_layers": 2, '
    '"num_attention_heads": 2}'
)


def test_single_calls_move_eight_times_as_much_at_the_rate_of_plain_memory() -> None:
    alone = kernel_time.kernel_ns(NORM, H100, COMPOSITE) - 12 * H100.kernel
    assert alone == pytest.approx(
        2**30 * 58 / 7 / (H100.memory_bandwidth * H100.memory_efficiency) * 1e9, rel=1e-6
    )
    assert alone > 5 * kernel_time.kernel_ns(NORM, H100, EAGER)


def test_torch_compile_fuses_both_and_other_kernels_are_as_they_were() -> None:
    compiled = replace(COMPOSITE, compile=True)
    assert kernel_time.kernel_ns(NORM, H100, compiled) == kernel_time.kernel_ns(
        NORM, H100, Execution(compile=True)
    )
    other = replace(NORM, operator="layer_norm")
    assert kernel_time.kernel_ns(other, H100, COMPOSITE) == kernel_time.kernel_ns(
        other, H100, EAGER
    )


def test_the_host_issues_each_call() -> None:
    text = (
        'model = { preset = "llama-3-8b", num_layers = 2 }'
        + TEXT.partition("}")[2]
        + 'execution = { norms = "composite" }\n'
    )
    case = parse(text.encode(), where="norms.toml")
    op = next(
        op
        for op in plan(case, device="cuda").ranks[0].steady
        if op.kind == "forward" and op.unit == "blocks.0"
    )
    norms = sum(kernel.operator == "rms_norm" for kernel in op.kernels)
    assert norms == 2
    assert (
        Costs(case.cluster, case.executed).issue_ns(op)
        == (len(op.kernels) + 11 * norms) * case.cluster.overheads.issue_kernel
    )


def test_a_model_s_own_norm_is_as_many_tensors_in_its_calls_and_little_when_compiled(
    tmp_path
) -> None:
    """LlamaRMSNorm: as torch's composite, counted call by call; the sums on single numbers are some
    per mille of it."""
    (tmp_path / "config.json").write_text(CONFIG)
    case = parse(TEXT.encode(), where="norms.toml", folder=tmp_path)
    ops = [
        op
        for op in plan(case, device="cuda").ranks[0].steady
        if op.unit == "model.layers.0" and op.kind in ("forward", "backward")
    ]
    steps = [kernel for op in ops for kernel in op.kernels if kernel.operator == NORM_STEP]
    tensors = sum(kernel.nbytes for kernel in steps) / (2 * 64 * 64)
    assert tensors == pytest.approx(2 * 58, rel=0.06)
    large = [replace(step, nbytes=step.nbytes * 10**4) for step in steps]
    eager, compiled = (
        sum(kernel_time.kernel_ns(step, H100, how) for step in large)
        for how in (EAGER, Execution(compile=True))
    )
    assert compiled < eager / 8
