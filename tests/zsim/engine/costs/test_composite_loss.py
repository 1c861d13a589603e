"""A cross-entropy of single calls, and gradients that are added in float32: bytes counted by hand,
and what the host issues."""

from __future__ import annotations

import pytest

from zsim.cluster.cluster_presets import load_cluster
from zsim.cluster.devices import load_device
from zsim.engine.costs import kernel_time
from zsim.engine.costs.op_costs import Costs
from zsim.engine.execution import Execution
from zsim.errors import ScenarioError
from zsim.ir.ops import ACCUMULATE, COLLECTIVES, LOSS_STEP, Alloc, Kernel
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse

H100 = load_device("h100-80")
TOKENS, VOCABULARY = 64, 32000
SIZES = (
    "num_layers = 2, hidden_size = 256, num_heads = 4, feed_forward = 512, "
    f'vocabulary = {VOCABULARY}, loss_dtype = "float32"'
)
GPT_SIZES = (
    "num_layers = 1, hidden_size = 256, num_heads = 4, vocabulary = 512, "
    'attention = "explicit"'
)


def scenario(execution: str) -> Scenario:
    text = f"""
model = {{ family = "llama", sizes = {{ {SIZES} }} }}
batch = {{ micro_batch = 1, sequence_length = {TOKENS}, accumulation = 2 }}
cluster = {{ preset = "dgx-h100" }}
strategy = {{ name = "ddp", sync = "last" }}
precision = {{ parameters = "bf16", reduce = "fp32" }}
execution = {{ {execution} }}
"""
    return parse(text.encode(), where="loss.toml")


def seconds_of_bytes(nbytes: float) -> float:
    return nbytes / (H100.memory_bandwidth * H100.memory_efficiency)


def kernels_of(case: Scenario) -> list[Kernel]:
    """The kernels of the first micro-batch."""
    return [
        k for op in plan(case, device="cuda").ranks[0].steady if op.micro_batch == 0
        for k in op.kernels
    ]


def test_a_step_s_loss_moves_ten_tensors_of_logits_instead_of_nine() -> None:
    """cast and cast back apart: forward max 1, subtract 2, exp 2, sum 1, divide 2; backward
    multiply 2. log_softmax reads long rows three times, and its backward gradients twice."""
    tensor = TOKENS * VOCABULARY * 4
    large = {
        form: [
            k for k in kernels_of(scenario(f'loss = "{form}"'))
            if k.operator in ("log_softmax", "nll_loss", LOSS_STEP) and k.nbytes >= tensor
        ]
        for form in ("fused", "composite")
    }
    assert [k.nbytes // tensor for k in large["composite"]] == [1, 2, 2, 1, 2, 2]
    assert [k.nbytes // tensor for k in large["fused"]] == [4, 1, 4]
    times = sum(kernel_time.kernel_ns(k, H100) - H100.kernel for k in large["composite"])
    assert times == pytest.approx(seconds_of_bytes(10 * tensor) * 1e9, abs=6)


def test_the_host_issues_each_call_of_it() -> None:
    """Seven calls and the mean; backward multiplies the softmax and divides the gradient."""
    single = [k for k in kernels_of(scenario('loss = "composite"')) if k.operator == LOSS_STEP]
    assert len(single) == 9


def test_its_backward_makes_the_gradient_in_the_softmax_that_it_keeps() -> None:
    """One tensor of float32 logits in forward beside the cast, and in backward none. Torch's loss
    makes two more in backward: that of nll_loss, and that of log_softmax."""
    tensor = TOKENS * VOCABULARY * 4
    made = {
        form: {
            op.kind: [a.nbytes for a in op.memory if isinstance(a, Alloc)].count(tensor)
            for op in plan(scenario(f'loss = "{form}"'), device="cuda").ranks[0].steady
            if op.micro_batch == 0 and op.unit == "root" and op.kind in ("forward", "backward")
            and "log" in str(op.memory)
        }
        for form in ("fused", "composite")
    }
    assert made == {
        "fused": {"forward": 2, "backward": 2}, "composite": {"forward": 2, "backward": 0}
    }


def test_torch_compile_fuses_it() -> None:
    compiled = plan(scenario('loss = "composite", compile = true'), device="cuda")
    assert compiled.ranks[0] == plan(scenario("compile = true"), device="cuda").ranks[0]


def test_autocast_which_runs_its_calls_in_other_dtypes_is_refused() -> None:
    with pytest.raises(ScenarioError, match=r"execution\.loss: expected fused with precision"):
        scenario('loss = "composite"').with_(precision={"parameters": "fp32", "autocast": "bf16"})


@pytest.mark.parametrize(
    ("dtype", "nbytes", "moved"), [("bfloat16", 6, 10), ("float16", 6, 10), ("float32", 12, 12)]
)
def test_a_gradient_added_in_float32_reads_itself_and_the_sum_which_it_writes(
    dtype: str, nbytes: int, moved: int
) -> None:
    numel = 10**8
    kernel = Kernel(ACCUMULATE, numel, numel * nbytes, dtype)
    took = kernel_time.kernel_ns(kernel, H100, Execution(accumulation="fp32")) - H100.kernel
    assert took == pytest.approx(seconds_of_bytes(numel * moved) * 1e9, abs=1)


def test_sums_in_float32_change_neither_the_program_nor_its_memory() -> None:
    assert (
        plan(scenario('accumulation = "fp32"'), device="cuda").ranks[0].steady
        == plan(scenario(""), device="cuda").ranks[0].steady
    )


def attended(execution: str) -> tuple[Scenario, dict[str, int], int]:
    """A step with explicit attention: nanoseconds by operator, and of the host."""
    text = f"""
model = {{ family = "gpt", sizes = {{ {GPT_SIZES} }} }}
batch = {{ micro_batch = 2, sequence_length = 128 }}
cluster = {{ preset = "dgx-a100" }}
strategy = {{ name = "ddp" }}
precision = {{ parameters = "fp16", reduce = "fp16" }}
execution = {{ {execution} }}
"""
    case = parse(text.encode(), where="softmax.toml")
    costs, spent, issued = Costs(case.cluster, case.executed), dict[str, int](), 0
    for op in plan(case, device="cuda").ranks[0].steady:
        issued += (
            0
            if op.kind in COLLECTIVES
            else costs.issue_ns(op)
        )
        for kernel in op.kernels:
            spent[kernel.operator] = spent.get(kernel.operator, 0) + costs.kernel_ns(kernel)
    return case, spent, issued


def test_a_fused_softmax_scales_and_masks_in_its_own_kernel() -> None:
    """Scale and mask, each forward and backward, are two launches and their time less, and the
    product of softmax's backward is one; nothing else changes."""
    _, eager, issued = attended("")
    _, fused, fewer = attended('softmax = "fused"')
    assert issued - fewer == 5 * load_cluster("dgx-a100").overheads.issue_operator
    spared = ("scale_scores", "mask_scores", "softmax_product")
    assert min(eager[name] for name in spared) > 0
    assert eager | dict.fromkeys(spared, 0) == fused


def test_compiled_kernels_lay_heads_out_and_multiply_in_softmaxs_backward() -> None:
    _, eager, _ = attended("")
    _, compiled, _ = attended("compile = true")
    assert min(eager["clone"], eager["softmax_product"]) > 0
    assert (compiled["clone"], compiled["softmax_product"]) == (0, 0)


def test_products_alone_are_as_much_faster_as_the_best_published_ones_are() -> None:
    _, training, issued = attended("")
    case, alone, same = attended('products = "alone"')
    assert issued == same
    products = ("linear", "head", "scores", "weighted_values")
    for operator in products:
        assert alone[operator] < training[operator]
    assert alone | {name: training[name] for name in products} == training
    large = Kernel("linear", 2 * 4096**3, 0, "float16", shape=(1, 4096, 4096, 4096))
    start = case.cluster.device.kernel
    times = [
        kernel_time.kernel_ns(large, case.cluster.device, Execution(products=how)) - start
        for how in ("training", "alone")
    ]
    assert times[1] / times[0] == pytest.approx(80.3 / 86.9, rel=1e-3)


def test_a_fused_softmax_without_one_is_refused() -> None:
    text = """
model = { preset = "gpt-small", attention = "sdpa" }
batch = { micro_batch = 1, sequence_length = 64 }
cluster = { preset = "dgx-a100" }
strategy = { name = "ddp" }
execution = { softmax = "fused" }
"""
    with pytest.raises(
        ScenarioError, match=r"execution\.softmax: expected eager, for only explicit attention"
    ):
        parse(text.encode(), where="softmax.toml")
    parse(text.replace("sdpa", "explicit").encode(), where="softmax.toml")
