"""Warnings before a run that costs or does more than its user may think."""

from __future__ import annotations

from dataclasses import replace

import pytest

import zsim
from zsim.analysis.scenario_warnings import caveats
from zsim.scenario.derived import derived
from zsim.scenario.scenario import Scenario, parse


def cautions(scenario: Scenario) -> tuple[str, ...]:
    """The texts of a scenario's caveats."""
    return tuple(caveat.text for caveat in caveats(scenario))


@pytest.mark.parametrize(("strategy", "parameters", "optimizer", "warned"), [
    ("zero_redundancy", "fp16", "adamw", True), ("zero_redundancy", "bf16", "adamw", False),
    ("zero_redundancy", "fp16", "sgd", False), ("ddp", "fp16", "adamw", False),
    ("fsdp2", "fp16", "adamw", False),
])
def test_who_lets_adamw_step_fp16_is_warned(
    strategy: str, parameters: str, optimizer: str, warned: bool
) -> None:
    """torch's own training leaves all bounds there: validate finds numerics that differ, and
    nothing is wrong with the strategy."""
    text = (
        'model = { preset = "mlp-tiny" }\nbatch = { micro_batch = 1 }\ncluster = { preset = '
        '"cpu-gloo", ranks = 2 }\n'
        f'strategy = {{ name = "{strategy}" }}\nprecision = {{ parameters = "{parameters}" '
        f'}}\noptimizer = {{ name = "{optimizer}" }}\n'
    )
    lines = cautions(parse(text.encode(), where="half.toml"))
    warnings = [line for line in lines if "fp16" in line]
    assert bool(warnings) is warned
    assert all(line.startswith("adamw steps fp16 parameters, without a master copy in "
                               "zero_redundancy") for line in warnings)


@pytest.mark.parametrize(("strategy", "precision", "told"), [
    ("single", {"parameters": "bf16"}, "precision.master: torch alone has no float32 copies of "),
    ("single", {"parameters": "bf16", "master": False}, ""), ("single", {"autocast": "bf16"}, ""),
    ("single", {}, 'peak: precision.autocast = "bf16" or '),
    ("ddp", {}, 'peak: precision.parameters = "bf16" or '), ("ddp", {"parameters": "bf16"}, ""),
])
def test_who_trains_without_a_library_is_told_what_torch_alone_has_not(
    strategy: str, precision: dict[str, object], told: str
) -> None:
    scenario = zsim.Scenario(
        model={"preset": "gpt-tiny"}, batch={"micro_batch": 1}, strategy={"name": strategy},
        cluster={"preset": "dgx-a100", "ranks": 1}, precision=precision,
    )
    lines = [line for line in cautions(scenario) if line.startswith("precision")]
    assert len(lines) == bool(told)
    assert all(told in line for line in lines)


@pytest.mark.parametrize(("device", "precision", "execution", "warned"), [
    ("dgx-h100", {}, {}, True), ("dgx-h100", {"parameters": "bf16"}, {}, False),
    ("dgx-h100", {"parameters": "fp32", "autocast": "bf16"}, {}, False),
    ("dgx-h100", {}, {"float32_products": "tf32"}, False), ("cpu-gloo", {}, {}, False),
])
def test_who_leaves_a_gpu_to_float32_products_is_told_how_much_faster_tensor_cores_are(
    device: str, precision: dict[str, str], execution: dict[str, str], warned: bool
) -> None:
    scenario = zsim.Scenario(
        model={"preset": "llama-3.2-1b", "num_layers": 1}, batch={"micro_batch": 1},
        cluster={"preset": device}, strategy={"name": "ddp"}, precision=precision,
        execution=execution,
    )
    told = [line for line in cautions(scenario) if line.startswith("precision: products")]
    assert bool(told) is warned
    assert all("bf16 has 15 times the peak" in line for line in told)


@pytest.mark.parametrize(("strategy", "implementation", "adam", "cluster", "told"), [
    ("deepspeed2", "foreach", "torch", "dgx-h100", "foreach, at 1/2 of"),
    ("deepspeed3", "for-loop", "torch", "dgx-h100", "for-loop, at 1/3 of"),
    ("deepspeed2", "fused", "torch", "dgx-h100", ""), ("zero2", "foreach", "torch", "dgx-h100", ""),
    ("deepspeed2", "foreach", "deepspeed", "dgx-h100", ""),
    ("deepspeed2", "foreach", "torch", "cpu-gloo", ""),
])
def test_who_leaves_deepspeeds_step_on_the_host_to_torchs_loops_is_told_of_cpu_adam(
    strategy: str, implementation: str, adam: str, cluster: str, told: str
) -> None:
    """DeepSpeed makes a DeepSpeedCPUAdam of "AdamW" with offload (engine.py,
    get_optimizer_configuration of 0.19.8), and refuses others by default."""
    case = zsim.Scenario(
        model={"preset": "gpt-small"}, batch={"micro_batch": 1, "sequence_length": 64},
        cluster={"preset": cluster, "ranks": 2}, strategy={"name": strategy},
        precision={"parameters": "bf16", "reduce": "bf16"},
        optimizer={"implementation": implementation}, offload={"optimizer": "cpu", "adam": adam},
    )
    lines = [line for line in cautions(case) if line.startswith("offload.adam")]
    assert len(lines) == bool(told)
    assert all(told in line and 'offload.adam = "deepspeed"' in line for line in lines)


@pytest.mark.parametrize(("strategy", "implementation", "ranks", "execution", "told"), [
    ({"name": "zero2"}, "for-loop", 8, {}, "one thread a rank, as torchrun sets OMP_NUM_THREADS, "
     "and takes 3.5 times as long as with 14: OMP_NUM_THREADS=14 and "
     "execution.host_threads = 14"),
    ({"name": "zero2"}, "fused", 8, {}, "takes 1.2 times"),
    ({"name": "zero2"}, "fused", 1, {}, "has 112 cores; with one thread, as accelerate and Ray set "
     "OMP_NUM_THREADS, it takes 9.2 times as long"),
    ({"name": "fsdp2", "offload": True}, "foreach", 8, {}, "takes 2.3 times"),
    ({"name": "zero2"}, "for-loop", 8, {"host_threads": 1}, ""),
    ({"name": "fsdp2"}, "foreach", 8, {}, ""), ({"name": "deepspeed2"}, "for-loop", 8, {}, ""),
])
def test_who_leaves_the_threads_of_a_step_on_the_host_to_the_launcher_is_told_what_they_cost(
    strategy: dict[str, str | bool], implementation: str, ranks: int, execution: dict[str, int],
    told: str,
) -> None:
    """Memory's part of a rank is 46 GB/s. A thread takes 40, 20 or 13 of them."""
    case = zsim.Scenario(
        model={"preset": "gpt-small"}, batch={"micro_batch": 1, "sequence_length": 64},
        cluster={"preset": "dgx-h100", "ranks": ranks}, strategy=strategy,
        precision={"parameters": "bf16", "reduce": "bf16"}, execution=execution,
        optimizer={"implementation": implementation},
        offload={} if strategy["name"] == "fsdp2" else {"optimizer": "cpu"},
    )
    lines = [line for line in cautions(case) if line.startswith("execution.host_threads")]
    assert len(lines) == bool(told)
    assert all(told in line for line in lines)


@pytest.mark.parametrize(("cores", "bandwidth", "told"), [
    (0, 370, "takes 1.2 times as long as with all cores: set OMP_NUM_THREADS and"),
    (64, 370, "as with 8: OMP_NUM_THREADS=8 and"), (64, 330, ""), (4, 370, ""),
])
def test_threads_are_warned_of_where_more_are_known_to_gain_something(
    cores: int, bandwidth: int, told: str
) -> None:
    """A file may leave cores out. 41 GB/s of memory for a rank are hardly more than its thread's
    40, and half a core a rank is no thread."""
    case = zsim.Scenario(
        model={"preset": "gpt-small"}, batch={"micro_batch": 1, "sequence_length": 64},
        cluster={"preset": "dgx-h100"}, strategy={"name": "fsdp2", "offload": True},
        precision={"parameters": "bf16"}, optimizer={"implementation": "fused"},
    )
    node = replace(
        case.cluster, host_memory_bandwidth=bandwidth * 10**9,
        host=replace(case.cluster.host, cores=cores),
    )
    lines = [line for line in cautions(derived(case, cluster=node)) if "host_threads" in line]
    assert len(lines) == bool(told)
    assert all(told in line for line in lines)


def test_who_has_a_cluster_file_without_the_time_of_an_operator_is_told() -> None:
    """Files that were written before the key was known time an operator as a launch."""
    known = zsim.Scenario(
        model={"preset": "mlp-tiny"}, batch={"micro_batch": 1}, strategy={"name": "ddp"},
        cluster={"preset": "dgx-h100"},
    )
    own = replace(known.cluster, overheads=replace(known.cluster.overheads, issue_operator=0))
    told, silent = (
        [line for line in cautions(case) if "issue_operator" in line]
        for case in (derived(known, cluster=own), known)
    )
    assert (len(told), silent) == (1, [])


@pytest.mark.parametrize("compiled", [True, False])
def test_who_compiles_is_told_that_memory_is_of_eager_kernels(compiled: bool) -> None:
    text = (
        'model = { preset = "llama-3.2-1b" }\nbatch = { micro_batch = 1 }\n'
        'cluster = { preset = "dgx-h100" }\nstrategy = { name = "fsdp2" }\n'
        f"execution = {{ compile = {str(compiled).lower()} }}\n"
    )
    lines = cautions(parse(text.encode(), where="compiled.toml"))
    assert any("memory is that of eager kernels" in line for line in lines) is compiled


@pytest.mark.parametrize(("strategy", "ranks", "parameters", "reduce", "warned"), [
    ("ddp", 2, "fp32", "bf16", True), ("ddp", 2, "fp32", "fp32", False),
    ("ddp", 2, "bf16", "bf16", False), ("zero_redundancy", 2, "fp32", "fp16", True),
    ("fsdp2", 2, "fp32", "bf16", False),
    *((name, 1, "fp32", "bf16", False) for name in ("ddp", "zero_redundancy")),
    ("ddp", 1, "bf16", "bf16", False),
])
def test_casts_that_torchs_compress_hooks_may_hold_longer_are_told(
    strategy: str, ranks: int, parameters: str, reduce: str, warned: bool
) -> None:
    """Peaks of DDP with fp16_compress_hook on two gloo ranks lay anywhere between in backward."""
    text = (
        'model = { preset = "gpt-2-124m" }\nbatch = { micro_batch = 1, sequence_length = 64 }\n'
        f'cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}\n'
        f'strategy = {{ name = "{strategy}" }}\n'
        f'precision = {{ parameters = "{parameters}", reduce = "{reduce}" }}\n'
    )
    lines = cautions(parse(text.encode(), where="hook.toml"))
    told = [line for line in lines if "_compress_hook" in line]
    assert bool(told) is warned
    assert not warned or f"{reduce}_compress_hook" in told[0]


@pytest.mark.parametrize(("limited", "cluster", "warned"), [
    (False, "dgx-h100", True), (True, "dgx-h100", False), (False, "cpu-gloo", False),
])
def test_a_host_that_gathers_far_ahead_is_told_to_reserve_more(
    limited: bool, cluster: str, warned: bool
) -> None:
    """Frees by record_stream at the times of a simulated step of Llama 3 8B on 16 GPUs. They left
    15.8 GiB more in live blocks, and 26 GiB more reserved."""
    text = (
        'model = { preset = "llama-3-8b" }\nbatch = { micro_batch = 1, sequence_length = 64 }\n'
        f'cluster = {{ preset = "{cluster}"{", ranks = 2" if cluster == "cpu-gloo" else ""} }}\n'
        f'strategy = {{ name = "fsdp1", limit_all_gathers = {str(limited).lower()} }}\n'
        'precision = { parameters = "bf16" }\n'
    )
    told = [line for line in cautions(parse(text.encode(), where="far.toml"))
            if "limit_all_gathers" in line]
    assert bool(told) is warned
    assert not warned or "about 14.96 GiB more" in told[0]
