"""deepspeed3 with sub-groups on NVMe drives: bytes, page-locked buffers, time, and what is refused.
"""

from dataclasses import replace
from typing import Any

import pytest

from zsim.analysis.scenario_warnings import caveats
from zsim.cluster.host import Drives
from zsim.errors import ScenarioError
from zsim.ir.host_ledger import replay_host
from zsim.ir.laws import program_laws
from zsim.ir.ops import Alloc, Free
from zsim.ir.program import PhaseName, Program
from zsim.ir.program import parse as parse_program
from zsim.runs.backend import RunOptions
from zsim.runs.simulator import SimBackend
from zsim.scenario.derived import derived
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario
from zsim.strategies.deepspeed_engine.shards.drives import DriveLayout

DRIVES: dict[str, Any] = {"optimizer": "nvme"}
BOTH_WAYS = DRIVES | {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
RANKS, WIDTH, HIDDEN = 8, 2048, 4096
WEIGHT = WIDTH * HIDDEN // RANKS
"""Elements of a rank's shard of each weight: 4 MiB of float32."""
ON_DRIVES = (2 * WEIGHT + HIDDEN // RANKS, 2 * WEIGHT + (WIDTH + HIDDEN) // RANKS)
IN_MEMORY = 9 * WIDTH // RANKS + 1
"""Elements of sub-groups: most of a block each; the last bias and the head."""
COUNTERS = 3 * 4


def in_files(numel: int) -> int:
    """Bytes of a file of float32: whole KiB."""
    return -(-4 * numel // 1024) * 1024


def scenario(
    offload: dict[str, Any] = DRIVES, *, width: int = WIDTH, hidden: int = HIDDEN,
    dtype: str = "bf16", **more: Any
) -> Scenario:
    """Two blocks and a head, which is smaller than a request."""
    strategy = {
        "name": "deepspeed3", "sub_group_size": 2 * WEIGHT, "stage3_prefetch_bucket_size": 0,
    } | more.pop("strategy", {})
    tables = {
        "model": {"family": "mlp", "sizes": {
            "dims": [width] * 3, "hidden": hidden, "num_classes": 8}},
        "cluster": {"preset": "dgx-a100"}, "batch": {"micro_batch": 2, "accumulation": 2},
        "precision": {"parameters": dtype, "reduce": "fp32"},
        "optimizer": {"implementation": "fused"},
    }
    return Scenario(strategy=strategy, offload=offload, **(tables | more))


def moved(program: Program, operator: str, phase: PhaseName = "steady") -> int:
    """Bytes that rank 0 reads or writes."""
    return sum(
        kernel.nbytes for op in program.of_rank(0).phase(phase) for kernel in op.kernels
        if (kernel.location, kernel.operator) == ("drive", operator)
    )


def step_ns(case: Scenario) -> int:
    return SimBackend().run(case, options=RunOptions()).step_time_ns


@pytest.mark.parametrize("offload", [DRIVES, BOTH_WAYS, BOTH_WAYS | {"parameters": "cpu"}])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_copies_and_states_are_read_and_written_in_whole_kib_and_gradients_of_a_mib(
    offload: dict[str, Any], dtype: str
) -> None:
    """Gradients of weights alone are as large; those of biases wait on the device."""
    case = scenario(offload, dtype=dtype)
    program = plan(case, device="cuda")
    program_laws.require_lawful(program, where="drives")
    assert parse_program(str(program)) == program
    files, gradients = sum(map(in_files, ON_DRIVES)), 4 * 4 * WEIGHT
    assert moved(program, "read") == 3 * files + gradients
    assert moved(program, "write") == 3 * files + gradients
    assert moved(program, "read", "first") == files + gradients
    assert moved(program, "write", "first") == 3 * files + gradients


def test_float32_gradients_cross_the_link_as_pageable_memory_to_buffers_that_cuda_does_not_know(
) -> None:
    crossed = {
        operator: sum(
            kernel.nbytes for op in plan(scenario(), device="cuda").of_rank(0).steady
            for kernel in op.kernels if kernel.operator == operator
        )
        for operator in ("to_host", "to_host_pageable")
    }
    own = sum(ON_DRIVES) + IN_MEMORY
    assert crossed == {
        "to_host": 2 * 2 * own + 4 * IN_MEMORY, "to_host_pageable": 4 * sum(ON_DRIVES)
    }


def test_host_memory_has_page_locked_buffers_of_the_largest_sub_group_and_no_states() -> None:
    case = scenario()
    own = sum(-(-p.numel // RANKS) for p in case.model.parameters)
    record = replay_host(plan(case, device="cuda").of_rank(0))["steady"]
    buffers = 4 * in_files(max(ON_DRIVES))
    assert own == sum(ON_DRIVES) + IN_MEMORY
    assert record.end_bytes == buffers + 2 * own + 16 * IN_MEMORY + COUNTERS + 1
    in_memory = replay_host(plan(scenario({"optimizer": "cpu"}), device="cuda").of_rank(0))
    assert in_memory["steady"].end_bytes == 18 * own + COUNTERS + 1


def test_states_of_the_first_step_stay_in_host_memory_until_the_second_with_a_pipeline() -> None:
    sizes = {
        bool(offload.get("pipeline_read")): replay_host(
            plan(scenario(offload), device="cuda").of_rank(0)
        )
        for offload in (DRIVES | {"buffer_count": 12}, BOTH_WAYS)
    }
    left = sizes[True]["first"].end_bytes - sizes[False]["first"].end_bytes
    assert left == 8 * sum(ON_DRIVES)
    assert sizes[True]["steady"].end_bytes == sizes[False]["steady"].end_bytes


def kept(case: Scenario) -> dict[str, int]:
    """Bytes of float32 gradients that are on the device when the optimizer's step begins."""
    live: dict[str, int] = {}
    for op in plan(case, device="cuda").of_rank(0).steady:
        if op.unit == "gradient_norm":
            break
        for event in op.memory:
            if isinstance(event, Alloc) and event.buffer.endswith(":swapped"):
                live[event.buffer.removesuffix(":swapped")] = event.nbytes
            elif isinstance(event, Free):
                live.pop(event.buffer.removesuffix(":swapped"), None)
    return live


def test_gradients_below_a_request_wait_on_the_device_and_so_does_all_of_an_uneven_one() -> None:
    """The rest behind whole KiB is a view, which keeps the whole shard."""
    assert set(kept(scenario())) == {
        "blocks.0.fc1.bias", "blocks.0.fc2.bias", "blocks.1.fc1.bias"
    }
    uneven = kept(scenario(width=8 * 257, hidden=8 * 513))
    assert uneven["blocks.0.fc1.weight"] == 4 * 8 * 257 * 513


def test_a_sub_group_below_a_request_stays_in_host_memory() -> None:
    case = scenario(DRIVES | {"block_size": "64 MiB"})
    assert moved(plan(case, device="cuda"), "read") == 0
    assert moved(plan(scenario(DRIVES | {"block_size": "8 MiB"}), device="cuda"), "read") > 0


def test_a_pipeline_hides_reads_and_writes_and_nothing_is_faster_than_the_drives() -> None:
    case = scenario(BOTH_WAYS, strategy={"sub_group_size": 1})
    plain, both = scenario(DRIVES, strategy={"sub_group_size": 1}), step_ns(case)
    program = plan(case, device="cuda")
    drives = case.cluster.drives
    assert drives is not None
    assert both < step_ns(plain)
    for operator, rate in (("read", drives.read), ("write", drives.write)):
        assert both >= RANKS * moved(program, operator) * 10**9 // rate
    slow = replace(case.cluster, drives=Drives(
        read=drives.read, write=drives.write // 10, capacity=drives.capacity))
    assert step_ns(derived(case, cluster=slow)) > 2 * both


def test_buffers_are_written_when_full_and_the_host_waits_when_none_is_free() -> None:
    """Two buffers of 1,024 Ki elements each; gradients of 512 Ki, one of which is too small."""
    size, half = 2**20, 2**19
    layout = DriveLayout((size,), replace(scenario().offload, buffer_count=2))
    buckets = [[half, half], [half, 1000], [half], [half], [half, half, half]]
    assert list(layout.flushes(buckets)) == [
        (0,), (size,), (0,), (size, 0), (size,), (size, 0),
    ]
    assert list(layout.flushes([])) == [(0, 0)]


@pytest.mark.parametrize(("offload", "more", "told"), [
    (DRIVES, {"strategy": {"name": "deepspeed2", "sub_group_size": 1}}, "sub_group_size: "),
    (BOTH_WAYS | {"buffer_count": 11}, {}, "offload.buffer_count: expected at least 12, four for"),
    (DRIVES | {"parameters": "nvme"}, {},
     "offload.parameters: expected cpu with deepspeed3, found nvme, which zero3 alone have"),
    (DRIVES, {"cluster": {"preset": "pcie-box"}},
     "offload.optimizer: expected a cluster whose file has [drives], found pcie-box without; "),
    (DRIVES, {"model": {"preset": "gpt-3-175b"}, "cluster": {"preset": "cpu-gloo", "ranks": 4},
              "batch": {"micro_batch": 1, "sequence_length": 64}},
     "offload.optimizer: expected at most 93.13 GiB, the drives of a node of cpu-gloo, found 2.5"),
    (DRIVES | {"buffer_count": 1024}, {"model": {"preset": "llama-2-70b"},
              "batch": {"micro_batch": 1, "sequence_length": 64},
              "strategy": {"sub_group_size": 10**9}},
     "take fewer offload.buffer_count"),
])
def test_what_drives_cannot_do_is_refused_with_what_is_needed(
    offload: dict[str, Any], more: dict[str, Any], told: str
) -> None:
    with pytest.raises(ScenarioError) as refused:
        scenario(offload, **more)
    assert told in str(refused.value)


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_say_that_deepspeed_takes_drives_for_host_memory(stage: int) -> None:
    with pytest.raises(ScenarioError) as refused:
        Scenario(
            model={"preset": "gpt-tiny"}, batch={"micro_batch": 1, "sequence_length": 16},
            cluster={"preset": "dgx-a100"}, strategy={"name": f"deepspeed{stage}"}, offload=DRIVES,
        )
    assert (
        f"offload.optimizer: expected cpu with deepspeed{stage}, found nvme, which zero1, zero2, "
        "zero3 and deepspeed3 alone have; DeepSpeed takes nvme for cpu here"
    ) in str(refused.value)


def test_deepspeed_clips_and_needs_no_pinned_gradients_where_zero3_does() -> None:
    offload = DRIVES | {"pin_memory": False}
    case = scenario(offload, optimizer={"implementation": "fused", "clip_norm": 1.0})
    assert case.optimizer.clip_norm == 1.0
    record = replay_host(plan(case, device="cuda").of_rank(0))["steady"]
    assert record.pinned_bytes == 0


def test_a_gradient_at_an_address_that_direct_reads_refuse_is_warned_of() -> None:
    """550 elements of a bias lie in front of it: 2,200 bytes."""
    assert not any("512 bytes" in str(each) for each in caveats(scenario()))
    uneven = scenario(hidden=HIDDEN + 8 * 38)
    told = [str(each) for each in caveats(uneven) if "512 bytes" in str(each)]
    assert len(told) == 1
    assert "the gradient of blocks.0.fc2.weight is read to no multiple" in told[0]
    by_itself = scenario(hidden=HIDDEN + 8 * 38, strategy={"sub_group_size": 1})
    assert not any("512 bytes" in str(each) for each in caveats(by_itself))
