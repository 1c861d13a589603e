"""DeepSpeed's stages with states in host memory: what crosses the link, what lives where."""

from typing import Any

import pytest

from zsim.errors import ScenarioError
from zsim.ir.host_ledger import replay_host
from zsim.ir.laws import program_laws
from zsim.ir.ops import PAGEABLE
from zsim.ir.program import Program
from zsim.ir.program import parse as parse_program
from zsim.memory.fits import assess
from zsim.runs.backend import RunOptions
from zsim.runs.simulator import SimBackend
from zsim.scenario.plan import plan, planned, training
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES
from zsim.strategies.deepspeed_engine.partition import FlatPartition

CPU: dict[str, Any] = {"optimizer": "cpu"}
SHARDS: dict[str, Any] = {"parameters": "cpu"}
BOTH = CPU | SHARDS
FORMS = [("deepspeed1", CPU), ("deepspeed2", CPU), ("deepspeed3", CPU), ("deepspeed3", BOTH)]
RANKS = 8
COUNTER, FLAG, NORM = 4, 1, 4


def scenario(
    strategy: str = "deepspeed3", offload: dict[str, Any] = CPU, *, accumulation: int = 1,
    dtype: str = "bf16", **options: Any,
) -> Scenario:
    return Scenario(
        model={"preset": "gpt-tiny"}, cluster={"preset": "dgx-a100"}, offload=offload,
        batch={"micro_batch": 1, "sequence_length": 16, "accumulation": accumulation},
        strategy={"name": strategy, "reduce_bucket_size": 5000} | options,
        precision={"parameters": dtype, "reduce": "fp32"},
        optimizer={"implementation": "fused"},
    )


def shard_numel(case: Scenario) -> int:
    """Elements of a rank's shards, each padded."""
    return sum(-(-parameter.numel // RANKS) for parameter in case.model.parameters)


def crossed(program: Program, direction: str, rank: int = 0) -> int:
    """Bytes over a rank's link in a steady step."""
    return sum(
        kernel.nbytes for op in program.of_rank(rank).steady for kernel in op.kernels
        if kernel.operator.removesuffix(PAGEABLE) == direction
    )


@pytest.mark.parametrize(("strategy", "offload"), [*FORMS, ("deepspeed3", SHARDS)])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_programs_are_lawful_and_read_back(
    strategy: str, offload: dict[str, Any], accumulation: int
) -> None:
    program = plan(scenario(strategy, offload, accumulation=accumulation), device="cuda")
    program_laws.require_lawful(program, where="offload")
    assert parse_program(str(program)) == program


@pytest.mark.parametrize("stage", [1, 2])
def test_each_gradient_is_cast_on_the_device_and_goes_to_its_owner_once(stage: int) -> None:
    case = scenario(f"deepspeed{stage}")
    program = plan(case, device="cuda")
    sent = [crossed(program, "to_host", rank) for rank in range(RANKS)]
    assert sum(sent) == 4 * case.model.num_parameters
    flat = FlatPartition.of(training(case, device="cuda"), mesh=case.mesh, options=case.options)
    assert crossed(program, "to_device") == 2 * flat.part_numel


def test_whole_gradients_of_stage_2_go_and_come_back_with_each_micro_batch() -> None:
    """2 bytes there after each of three, 2 bytes back before the later two, 4 bytes of the part."""
    case = scenario("deepspeed2", accumulation=3)
    flat = FlatPartition.of(training(case, device="cuda"), mesh=case.mesh, options=case.options)
    program = plan(case, device="cuda")
    for rank, share in enumerate(flat.shares):
        whole, own = 2 * share.touched_numel, sum(share.pieces)
        assert crossed(program, "to_host", rank) == 3 * whole + 4 * own
        assert crossed(program, "to_device", rank) == 2 * whole + 2 * flat.part_numel


def test_stage_3_sends_six_bytes_of_each_gradient_and_fetches_two_again() -> None:
    """Not two there and none back: the norm is taken on the device, of what the host has got."""
    case = scenario()
    program, own = plan(case, device="cuda"), shard_numel(case)
    assert crossed(program, "to_host") == 6 * own
    assert crossed(program, "to_device") == 2 * own + 2 * own  # and what was stepped


@pytest.mark.parametrize(("offload", "others"), [(BOTH, 2), (SHARDS, 0)])
def test_offloaded_parameters_come_in_front_of_each_gather_of_a_pass(
    offload: dict[str, Any], others: int
) -> None:
    """Besides, 2 bytes of each gradient come back where the host steps; no stepped shard does."""
    case = scenario("deepspeed3", offload, stage3_param_persistence_threshold=0)
    steady = plan(case, device="cuda").of_rank(0).steady
    fetched = 0
    for before, op in zip(steady, steady[2:], strict=False):
        if op.kind == "all_gather":
            assert (before.unit, before.kind) == (op.unit, "copy")
            brought = sum(kernel.nbytes for kernel in before.kernels)
            assert brought * RANKS == op.nbytes
            fetched += brought
    assert fetched > 0
    back = crossed(plan(case, device="cuda"), "to_device") - fetched
    assert back == others * shard_numel(case)


@pytest.mark.parametrize(("dtype", "element"), [("bf16", 2), ("fp32", 4)])
def test_shards_alone_are_page_locked_and_come_back_in_float32_for_the_host_to_cast(
    dtype: str, element: int
) -> None:
    """DeepSpeed copies from float32 into shards: torch casts in pageable memory, if at all."""
    case = scenario(
        "deepspeed3", SHARDS, dtype=dtype, sub_group_size=20_000,
        stage3_param_persistence_threshold=0,
    )
    own, rank = shard_numel(case), plan(case, device="cuda").of_rank(0)
    sent = [op for op in rank.steady if any(each.location == "link" for each in op.kernels)
            and op.stream == "host"]
    assert len(sent) == 2
    assert sum(op.kernels[0].nbytes for op in sent) == 4 * own == crossed(
        plan(case, device="cuda"), "to_host"
    )
    assert {op.kernels[0].operator for op in sent} == {
        "to_host" if dtype == "fp32" else f"to_host{PAGEABLE}"
    }
    steady = replay_host(rank)["steady"]
    assert steady.end_bytes == steady.pinned_bytes == element * own
    casts = max(op.host[0].nbytes for op in sent) if dtype == "bf16" else 0
    assert steady.peak_bytes == element * own + casts
    held = SimBackend().run(case, options=RunOptions()).ranks[0].phases["steady"].memory.held
    assert held["optimizer_states"] == (4 + 8) * own + 2 * COUNTER
    assert held["parameters"] == 0


@pytest.mark.parametrize("offload", [SHARDS, BOTH])
def test_shards_are_page_locked_whatever_the_scenario_says_and_frozen_ones_as_it_says(
    offload: dict[str, Any]
) -> None:
    """DeepSpeed makes one buffer, which frozen parameters are not in."""
    unpinned = offload | {"pin_memory": False}
    case = scenario("deepspeed3", unpinned, stage3_param_persistence_threshold=0)
    frozen = Scenario(**case.tables | {"frozen": ["*.bias"]})
    for each in (case, frozen):
        rank = plan(each, device="cuda").of_rank(0)
        own = sum(-(-p.numel // RANKS) for p in each.model.parameters if p.requires_grad)
        assert replay_host(rank)["steady"].pinned_bytes == 2 * own
        assert STRATEGIES["deepspeed3"].pinned(
            each.offload, each.options, each.model, each.mesh, each.precision
        ) == 2 * own
        pageable = {
            op.unit for op in rank.steady if op.stream == "all_gather" and op.kind == "copy"
            and any(kernel.operator.endswith(PAGEABLE) for kernel in op.kernels)
        }
        assert bool(pageable) is (each is frozen)


@pytest.mark.parametrize(("offload", "each"), [(CPU, 18), (BOTH, 20)])
def test_the_host_has_eighteen_bytes_of_each_element_at_stage_3_or_twenty(
    offload: dict[str, Any], each: int
) -> None:
    """Copy, gradient, two states, and gradients of shards; and the shards themselves."""
    case = scenario("deepspeed3", offload)
    own = shard_numel(case)
    records = replay_host(plan(case, device="cuda").of_rank(0))
    assert records["steady"].end_bytes == each * own + COUNTER + FLAG + NORM
    assert records["steady"].pinned_bytes == (each - 12) * own
    answer = assess(planned(case)).host
    assert answer is not None
    assert answer.pinned_bytes == RANKS * (each - 12) * own


@pytest.mark.parametrize("stage", [1, 2])
def test_the_host_has_eighteen_bytes_of_each_element_of_a_part(stage: int) -> None:
    """Copy, gradient, two states, what goes back; and a buffer of the largest gradient."""
    case = scenario(f"deepspeed{stage}")
    flat = FlatPartition.of(training(case, device="cuda"), mesh=case.mesh, options=case.options)
    largest = 2 * max(parameter.numel for parameter in case.model.parameters)
    for rank in range(RANKS):
        records = replay_host(plan(case, device="cuda").of_rank(rank))
        assert records["steady"].end_bytes == 18 * flat.part_numel + largest + COUNTER + NORM


@pytest.mark.parametrize(("strategy", "offload"), FORMS)
def test_a_step_takes_longer_than_its_bytes_over_the_link(
    strategy: str, offload: dict[str, Any]
) -> None:
    case = scenario(strategy, offload)
    program = plan(case, device="cuda")
    run = SimBackend().run(case, options=RunOptions())
    nbytes = crossed(program, "to_host") + crossed(program, "to_device")
    assert run.step_time_ns * case.cluster.links.host.bandwidth >= nbytes * 10**9
    assert run.ranks[0].phases["steady"].memory.held["optimizer_states"] == 0


def test_deepspeed_cpu_adam_counts_steps_without_a_tensor() -> None:
    own = scenario("deepspeed3", CPU | {"adam": "deepspeed"})
    torchs = scenario("deepspeed3", CPU)
    ends = [replay_host(plan(case, device="cuda").of_rank(0))["steady"].end_bytes
            for case in (own, torchs)]
    assert ends[1] - ends[0] == COUNTER


@pytest.mark.parametrize(
    ("strategy", "offload", "told"),
    [
        ("deepspeed2", BOTH, "offload.parameters: expected strategy zero3"),
        ("deepspeed3", CPU | {"parameters": "nvme"},
         'offload.parameters: expected with offload.optimizer = "nvme", found without, '
         'which is not modelled'),
        ("deepspeed3", SHARDS | {"adam": "deepspeed"},
         'offload.adam: expected with offload.optimizer = "cpu", found without'),
        ("deepspeed3", {"parameters": "nvme"},
         'offload.parameters: expected with offload.optimizer = "nvme", found without, '
         'which is not modelled'),
        ("deepspeed2", SHARDS, "offload.parameters: expected strategy zero3"),
    ],
)
def test_what_deepspeed_does_not_offload_here_is_refused_by_name(
    strategy: str, offload: dict[str, Any], told: str
) -> None:
    with pytest.raises(ScenarioError) as error:
        scenario(strategy, offload)
    assert told in str(error.value)
