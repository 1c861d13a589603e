"""deepspeed3 with sub-groups on NVMe drives: bytes, page-locked buffers, time, and what is refused.
"""

from dataclasses import replace
from typing import Any

import pytest

from zsim.analysis.scenario_warnings import caveats
from zsim.cluster.host import Drives
from zsim.errors import ScenarioError
from zsim.io.units import format_bytes
from zsim.ir.host_ledger import replay_host
from zsim.ir.laws import program_laws
from zsim.ir.ops import Alloc, Free, HostAlloc
from zsim.ir.program import PhaseName, Program
from zsim.ir.program import parse as parse_program
from zsim.memory.host import host_memory
from zsim.runs.backend import RunOptions
from zsim.runs.simulator import SimBackend
from zsim.scenario.derived import derived
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES
from zsim.strategies.deepspeed_engine.shards.drives import DriveLayout

DRIVES: dict[str, Any] = {"optimizer": "nvme"}
BOTH_WAYS = DRIVES | {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
WHOLE = DRIVES | {"parameters": "nvme", "max_in_cpu": 0}
RANKS, WIDTH, HIDDEN = 8, 2048, 4096
WEIGHT = WIDTH * HIDDEN // RANKS
"""Elements of a rank's shard of each weight: 4 MiB of float32."""
ON_DRIVES = (2 * WEIGHT + HIDDEN // RANKS, 2 * WEIGHT + (WIDTH + HIDDEN) // RANKS)
IN_MEMORY = 9 * WIDTH // RANKS + 1
"""Elements of sub-groups: most of a block each; the last bias and the head."""
COUNTERS = 3 * 4
FLAG, NORM = 1, 4


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
    assert record.end_bytes == buffers + 2 * own + 16 * IN_MEMORY + COUNTERS + FLAG + NORM
    in_memory = replay_host(plan(scenario({"optimizer": "cpu"}), device="cuda").of_rank(0))
    assert in_memory["steady"].end_bytes == 18 * own + COUNTERS + FLAG + NORM


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


def parameters_moved(case: Scenario, operator: str) -> int:
    """Bytes of parameters that rank 0 reads or writes in a steady step."""
    in_memory = derived(case, offload=replace(case.offload, parameters="cpu", max_in_cpu=10**9))
    return moved(plan(case, device="cuda"), operator) - moved(
        plan(in_memory, device="cuda"), operator
    )


def test_shards_of_a_mib_are_read_for_each_gather_of_a_pass_and_written_once() -> None:
    """Four weights in bf16 twice in each of two micro-batches. Biases and the head stay in memory.
    """
    case = scenario(WHOLE, strategy={"stage3_max_reuse_distance": 0})
    assert parameters_moved(case, "read") == 2 * 2 * 4 * 2 * WEIGHT
    assert parameters_moved(case, "write") == 4 * 2 * WEIGHT
    program = plan(case, device="cuda")
    program_laws.require_lawful(program, where="drives")
    assert parse_program(str(program)) == program


@pytest.mark.parametrize(("most", "stay"), [
    (0, 0), (ON_DRIVES[0] - 1, 0), (ON_DRIVES[0], 1), (sum(ON_DRIVES), 2), (10**9, 2),
])
def test_whole_sub_groups_stay_in_memory_while_they_are_within_the_elements_for_it(
    most: int, stay: int
) -> None:
    case = scenario(WHOLE | {"max_in_cpu": most})
    assert parameters_moved(case, "write") == (2 - stay) * 2 * 2 * WEIGHT


def test_host_memory_has_buffers_of_parameters_however_few_are_on_drives() -> None:
    """Five of 10^8 elements in bf16, a number, and one buffer of the largest sub-group whole."""
    buffers = 5 * -(-2 * 10**8 // 1024) * 1024 + 2

    def end(offload: dict[str, Any]) -> int:
        return replay_host(plan(scenario(offload), device="cuda").of_rank(0))["steady"].end_bytes

    in_memory = end(DRIVES | {"parameters": "cpu"})
    assert end(WHOLE | {"max_in_cpu": 10**9}) - in_memory == buffers
    own = sum(ON_DRIVES) + IN_MEMORY
    small = own - 4 * WEIGHT  # in memory each by itself; one element is in place of all others
    whole = 2 * (WIDTH + 2 * RANKS * WEIGHT + HIDDEN)
    assert end(WHOLE) - in_memory == buffers + whole + 2 * (small + 1 - own)


def test_the_buffer_to_write_parameters_is_of_whole_ones_and_told_with_what_shrinks_it() -> None:
    """DeepSpeed hands `ds_numel` of each parameter, and not its shard's elements, to
    `reserve_partitioned_swap_space` (stage3.py of 0.19.8). A whole sub-group of two bytes an
    element is page-locked by aio, eight times what a rank writes."""
    case = scenario(WHOLE)
    (buffer,) = [
        event for op in plan(case, device="cuda").ranks[0].construction for event in op.host
        if isinstance(event, HostAlloc) and event.buffer == "host.swap:written"
    ]
    assert buffer.nbytes == 2 * (WIDTH + 2 * RANKS * WEIGHT + HIDDEN)
    assert buffer.locked
    assert not buffer.pinned
    (told,) = [each.text for each in caveats(case) if "host memory to write" in each.text]
    assert f"a rank locks {format_bytes(buffer.nbytes)} of" in told
    assert told.endswith(f"take a smaller sub_group_size than {2 * WEIGHT:,}")
    assert not [each for each in caveats(scenario()) if "host memory to write" in each.text]


@pytest.mark.parametrize("offload", [
    {"optimizer": "cpu"}, DRIVES, BOTH_WAYS, WHOLE, WHOLE | {"max_in_cpu": ON_DRIVES[0]},
    WHOLE | {"max_in_cpu": 10**9}, WHOLE | {"parameter_buffer_size": WEIGHT + 1},
], ids=str)
def test_a_scenario_is_held_to_the_page_locked_bytes_that_its_program_takes(
    offload: dict[str, Any]
) -> None:
    """The buffers of drives too, to read parameters and to write them."""
    case = scenario(offload)
    record = replay_host(plan(case, device="cuda").ranks[0])["steady"]
    assert STRATEGIES[case.strategy].pinned(
        case.offload, case.options, case.model, case.mesh, case.precision
    ) == record.locked_bytes + record.pinned_bytes


def test_the_verdict_on_the_host_tells_what_deepspeed_locks_beside_what_torch_pins() -> None:
    case = scenario(WHOLE)
    record = replay_host(plan(case, device="cuda").ranks[0])["steady"]
    host = host_memory(plan(case, device="cuda"), case.cluster)
    assert host is not None
    buffers = [
        event for op in plan(case, device="cuda").ranks[0].construction for event in op.host
        if isinstance(event, HostAlloc) and event.buffer.startswith("host.swap")
        and "placeholder" not in event.buffer
    ]
    assert len(buffers) == 3
    assert record.locked_bytes == sum(buffer.nbytes for buffer in buffers)
    assert host.locked_bytes == RANKS * record.locked_bytes
    assert str(host).endswith(f"pinned, {format_bytes(host.locked_bytes)} locked for drives")
    kept = scenario({"optimizer": "cpu"})
    assert "locked" not in str(host_memory(plan(kept, device="cuda"), kept.cluster))
    text = str(plan(case, device="cuda"))
    assert "in locked" in text
    assert parse_program(text) == plan(case, device="cuda")


def test_shards_are_read_ahead_beside_compute_where_gathers_are() -> None:
    late = scenario(WHOLE, strategy={"stage3_max_reuse_distance": 0})
    ahead = scenario(WHOLE, strategy={
        "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 1})
    assert parameters_moved(ahead, "read") == parameters_moved(late, "read")
    assert step_ns(ahead) < step_ns(late)
    in_memory = step_ns(scenario(DRIVES | {"parameters": "cpu"}))
    assert in_memory < step_ns(ahead)


def test_shards_from_drives_cross_the_link_as_pageable_memory() -> None:
    case = scenario(WHOLE, strategy={"stage3_max_reuse_distance": 0})
    crossed = sum(
        kernel.nbytes for op in plan(case, device="cuda").of_rank(0).steady
        for kernel in op.kernels if kernel.operator == "to_device_pageable"
    )
    assert crossed == parameters_moved(case, "read")


def test_construction_has_float32_copies_for_a_moment_of_sub_groups_that_are_read_from_files(
) -> None:
    case = scenario(WHOLE | {"max_in_cpu": ON_DRIVES[0]})
    made = [
        event.nbytes for op in plan(case, device="cuda").of_rank(0).construction
        for event in op.host if isinstance(event, HostAlloc) and "wide" in event.buffer
    ]
    assert made == [4 * ON_DRIVES[1]]


def test_files_of_a_rank_are_of_gradients_copies_states_and_parameters() -> None:
    def on_drives(case: Scenario) -> int:
        return STRATEGIES[case.strategy].drive_nbytes(
            case.offload, case.options, case.model, case.mesh, case.precision, case.optimizer
        )

    assert on_drives(scenario()) == 4 * sum(map(in_files, ON_DRIVES))
    assert on_drives(scenario(WHOLE)) - on_drives(scenario()) == 4 * 2 * WEIGHT


def test_a_gather_without_a_free_buffer_is_refused_where_deepspeed_fails() -> None:
    """Weights that backward uses again stay whole, and so do the buffers of their shards."""
    told = "^scenario: offload.parameter_.* found none for blocks.1.fc2.weight, where DeepSpeed"
    with pytest.raises(ScenarioError, match=told):
        plan(scenario(WHOLE | {"parameter_buffer_count": 3}), device="cuda")
    plan(scenario(WHOLE | {"parameter_buffer_count": 4}), device="cuda")
    released = {"stage3_max_reuse_distance": 0}
    plan(scenario(WHOLE | {"parameter_buffer_count": 1}, strategy=released), device="cuda")


@pytest.mark.parametrize(("offload", "more", "told"), [
    (DRIVES, {"strategy": {"name": "deepspeed2", "sub_group_size": 1}}, "sub_group_size: "),
    (BOTH_WAYS | {"buffer_count": 7}, {},
     "offload.buffer_count: expected at least 8, for gradient, copy and states of each sub-group "
     "in flight, found 7"),
    (DRIVES | {"max_in_cpu": 1}, {},
     'offload.max_in_cpu: expected with deepspeed3 and parameters = "nvme" alone'),
    (WHOLE | {"parameter_buffer_size": 10**6}, {},
     "offload.parameter_buffer_size: expected at least 1,048,576 elements, the largest shard, "
     "found 1,000,000"),
    (WHOLE, {"strategy": {"stage3_param_persistence_threshold": 10**8}},
     "strategy.stage3_param_persistence_threshold: expected less with parameters on drives"),
    (WHOLE | {"parameter_buffer_count": 1024, "parameter_buffer_size": 10**9}, {},
     "offload.pin_memory: expected at most"),
    (WHOLE, {"frozen": ["*.bias"]}, "offload.parameters: expected cpu with frozen parameters"),
    (WHOLE, {"strategy": {"zero_hpz_partition_size": 2}},
     "strategy.zero_hpz_partition_size: expected 1 with parameters on drives"),
    (DRIVES, {"strategy": {"trace": "breaks"}},
     'strategy.trace: expected "holds" with some blocks alone on drives, found "breaks", of which '
     "each order has other requests; take strategy.sub_group_size = 1"),
    (WHOLE | {"max_in_cpu": 3 * WEIGHT}, {"strategy": {"trace": "breaks", "sub_group_size": 1}},
     "take strategy.sub_group_size = 1, offload.max_in_cpu = 0"),
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


@pytest.mark.parametrize("ahead", [0, 5 * 10**7])
@pytest.mark.parametrize("offload", [BOTH_WAYS, WHOLE])
def test_programs_of_a_trace_that_breaks_obey_every_law_with_drives(
    offload: dict[str, Any], ahead: int
) -> None:
    case = scenario(offload, strategy={
        "trace": "breaks", "sub_group_size": 1, "stage3_prefetch_bucket_size": ahead,
    })
    assert program_laws.breaches(plan(case, device="cuda")) == ()


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


@pytest.mark.parametrize(("size", "more", "told"), [
    ("1 MiB", {}, ""), ("8 MiB", {}, ""),
    ("8 GiB", {},
     "3 of 3 sub-groups in host memory and not on drives, the largest with 8.00 MiB of float32 on "
     "a rank, below 8.00 GiB of a request; take a smaller offload.block_size"),
    ("8 MiB", {"strategy": {"sub_group_size": 3 * WEIGHT}},
     "1 of 2 sub-groups in host memory and not on drives, the largest with 4.01 MiB"),
    ("1 MiB", {"width": 64, "hidden": 64},
     "1 of 1 sub-group in host memory and not on drives, the largest with 8,580 B of float32 on a "
     'rank, below 1.00 MiB of a request; take offload.optimizer = "cpu"'),
])
def test_sub_groups_that_a_request_keeps_off_drives_are_warned_of_with_both_sizes(
    size: str, more: dict[str, Any], told: str
) -> None:
    """The head's sub-group is below 1 MiB, which no request mends."""
    warned = [str(each) for each in caveats(scenario(DRIVES | {"block_size": size}, **more))
              if "not on drives" in str(each)]
    assert [f"deepspeed3: {told}" in each for each in warned] == [True] * bool(told)


@pytest.mark.parametrize(("optimizer", "tensors"), [
    ({}, 4), ({"name": "sgd", "momentum": 0.9}, 3), ({"name": "sgd"}, 2),
])
@pytest.mark.parametrize(("offload", "groups", "in_flight"), [
    ({}, 4, 1), ({"pipeline_read": True}, 4, 2), ({"pipeline_write": True}, 4, 2),
    ({"pipeline_read": True, "pipeline_write": True}, 4, 3),
    ({"pipeline_read": True, "pipeline_write": True}, 2, 2),
    ({"pipeline_read": True, "pipeline_write": True}, 1, 1),
])
def test_buffers_are_for_each_tensor_of_the_sub_groups_in_flight_as_deepspeed_takes_them(
    optimizer: dict[str, Any], tensors: int, offload: dict[str, Any], groups: int, in_flight: int
) -> None:
    """DeepSpeed 0.19.8 trains with so many, and fails with one less."""
    more = {"strategy": {"sub_group_size": {4: WEIGHT, 2: 2 * WEIGHT, 1: 10**9}[groups]}}
    needed = tensors * in_flight
    scenario(DRIVES | offload | {"buffer_count": needed}, optimizer=optimizer, **more)
    with pytest.raises(ScenarioError, match=f"offload.buffer_count: expected at least {needed}, "):
        scenario(DRIVES | offload | {"buffer_count": needed - 1}, optimizer=optimizer, **more)
