"""CPUOffloadPolicy on a GPU: the states leave the device, every use of them crosses the link, the
optimizer steps on the host."""

from __future__ import annotations

import pytest

from zsim.cluster.cluster_presets import load_cluster
from zsim.engine.costs.op_costs import Costs
from zsim.ir.host_ledger import replay_host
from zsim.ir.ledger_replay import replay
from zsim.ir.ops import Alloc, Kernel
from zsim.ir.program import Program
from zsim.ir.program import parse as parse_program
from zsim.memory.fits import assess
from zsim.models.training_options import DTYPE_NBYTES
from zsim.runs.backend import RunOptions
from zsim.runs.simulator import SimBackend
from zsim.scenario.plan import plan, planned
from zsim.scenario.scenario import Scenario, parse


def scenario(
    *, offload: str = "true", accumulation: int = 1, name: str = '"fsdp2"', precision: str = "bf16",
    more: str = "",
) -> Scenario:
    text = f"""
model = {{ preset = "gpt-tiny" }}
batch = {{ micro_batch = 1, sequence_length = 16, accumulation = {accumulation} }}
cluster = {{ preset = "dgx-a100" }}
strategy = {{ name = {name}, offload = {offload} }}
precision = {{ parameters = "{precision}", reduce = "fp32" }}
{more}
"""
    return parse(text.encode(), where="offload.toml")


def transfers(program: Program, operator: str) -> list[tuple[str, int]]:
    """(unit, bytes) of every crossing of the link in rank 0's steady step."""
    return [
        (op.unit, k.nbytes) for op in program.of_rank(0).steady for k in op.kernels
        if k.operator == operator
    ]


def shard_nbytes(case: Scenario) -> dict[str, int]:
    """The bytes of one rank's padded float32 shard of each group."""
    rows = case.mesh.dp_shard
    cut = {
        u.fqn: sum(-(-p.shape[0] // rows) * (p.numel // p.shape[0]) for p in u.parameters)
        for u in case.model.units
    }
    return {fqn: numel * DTYPE_NBYTES["float32"] for fqn, numel in cut.items()}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_each_all_gather_brings_a_shard_to_the_device_and_each_reduction_takes_one_back(
    accumulation: int
) -> None:
    case = scenario(accumulation=accumulation)
    program, shard = plan(case, device="cuda"), shard_nbytes(case)
    gathers = [op.unit for op in program.of_rank(0).steady if op.kind == "all_gather"]
    reductions = [op.unit for op in program.of_rank(0).steady if op.kind == "reduce_scatter"]

    assert transfers(program, "to_device") == [(unit, shard[unit]) for unit in gathers]
    assert transfers(program, "to_host") == [(unit, shard[unit]) for unit in reductions]


@pytest.mark.parametrize("name", ['"fsdp2"', '"hsdp", dp_replicate = 2, dp_shard = 4'])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_between_steps_nothing_is_left_on_the_device(
    name: str, precision: str, accumulation: int
) -> None:
    program = plan(
        scenario(name=name, precision=precision, accumulation=accumulation), device="cuda"
    )
    memory = replay(program.of_rank(0))
    assert {memory[phase].end_bytes for phase in ("construction", "first", "steady")} == {0}
    assert {op.stream for op in program.of_rank(0).steady if op.kind == "optimizer"} == {"host"}


def test_a_shard_is_cast_on_the_device_before_the_next_one_comes() -> None:
    case = scenario()
    first = next(
        op for op in plan(case, device="cuda").of_rank(0).steady
        if op.stream == "all_gather_copy_in"
    )
    events = [str(getattr(event, "buffer", "")) for event in first.memory]
    fqns = [parameter.fqn for parameter in case.model.units[0].parameters]
    assert events == [
        f"{fqn}.{what}" for fqn in fqns for what in ("onloaded", "cast", "onloaded")
    ] + [f"{first.unit}.all_gather"]
    rows = case.mesh.dp_shard
    shards = [
        -(-p.shape[0] // rows) * (p.numel // p.shape[0]) for p in case.model.units[0].parameters
    ]
    made = [event.nbytes for event in first.memory if isinstance(event, Alloc)]
    # as it is kept, and as it computes
    assert made[:-1] == [nbytes for numel in shards for nbytes in (4 * numel, 2 * numel)]


def test_later_micro_batches_are_added_on_the_host_which_waits_for_them() -> None:
    steady = plan(scenario(accumulation=2), device="cuda").of_rank(0).steady
    adds = [
        op
        for op in steady
        if op.stream == "host"
        and any(k.operator == "add" and k.location == "host" for k in op.kernels)
    ]
    assert [op.unit for op in adds] == [
        op.unit for op in steady if op.kind == "reduce_scatter" and op.micro_batch == 1
    ]
    assert all(op.waits for op in adds)


def test_on_a_cpu_the_host_is_the_device_and_nothing_moves() -> None:
    both = [
        plan(scenario(offload=offload, precision="fp32"), device="cpu")
        for offload in ("true", "false")
    ]
    assert both[0] == both[1]


def test_the_programs_text_says_where_a_kernel_runs_and_parses_back() -> None:
    program = plan(scenario(), device="cuda")
    text = str(program)
    assert " B float32 on link" in text
    assert " B float32 on host" in text
    assert parse_program(text) == program


def test_a_step_waits_for_the_link_and_for_the_optimizer_on_the_host() -> None:
    """A step of one launch, as on so small a model more of them take longer than the host."""
    once = 'optimizer = { name = "adamw", implementation = "fused" }'
    cases = [scenario(offload=offload, more=once) for offload in ("true", "false")]
    offloaded, plain = (SimBackend().run(case, options=RunOptions()) for case in cases)
    assert offloaded.step_time_ns is not None
    assert plain.step_time_ns is not None
    costs = Costs(load_cluster("dgx-a100"))
    both = [plan(case, device="cuda").of_rank(0).steady for case in cases]
    on_host, on_device = (
        sum(costs.compute_ns(op.kernels) for op in ops if op.kind == "optimizer") for ops in both
    )
    assert offloaded.step_time_ns - plain.step_time_ns > on_host - on_device > 0


def test_host_and_link_have_rates_of_their_own() -> None:
    cluster = load_cluster("dgx-a100")
    costs, whole = Costs(cluster), cluster.host_memory_bandwidth
    assert costs.kernel_ns(Kernel("adamw.fused", 0, whole, "float32", location="host")) == 10**9
    assert costs.kernel_ns(
        Kernel("to_host", 0, cluster.links.host.bandwidth, "float32", location="link")
    ) == 10**9


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_host_has_sixteen_bytes_of_each_element_of_a_shard(precision: str) -> None:
    """Shard, gradient and two states, all float32, and the step counters of AdamW."""
    case = scenario(precision=precision, more='optimizer = { implementation = "fused" }')
    program = plan(case, device="cuda")
    shard = sum(shard_nbytes(case).values())
    host = replay_host(program.of_rank(0))
    assert host["steady"].peak_bytes == 4 * shard + 4 * len(case.model.parameters)
    assert host["steady"].pinned_bytes == 2 * shard
    assert host["first"].end_bytes == host["steady"].end_bytes
    verdict = assess(planned(case)).host
    assert verdict is not None
    assert verdict.offloaded_bytes == sum(
        replay_host(program.of_rank(rank))["steady"].peak_bytes for rank in range(8)
    )


def test_an_offload_that_the_host_has_no_room_for_is_out_of_memory() -> None:
    """34e9 parameters at 16 B are 540 GB of the 512 GB of a small server."""
    text = """
model = { preset = "llama-2-34b" }
batch = { micro_batch = 1, sequence_length = 2048 }
cluster = { preset = "pcie-box" }
strategy = { name = "fsdp2", offload = true }
precision = { parameters = "bf16", reduce = "bf16" }
activation_checkpointing = { mode = "full" }
"""
    answer = assess(planned(parse(text.encode(), where="large.toml")))
    assert answer.host is not None
    assert (answer.on_device, answer.host.verdict, answer.verdict) == ("FITS", "OOM", "OOM")


def test_offloaded_gradients_are_clipped_by_the_host() -> None:
    case = scenario(more='optimizer = { name = "adamw", clip_norm = 1.0 }')
    steady = plan(case, device="cuda").of_rank(0).steady
    clipping = [op for op in steady if op.unit in ("gradient_norm", "gradient_clip")]
    assert [(op.kind, op.stream) for op in clipping] == [
        ("optimizer", "host"), ("all_reduce", "all_reduce"), ("optimizer", "host")
    ]
    assert {kernel.location for op in clipping for kernel in op.kernels} == {"host"}
    assert all(not op.memory for op in clipping)
    SimBackend("cuda").run(case, options=RunOptions())
