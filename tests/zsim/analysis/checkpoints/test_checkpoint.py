"""Checkpoints as Programs: simulated times against closed forms, files and memory against formulas,
refusals by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zsim.analysis.checkpoints.checkpoint import CheckpointReport, checkpoint
from zsim.analysis.checkpoints.files.dcp_plan import written
from zsim.analysis.checkpoints.files.file_reads import file_reads
from zsim.analysis.checkpoints.reshard import CheckpointError, CheckpointMemoryError
from zsim.analysis.checkpoints.save import batches
from zsim.analysis.checkpoints.schedule import schedule_of
from zsim.analysis.checkpoints.state import state_of
from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.host import FileSystem
from zsim.engine.costs.host_work import PAGEABLE_SHARE
from zsim.engine.costs.op_costs import Costs
from zsim.errors import ScenarioError
from zsim.ir.host_ledger import replay_host
from zsim.ir.laws.validate import validate
from zsim.ir.program import parse
from zsim.models.saving import OF_DEEPSPEED
from zsim.runs.figures.step_time import step_time
from zsim.scenario.checks import refusals
from zsim.scenario.derived import derived
from zsim.scenario.plan import planned
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES

GB = 10**9
FORMATS: list[dict[str, Any]] = [
    {}, {"asynchronous": True}, {"format": "consolidated"},
    {"format": "consolidated", "cpu_offload": False}, {"format": "deepspeed"},
    {"format": "universal"},
]


def scenario(
    *, strategy: str = "fsdp2", model: str = "llama-2-7b", cluster: str = "dgx-h100",
    ranks: int = 8, parameters: str = "bf16", offload: Any = None, **table: Any,
) -> Scenario:
    is_mlp = model.startswith("mlp")
    return Scenario(
        model={"preset": model},
        batch={"micro_batch": 1, "sequence_length": 1 if is_mlp else 4096},
        cluster={"preset": cluster, "ranks": ranks}, strategy={"name": strategy},
        precision={"parameters": parameters}, checkpoint=table, offload=offload,
    )


def small(**table: Any) -> Scenario:
    strategy = "zero3" if table.get("format") in OF_DEEPSPEED else "fsdp2"
    return scenario(strategy=strategy, model="mlp-uneven", ranks=4, **table)


def with_files(own: Scenario, rank: int, total: int) -> Scenario:
    """The scenario on a file system of such bandwidths."""
    files = FileSystem(rank_bandwidth=rank, bandwidth=total)
    return derived(own, cluster=replace(own.cluster, file_system=files))


def copies_per_s(cluster: ClusterSpec) -> int:
    """Bytes/s of one device's copies into pageable memory."""
    return int(cluster.links.host.bandwidth * PAGEABLE_SHARE)


def constant_ns(own: CheckpointReport) -> int:
    """Nanoseconds of the collectives of a save, of what rank 0 writes of metadata, and of issue."""
    scenario, program = own.scenario, own.save.program
    costs, ops = Costs(scenario.cluster, scenario.executed), program.of_rank(0).steady
    world = tuple(range(scenario.world_size))
    collectives = sum(
        costs.collective_ns(op.kind, op.nbytes, world) for op in ops if op.group == "world"
    )
    metadata = sum(costs.compute_ns(op.kernels) for op in ops if op.unit == "metadata")
    return collectives + metadata + sum(map(costs.issue_ns, ops))


@pytest.mark.parametrize(("rank", "total"), [
    (2 * GB, 40 * GB),  # as the preset has it: one rank's stream decides
    (4 * GB, 10 * GB),  # the file system is shared by eight
    (50 * GB, 1000 * GB),  # copies to the host decide
])
def test_a_7b_state_of_8_ranks_is_saved_in_the_time_of_the_formula(rank: int, total: int) -> None:
    """t = c0 + max over ranks of 12S / min(D2H, files of a rank, files of all / N), and the first
    batch, which nothing is written beside."""
    own = checkpoint(with_files(scenario(), rank, total))
    copied, nbytes = copies_per_s(own.scenario.cluster), max(file.nbytes for file in own.files)
    rate = min(copied, rank, total / 8)
    formula = nbytes / rate * 1e9
    state = state_of(own.scenario)
    fill = next(batches(written([state.tensors(each) for each in range(8)])[0])) / copied * 1e9
    assert own.nbytes == 12 * state_sum(own) + 4 * len(state.entries)
    assert formula <= own.save.time.ns <= formula + 2 * fill + constant_ns(own)
    assert own.save.time.ns == pytest.approx(formula, rel=0.005)
    assert own.save.time.blocking_ns == own.save.time.ns


def state_sum(own: CheckpointReport) -> int:
    """Ψ: the elements of all parameters."""
    return own.scenario.model.num_parameters


def test_an_asynchronous_save_blocks_for_the_copies_alone() -> None:
    own = checkpoint(scenario(asynchronous=True))
    nbytes = max(file.nbytes for file in own.files)
    copies = nbytes / copies_per_s(own.scenario.cluster) * 1e9
    assert own.save.time.blocking_ns == pytest.approx(copies, rel=0.02)
    assert own.save.time.ns == pytest.approx(copies + nbytes / 2, rel=0.005)
    assert own.save.memory.host_bytes == nbytes


def test_a_consolidated_save_is_gathers_copies_and_one_file_in_turn() -> None:
    own = checkpoint(scenario(format="consolidated"))
    costs = Costs(own.scenario.cluster, own.scenario.executed)
    ops, world = own.save.program.of_rank(0).steady, tuple(range(8))
    gathers = [op for op in ops if op.kind == "all_gather"]
    parts = 3 * len(own.scenario.model.parameters)
    assert len(gathers) == parts
    assert sum(op.nbytes for op in gathers) == 12 * state_sum(own)
    expected = (
        sum(costs.collective_ns("all_gather", op.nbytes, world) for op in gathers)
        + own.nbytes / copies_per_s(own.scenario.cluster) * 1e9 + own.nbytes / 2
    )
    assert own.save.time.ns == pytest.approx(expected, rel=0.005)


def test_a_consolidated_state_is_whole_on_rank_0s_host_or_on_every_device() -> None:
    """Ψ in float32 with both moments: 12Ψ, and 4 B for each step counter on the host."""
    offloaded, kept = (
        checkpoint(scenario(cluster="dgx-h200", format="consolidated", cpu_offload=offload))
        for offload in (True, False)
    )
    state, largest = 12 * state_sum(kept), 4 * 32_000 * 4096
    counters = 4 * len(kept.scenario.model.parameters)
    assert offloaded.save.memory.host_bytes == state + counters
    assert kept.save.memory.device_bytes - offloaded.save.memory.device_bytes == state - largest
    assert kept.save.memory.host_bytes == largest


@pytest.mark.parametrize("table", [
    {"strategy": {"name": "fsdp2", "offload": True}},
    {"strategy": {"name": "zero3"}, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
])
def test_a_consolidated_save_of_states_in_host_memory_leaves_no_gathered_state_on_a_gpu(
    table: dict[str, Any],
) -> None:
    """torch moves each shard to the GPU, gathers there, and moves the whole tensor to the host."""
    own = checkpoint(Scenario(
        model={"preset": "llama-2-13b"}, batch={"micro_batch": 1, "sequence_length": 2048},
        cluster={"preset": "dgx-a100"}, precision={"parameters": "bf16"},
        checkpoint={"format": "consolidated"}, **table,
    ))
    state, largest = 12 * state_sum(own), 4 * 32_000 * 5120
    assert largest < own.save.memory.device_bytes < 3 * largest
    assert own.save.memory.host_bytes > state
    assert own.save.memory.on_device == "FITS"


@pytest.mark.parametrize("offload", [
    None, {"parameters": "cpu"}, {"optimizer": "cpu", "parameters": "cpu"},
])
def test_weights_that_deepspeed_gathers_are_2_bytes_a_parameter_in_rank_0s_host_memory(
    offload: Any
) -> None:
    """A device has one parameter more, gathered, and its shard if that is in host memory. The copy
    of 2 bytes a parameter, and the write of one file, come before all that is saved without it."""
    gathers, without = (
        checkpoint(scenario(
            strategy="deepspeed3", cluster="dgx-a100", offload=offload, format="deepspeed",
            gather_16bit_weights=gathered,
        ))
        for gathered in (True, False)
    )
    numel, largest = gathers.scenario.model.num_parameters, 2 * 32_000 * 4096
    assert [file for file in gathers.files if file not in without.files] == [
        gathers.files[-1]
    ]
    assert gathers.files[-1].nbytes == 2 * numel
    host = replay_host(gathers.save.program.ranks[0])
    assert host["steady"].peak_bytes - host["construction"].end_bytes == 2 * numel
    device = gathers.save.memory.device_bytes - without.save.memory.device_bytes
    assert device == largest + (largest // 8 if offload else 0)
    cluster = gathers.scenario.cluster
    assert cluster.file_system is not None
    least = 2 * numel / cluster.file_system.alone + 2 * numel / (
        cluster.links.host.bandwidth * PAGEABLE_SHARE
    )
    assert 1 < (gathers.save.time.ns - without.save.time.ns) / (least * GB) < 1.3


@pytest.mark.parametrize(("strategy", "weights"), [
    ("zero1", 2), ("zero2", 2), ("deepspeed1", 2), ("deepspeed2", 2), ("zero3", 0),
    ("deepspeed3", 0),
])
def test_deepspeeds_files_are_12_bytes_a_parameter_and_the_models_of_stages_1_and_2(
    strategy: str, weights: int
) -> None:
    own = checkpoint(scenario(strategy=strategy, format="deepspeed"))
    partitions = [file for file in own.files if "optim_states" in file.name]
    models = [file for file in own.files if "model_states" in file.name]
    counters = 4 * (len(own.scenario.model.parameters) if strategy == "zero3" else 1)
    assert [file.rank for file in partitions] == list(range(8))
    assert {file.nbytes for file in partitions} == {12 * state_sum(own) // 8 + counters}
    assert [file.nbytes for file in models] == [weights * state_sum(own)] * bool(weights)
    assert own.files[-1].name == "bf16_zero_pp_rank_7_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize(("strategy", "nbytes"), [
    ({"name": "deepspeed3"}, 4 * 6_738_415_616 // 8 + 4),
    ({"name": "deepspeed3", "sub_group_size": 1}, 4 * 32_000 * 4096 // 8),
    ({"name": "deepspeed2"}, 2 * 6_738_415_616),
], ids=["one sub-group", "one for each parameter", "the model of stage 2"])
def test_deepspeeds_saves_hold_a_flat_buffer_at_a_time(
    strategy: dict[str, Any], nbytes: int
) -> None:
    """A storage is copied whole by torch.save: a sub-group's at stage 3, that of all weights by
    rank 0 at stages 1 and 2. A step counter is copied with the last one."""
    own = checkpoint(scenario(format="deepspeed", strategy="deepspeed3").with_(strategy=strategy))
    assert own.save.memory.host_bytes == nbytes


def test_deepspeeds_loads_hold_a_ranks_own_file_and_the_models() -> None:
    own = checkpoint(scenario(strategy="zero2", format="deepspeed"))
    nbytes = {file.name: file.nbytes for file in own.files if file.rank == 0}
    assert own.load.memory.host_bytes == sum(nbytes.values())


@pytest.mark.parametrize(("strategy", "times"), [("zero2", 2), ("zero3", 0)])
def test_deepspeeds_loads_read_the_models_file_twice(strategy: str, times: int) -> None:
    """So did DeepSpeed 0.19.8, whose first read looks whether it is whole."""
    own = checkpoint(scenario(strategy=strategy, format="deepspeed"))
    model, states = 0, 0
    for file in own.files:
        if file.name.endswith("model_states.pt"):
            model += file.nbytes
        elif file.rank == 1:
            states += file.nbytes
    read = sum(
        kernel.nbytes for op in own.load.program.of_rank(1).steady if op.stream == "files"
        for kernel in op.kernels
    )
    assert (read, bool(model)) == (times * model + states, bool(times))


@pytest.mark.parametrize("table", FORMATS, ids=str)
def test_programs_are_valid_and_read_back_from_their_text(table: dict[str, Any]) -> None:
    own = checkpoint(small(**table))
    for program in (own.save.program, own.load.program):
        assert parse(str(validate(program))) == program


@pytest.mark.parametrize("table", FORMATS, ids=str)
def test_a_faster_file_system_is_never_slower_and_bands_hold_the_times(
    table: dict[str, Any]
) -> None:
    own = small(**table)
    made = [checkpoint(with_files(own, rate * GB, 3 * rate * GB)) for rate in (1, 2, 4)]
    for phase in ("save", "load"):
        times = [getattr(each, phase).time for each in made]
        assert sorted((time.ns for time in times), reverse=True) == [time.ns for time in times]
        for time in times:
            assert time.band_ns[0] <= time.ns <= time.band_ns[1]
            assert time.blocking_ns <= time.ns


@pytest.mark.parametrize("strategy", ["fsdp2", "zero1", "zero3", "ddp"])
@pytest.mark.parametrize("new", [1, 3, 4, 7])
def test_ranks_read_what_they_hold_and_no_more_is_used(strategy: str, new: int) -> None:
    own = checkpoint(
        scenario(strategy=strategy, model="mlp-uneven", ranks=4, parameters="fp32"), to_ranks=new
    )
    used = sum(read.used for reads in own.reads for read in reads)
    numel = own.scenario.model.num_parameters
    counters = 4 * len(state_of(own.scenario).entries)
    sharded = {"ddp": 0, "zero1": 8, "zero3": 12, "fsdp2": 12}[strategy]
    assert used == numel * (sharded + new * (12 - sharded)) + new * counters
    assert all(read.nbytes >= read.used for reads in own.reads for read in reads)


def test_flat_buffers_of_zero_are_read_without_their_padding() -> None:
    own = checkpoint(scenario(strategy="zero3", model="mlp-uneven", ranks=4), to_ranks=3)
    assert all(read.nbytes == read.used for reads in own.reads for read in reads)


def test_offloaded_states_are_written_from_host_memory() -> None:
    own = scenario(strategy="zero1", model="gpt-small", ranks=4).with_(
        batch={"sequence_length": 128}, offload={"optimizer": "cpu"}
    )
    made = checkpoint(own)
    links = [
        kernel for op in made.save.program.of_rank(0).steady for kernel in op.kernels
        if kernel.location == "link"
    ]
    assert links == []
    assert made.save.memory.host_bytes > 12 * own.model.num_parameters // 4


def test_the_wait_for_copies_inside_host_memory_is_as_unsure_as_its_bandwidth() -> None:
    time = checkpoint(
        scenario(strategy="zero3", offload={"optimizer": "cpu"}, asynchronous=True)
    ).save.time
    fast, slow = time.blocking_band_ns
    assert fast == pytest.approx(0.5 * time.blocking_ns, rel=0.1)
    assert slow == pytest.approx(2 * time.blocking_ns, rel=0.1)


def test_the_schedule_tells_the_share_of_saving_and_the_best_interval() -> None:
    own = checkpoint(scenario(every=500, mean_time_between_failures="1 d"))
    told = schedule_of(own)
    step = step_time(planned(own.scenario)).ns
    waits = own.save.time.blocking_ns
    assert told.every_ns == 500 * step
    assert told.saving_share == pytest.approx(waits / (500 * step + waits))
    assert told.best is not None
    assert told.best.young_ns == pytest.approx((2 * waits * 86_400e9) ** 0.5, rel=1e-6)
    assert told.losses is not None
    assert told.losses.by_failure_ns == pytest.approx(250 * step + own.load.time.ns, rel=1e-6)


def test_a_save_that_outlasts_its_interval_is_told_and_counts_in_all_shares() -> None:
    """Training is as long as the interval in the time from one save to the next, the whole save.
    Failures that hardly come lose no more than that."""
    own = checkpoint(
        scenario(asynchronous=True, every="1 s", mean_time_between_failures="3650 d")
    )
    told, time = schedule_of(own), own.save.time
    assert told.waiting_ns == time.ns - time.blocking_ns - 10**9 > 0
    assert told.saving_share == pytest.approx(1 - 1e9 / time.ns)
    assert told.losses is not None
    assert told.losses.share == pytest.approx(1 - 1e9 / time.ns, rel=1e-6)
    assert told.warning == (
        "a save takes 5.551 s, longer than the 1.000 s to the next, which waits for it"
    )


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2", "deepspeed1", "deepspeed2", "deepspeed3"])
def test_a_checkpoint_without_a_format_has_the_strategys_own(strategy: str) -> None:
    """The strategy is the one of its tables, or the one that it is derived with."""
    form = "deepspeed" if strategy.startswith("deepspeed") else "sharded"
    plain = Scenario(
        model={"preset": "gpt-tiny"}, batch={"micro_batch": 1, "sequence_length": 16},
        cluster={"preset": "cpu-gloo", "ranks": 2}, strategy={"name": "ddp"},
    )
    own = plain.with_(strategy={"name": strategy})
    assert checkpoint(own).scenario.checkpoint.format == form
    assert own == own.with_(checkpoint={"format": form})
    options = STRATEGIES[strategy].options()
    other = derived(plain, strategy=strategy, options=options, mesh=own.mesh)
    assert (other.checkpoint.format, refusals.problems(other)) == (form, ())
    kept = derived(own.with_(checkpoint={"format": form}), strategy="ddp")
    assert kept.checkpoint.format == form


def test_a_save_that_ends_within_its_interval_makes_none_wait() -> None:
    told = schedule_of(checkpoint(scenario(asynchronous=True, every="10 s")))
    assert (told.waiting_ns, told.warning) == (0, "")


@pytest.mark.parametrize(("tables", "problem"), [
    ({"strategy": "fsdp1", "asynchronous": True},
     "found fsdp1, whose state dicts are not modelled"),
    ({"format": "deepspeed"},
     'checkpoint.format: expected sharded or consolidated with fsdp2, found deepspeed, which is '
     "of flat buffers of ZeRO"),
    ({"strategy": "deepspeed2", "format": "consolidated"},
     'checkpoint.format: expected deepspeed or universal with deepspeed2, found consolidated; '
     "save_16bit_model writes weights beside these, with deepspeed3: "
     "checkpoint.gather_16bit_weights = true"),
    ({"strategy": "zero3", "format": "deepspeed", "gather_16bit_weights": True},
     "checkpoint.gather_16bit_weights: expected only with deepspeed3, which gathers them, found "
     "with zero3"),
    ({"strategy": "deepspeed3", "format": "deepspeed", "gather_16bit_weights": True,
      "offload": {"optimizer": "nvme", "parameters": "nvme"}},
     "checkpoint.gather_16bit_weights: expected no parameters on drives, whose reads are not "
     "modelled, found some"),
    ({"format": "consolidated", "asynchronous": True},
     'checkpoint.asynchronous: expected only with format = "sharded", which torch DCP writes so, '
     'found with "consolidated"'),
    ({"extract_workers": 3},
     'checkpoint.extract_workers: expected only with format = "universal", whose conversion has '
     'such processes, found with "sharded"'),
    ({"strategy": "zero3", "offload": {"optimizer": "nvme"}, "asynchronous": True},
     "checkpoint.format: expected no states on drives with sharded, found some: reads of drives "
     'before its writes are not modelled; take offload.optimizer = "cpu"'),
    ({"strategy": "deepspeed2", "format": "deepspeed", "merge_workers": 3},
     'checkpoint.merge_workers: expected only with format = "universal", whose conversion has '
     'such processes, found with "deepspeed"'),
    ({"cluster": "pcie-box", "asynchronous": True},
     "cluster: expected a table file_system with bandwidth, of all ranks, and rank_bandwidth, "
     "found none in pcie-box; name a cluster.file that has it"),
])
def test_checkpoints_that_cannot_be_are_refused_by_key(
    tables: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ScenarioError) as caught:
        scenario(**tables)
    assert problem in caught.value.problems[0]


def test_a_scenario_that_asks_for_no_checkpoint_is_refused_none_until_one_is_made() -> None:
    own = scenario(cluster="pcie-box", model="mlp-uneven", parameters="fp32")
    with pytest.raises(ScenarioError, match="file_system"):
        checkpoint(own)


def test_deepspeeds_states_load_on_as_many_ranks_alone() -> None:
    with pytest.raises(CheckpointError) as caught:
        checkpoint(small(format="deepspeed"), to_ranks=3)
    assert str(caught.value) == (
        "--to-ranks: expected 4, the ranks that saved it, found 3; DeepSpeed loads optimizer "
        "states on as many data-parallel ranks only; any number loads checkpoint.format = "
        '"universal", which ds_to_universal makes'
    )


def test_a_host_that_is_too_small_for_rank_0s_gather_is_refused() -> None:
    own = scenario(format="consolidated")
    host = replace(own.cluster.host, memory=64 * GB)
    with pytest.raises(
        CheckpointMemoryError, match=r"OOM: expected host memory for 80,\d{3},\d{3},\d{3} B on one"
    ):
        checkpoint(derived(own, cluster=replace(own.cluster, host=host)))


@pytest.mark.parametrize(("tables", "remedy"), [
    ({"strategy": "ddp"}, r"the state of ddp alone is 107,8\d\d,\d{3},\d{3} B a rank"),
    ({"format": "consolidated", "cpu_offload": False}, r"checkpoint\.cpu_offload = true keeps"),
], ids=["ddp", "gathered"])
def test_a_device_that_is_too_small_for_a_save_is_oom_with_exit_code_1(
    tables: dict[str, Any], remedy: str
) -> None:
    """16Ψ of ddp with its buckets, or 12Ψ gathered beside 12Ψ/8: over 80 GB, and under 141 GB."""
    own = scenario(cluster="dgx-a100", **tables)
    with pytest.raises(
        CheckpointMemoryError, match=rf"checkpoint: save: OOM: .* device memory .*; {remedy}"
    ) as caught:
        checkpoint(own)
    assert caught.value.exit_code == 1
    assert checkpoint(scenario(cluster="dgx-h200", **tables)).save.memory.on_device == "FITS"


def test_a_missing_shard_and_other_shapes_are_named() -> None:
    saved, wanted = (
        state_of(scenario(model="mlp-uneven", ranks=ranks, parameters="fp32")) for ranks in (4, 3)
    )
    files = written([saved.tensors(rank) for rank in range(4)])
    with pytest.raises(CheckpointError) as caught:
        file_reads(saved, (*files[:2], (), files[3]), wanted)
    assert str(caught.value) == (
        "checkpoint: parameters of blocks.0.fc1.weight: expected the file with shard 2 of it, "
        "found no such file; every rank's file is needed to load"
    )
    other = state_of(scenario(model="mlp-small", ranks=3, parameters="fp32"))
    with pytest.raises(CheckpointError, match=r"expected a tensor of \d+ × \d+, found blocks"):
        file_reads(saved, files, other)
