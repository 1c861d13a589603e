"""RMSNorms of single calls: how many bytes they move, by hand and by the calls of models that have
them, eager and compiled."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from zsim.cluster.devices import load_device
from zsim.engine.costs import kernel_time
from zsim.engine.costs.op_costs import Costs
from zsim.engine.execution import EAGER, Execution
from zsim.ir.ops import NORM_STEP, Alloc, Op
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse

H100 = load_device("h100-80")
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


def preset(execution: str) -> Scenario:
    text = (
        'model = { preset = "llama-3-8b", num_layers = 2 }'
        + TEXT.partition("}")[2]
        + f"execution = {{ {execution} }}\n"
    )
    return parse(text.encode(), where="norms.toml")


def block(case: Scenario) -> dict[str, Op]:
    """The forward and the backward of the first block."""
    return {
        op.kind: op for op in plan(case, device="cuda").ranks[0].steady
        if op.kind in ("forward", "backward") and op.unit == "blocks.0"
    }


def test_a_norm_of_single_calls_moves_eight_times_as_much_at_the_rate_of_plain_memory() -> None:
    single, fused = block(preset('norms = "composite"')), block(preset(""))
    steps, norms = (
        [k for op in ops.values() for k in op.kernels if k.operator == operator]
        for ops, operator in ((single, NORM_STEP), (fused, "rms_norm"))
    )
    moved = sum(k.nbytes for k in steps) / sum(k.nbytes for k in norms)
    assert moved == pytest.approx(58 / 7, rel=0.01)
    large = replace(steps[0], nbytes=2**30)
    alone = kernel_time.kernel_ns(large, H100) - H100.kernel
    assert alone == pytest.approx(
        2**30 / (H100.memory_bandwidth * H100.memory_efficiency) * 1e9, abs=1
    )


def test_the_host_issues_each_call_and_the_engine_s_sum_of_both_uses() -> None:
    """Seven calls more in the forward of each of two norms. In backward the calls are as many, and
    the gradients of the float32 input are added."""
    single, fused = block(preset('norms = "composite"')), block(preset(""))
    more = {
        kind: [k.operator for k in single[kind].kernels if k not in fused[kind].kernels]
        for kind in single
    }
    assert Counter(more["forward"]) == {NORM_STEP: 16}
    assert Counter(more["backward"]) == {NORM_STEP: 14, "add": 2}
    case = preset('norms = "composite"')
    costs, host = Costs(case.cluster, case.executed), case.cluster.overheads
    assert costs.issue_ns(single["forward"]) - costs.issue_ns(fused["forward"]) == (
        16 * host.issue_kernel - 2 * host.issue_operator
    )


def kept(op: Op) -> int:
    """Bytes that `op` leaves behind."""
    live: dict[str, int] = {}
    for event in op.memory:
        if isinstance(event, Alloc):
            live[event.buffer] = event.nbytes
        else:
            live.pop(event.buffer, None)
    return sum(live.values())


def test_composite_norms_keep_a_float32_input_and_the_factor_of_the_weight() -> None:
    """Four and two bytes a feature for each of two norms. Torch's keep their inputs instead: the
    first one's is another module's, the second one's has two bytes."""
    single, fused = block(preset('norms = "composite"')), block(preset(""))
    tokens, width = 64, 4096
    assert kept(single["forward"]) - kept(fused["forward"]) == tokens * width * (2 * (4 + 2) - 2)


def test_torch_compile_fuses_it() -> None:
    assert block(preset('norms = "composite", compile = true')) == block(preset("compile = true"))


def test_a_model_s_own_norm_is_as_many_tensors_in_its_calls_and_little_when_compiled(
    tmp_path
) -> None:
    """LlamaRMSNorm: as torch's composite, counted call by call; the sums on single numbers are some
    per mille of it."""
    (tmp_path / "config.json").write_text(CONFIG)
    case = parse(TEXT.encode(), where="norms.toml", folder=tmp_path)
    ops = [
        op for op in plan(case, device="cuda").ranks[0].steady
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
