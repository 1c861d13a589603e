"""zero1, zero2 and zero3 with states on NVMe drives: bytes read and written, buffers, pipelines,
and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zsim.strategies.offload.test_offloaded_zero import COUNTER, scenario, shards, step_ns
from zsim.cluster.host import Drives
from zsim.engine.bands.error_bands import QUEUED_DRIVES
from zsim.engine.costs.host_work import queued_rate
from zsim.errors import ScenarioError
from zsim.ir.host_ledger import replay_host
from zsim.ir.laws import program_laws
from zsim.ir.program import PhaseName, Program
from zsim.ir.program import parse as parse_program
from zsim.scenario.derived import derived
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario

DRIVES = 'optimizer = "nvme"'
AHEAD = f"{DRIVES}, pipeline_read = true, buffer_count = 8"
BOTH_WAYS = f"{DRIVES}, pipeline_read = true, pipeline_write = true, buffer_count = 12"
FORMS = [
    *((strategy, DRIVES) for strategy in ("zero1", "zero2", "zero3")),
    ("zero3", AHEAD), ("zero2", BOTH_WAYS), ("zero3", f'{BOTH_WAYS}, parameters = "cpu"'),
]


def moved(program: Program, operator: str, phase: PhaseName = "steady") -> int:
    """Bytes that rank 0 reads or writes."""
    return sum(
        kernel.nbytes for op in program.of_rank(0).phase(phase) for kernel in op.kernels
        if (kernel.location, kernel.operator) == ("drive", operator)
    )


@pytest.mark.parametrize(("strategy", "offload"), FORMS)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_sixteen_bytes_of_each_element_are_read_and_sixteen_written(
    strategy: str, offload: str, precision: str
) -> None:
    """Gradient, float32 copy and two states each way, whatever the pipeline; the first step has no
    states to read."""
    case = scenario(strategy, offload, precision=precision, accumulation=2)
    program, own = plan(case, device="cuda"), sum(shards(case).values())
    program_laws.require_lawful(program, where="drives")
    assert parse_program(str(program)) == program
    assert (moved(program, "read"), moved(program, "write")) == (16 * own, 16 * own)
    assert moved(program, "read", "first") == 8 * own
    assert moved(program, "write", "first") == 16 * own


def test_parameters_on_drives_are_read_for_each_all_gather_and_written_once() -> None:
    case = scenario(offload=f'{DRIVES}, parameters = "nvme"', accumulation=2)
    program, numels = plan(case, device="cuda"), shards(case)
    program_laws.require_lawful(program, where="drives")
    gathered = sum(
        2 * numels[op.unit] for op in program.of_rank(0).steady if op.kind == "all_gather"
    )
    own = sum(numels.values())
    assert moved(program, "read") == 16 * own + gathered
    assert moved(program, "write") == 16 * own + 2 * own


@pytest.mark.parametrize(("offload", "count"), [(DRIVES, 4), (AHEAD, 8), (BOTH_WAYS, 12)])
@pytest.mark.parametrize(("precision", "narrow"), [("bf16", 2), ("fp32", 4)])
def test_the_host_has_the_buffers_and_what_goes_to_the_device(
    offload: str, count: int, precision: str, narrow: int
) -> None:
    case = scenario(offload=offload, precision=precision)
    own, groups = shards(case).values(), len(shards(case))
    records = replay_host(plan(case, device="cuda").of_rank(0))
    buffers = count * 4 * max(own)
    assert records["steady"].peak_bytes == buffers + narrow * sum(own) + COUNTER * groups
    assert records["steady"].pinned_bytes == buffers + narrow * sum(own)
    assert records["first"].end_bytes == records["steady"].end_bytes


def slow_drives(case: Scenario, bandwidth: int) -> Scenario:
    """The scenario with drives so slow that nothing else takes any time."""
    assert case.cluster.drives is not None
    drives = Drives(read=bandwidth, write=bandwidth, capacity=case.cluster.drives.capacity)
    return derived(case, cluster=replace(case.cluster, drives=drives))


def test_reads_and_writes_follow_one_another_or_overlap_as_the_pipeline_has_it() -> None:
    """Drives take all the time here. Serially a step takes what is read and written; read ahead and
    written behind it takes the longer of both, and the ends."""
    cases = {
        name: slow_drives(scenario(offload=offload), 10**6)
        for name, offload in (("serial", DRIVES), ("ahead", AHEAD), ("both", BOTH_WAYS))
    }
    took = {name: step_ns(case) for name, case in cases.items()}
    bytes_each_way = 16 * 8 * sum(shards(cases["serial"]).values())
    alone = bytes_each_way * 1000  # ns at 1 MB/s
    assert took["serial"] == pytest.approx(2 * alone, rel=0.02)
    assert alone < took["both"] <= took["ahead"] < took["serial"]
    # the gradients' part is written before anything is read; the first group is read and the last
    # one written with nothing beside
    assert took["both"] < 1.65 * alone


@given(
    form=st.sampled_from(FORMS), precision=st.sampled_from(["bf16", "fp32"]),
    times=st.integers(2, 50), which=st.sampled_from(["read", "write"]),
)
@settings(max_examples=25, deadline=None)
def test_faster_drives_slow_no_step_and_none_is_faster_than_its_bytes(
    form: tuple[str, str], precision: str, times: int, which: str
) -> None:
    case = scenario(
        *form, precision=precision,
        more='execution = { interference = false, issue_kernel = "6 us" }',
    )
    drives, took = case.cluster.drives, step_ns(case)
    assert drives is not None
    faster = replace(drives, **{which: times * getattr(drives, which)})
    assert step_ns(case, replace(case.cluster, drives=faster)) <= took
    nbytes = 16 * 8 * sum(shards(case).values()) * 10**9
    assert took >= max(nbytes // drives.read, nbytes // drives.write)


PUBLISHED = {
    2**16: {1: 0.49, 4: 1.05, 16: 3.06, 64: 3.87, 128: 3.90},
    2**18: {1: 1.06, 4: 2.35, 16: 5.22, 64: 5.84, 128: 5.88},
}
"""GB/s of a drive of 6.4 GB/s (Phison E27T) by bytes of a request and requests at once, as measured
in github.com/0xBakeer/deepseek-v41-flash-spark, issue 2."""


def test_a_drive_is_as_fast_as_published_with_few_requests_at_once_and_with_many() -> None:
    errors = [
        abs(queued_rate(6_400_000_000, size * depth) / (rate * 10**9) - 1)
        for size, rates in PUBLISHED.items() for depth, rate in rates.items()
    ]
    assert max(errors) < QUEUED_DRIVES
    assert sum(error < 0.25 for error in errors) == 7
    assert queued_rate(6_400_000_000, 0) == 6_400_000_000


def one_rank(requests: str) -> int:
    """The ns of a step of one rank over drives."""
    return step_ns(scenario(
        "zero2", f"{DRIVES}, {requests}", model='preset = "llama-3.2-1b"',
        cluster='preset = "dgx-a100", ranks = 1',
    ))


def test_more_requests_at_once_are_no_slower_and_few_of_them_bound_the_step() -> None:
    queues = (("4 KiB", 1), ("64 KiB", 1), ("64 KiB", 8), ("1 MiB", 8), ("1 GiB", 8))
    took = [one_rank(f'block_size = "{size}", queue_depth = {depth}') for size, depth in queues]
    tuned = one_rank("pipeline_read = false")
    assert took == sorted(took, reverse=True)
    assert took[0] > 20 * took[-1]
    assert tuned <= took[-1] < 1.01 * tuned


def test_ranks_in_step_are_as_fast_as_all_of_them() -> None:
    case = scenario("zero3", f'{BOTH_WAYS}, parameters = "nvme"', accumulation=2)
    assert step_ns(case) == step_ns(case, all_ranks=True)


def test_reads_wait_for_buffers_and_steps_for_reads() -> None:
    """The next read waits for the write of the group that had its buffers."""
    steady = plan(scenario(offload=AHEAD), device="cuda").of_rank(0).steady
    begin = next(op.index for op in steady if op.kind == "optimizer")
    reads = [op for op in steady if op.stream == "drive_read"]
    writes = [op for op in steady if op.stream == "drive_write" and op.index > begin]
    for read, write in zip(reads[2:], writes[:-2], strict=True):
        assert write.index in read.waits
    steps = [op for op in steady if op.kind == "optimizer"]
    assert [step.waits[0] for step in steps] == [read.index for read in reads]
    assert all(write.index in step.waits for write, (_, step) in zip(
        writes[:-1], pairwise(steps), strict=True
    ))


@pytest.mark.parametrize(("offload", "more", "complaint"), [
    (f"{DRIVES}, pipeline_read = true", {},
     "offload.buffer_count: expected at least 8, four for each group in flight, found 4"),
    (f"{DRIVES}, buffer_count = 3", {},
     "offload.buffer_count: expected at least 4, four for each group in flight, found 3"),
    (f"{DRIVES}, pin_memory = false", {}, "offload.pin_memory: expected true"),
    ('optimizer = "cpu", parameters = "nvme"', {},
     'offload.parameters: expected with offload.optimizer = "nvme", found without, '
         'which is not modelled'),
    ('optimizer = "cpu", pipeline_write = true', {},
     'offload.pipeline_write: expected with offload.optimizer = "nvme", found without'),
    ('optimizer = "cpu", queue_depth = 4', {},
     'offload.queue_depth: expected with offload.optimizer = "nvme", found without'),
    (f'{DRIVES}, block_size = "4 B"', {}, 'offload.block_size: expected "512 B" to "1 TiB", found'),
    (f"{DRIVES}, block_size = 4096", {}, "offload.block_size: expected text, found 4096"),
    (DRIVES, {"optimizer": "clip_norm = 1.0"}, "optimizer.clip_norm: expected 0 with"),
    (DRIVES, {"cluster": 'preset = "pcie-box"'},
     "offload.optimizer: expected a cluster whose file has [drives], found pcie-box without; "),
    (DRIVES, {"model": 'preset = "gpt-3-175b"', "cluster": 'preset = "cpu-gloo", ranks = 4'},
     "offload.optimizer: expected at most 93.13 GiB, the drives of a node of cpu-gloo, found 2.54 "
     "TiB of 4 ranks; shard over more ranks"),
])
def test_drives_that_are_not_there_or_too_small_are_refused_with_what_is_needed(
    offload: str, more: dict[str, str], complaint: str
) -> None:
    with pytest.raises(ScenarioError) as refused:
        scenario(offload=offload, **more)
    assert f"offload.toml: {complaint}" in str(refused.value)


def test_parameters_that_stay_whole_stay_off_the_drives() -> None:
    drives = f'{DRIVES}, parameters = "nvme"'
    with pytest.raises(ScenarioError, match="with parameters that stay whole"):
        scenario(offload=drives).with_(strategy={"persistence_threshold": 300})


def test_a_step_of_70b_over_drives_is_simulated_in_little_work() -> None:
    """The number of ops decides the time, which tests/benchmarks measures on 64 ranks."""
    case = scenario(
        offload=f'{BOTH_WAYS}, parameters = "nvme"', model='preset = "llama-2-70b"',
        more='activation_checkpointing = { mode = "full" }',
    )
    assert step_ns(case) > 10**9
    assert len(plan(case, device="cuda").of_rank(0).steady) < 2_000
