"""Universal checkpoints in closed form, at the size of 7B; refusals by name.

That they are what DeepSpeed does, tests/zreal/checkpoints tells."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zsim.analysis.checkpoints.checkpoint import CheckpointReport, checkpoint
from zsim.analysis.checkpoints.reshard import CheckpointError, CheckpointMemoryError
from zsim.errors import ScenarioError
from zsim.scenario.derived import derived
from zsim.scenario.scenario import Scenario

NUMEL = 6_738_415_616
LARGEST = 32_000 * 4096
STEP = 4
GB = 10**9


def scenario(stage: int, *, ranks: int = 8, **tables: Any) -> Scenario:
    strategy = {"name": f"deepspeed{stage}"} | tables.pop("strategy", {})
    table = {"format": "universal"} | tables.pop("checkpoint", {})
    return Scenario(
        model=tables.pop("model", {"preset": "llama-2-7b"}),
        batch={"micro_batch": 1, "sequence_length": 4096},
        cluster={"preset": "dgx-h100", "ranks": ranks}, strategy=strategy,
        precision={"parameters": "bf16"}, checkpoint=table, **tables,
    )


def files_ns(nbytes: float) -> float:
    """Nanoseconds of one process that moves bytes from or to the preset's file system."""
    return nbytes / 2


@pytest.mark.parametrize(("stage", "common", "for_each"), [
    (2, 2 * NUMEL, 4), (3, 12 * NUMEL // 8 + STEP, 3),
])
def test_files_are_12_bytes_a_parameter_and_one_of_all(
    stage: int, common: int, for_each: int
) -> None:
    """The model's weights, or at stage 3 the whole file of rank 0."""
    own = checkpoint(scenario(stage))
    parameters = len(own.scenario.model.parameters)
    assert own.files[0].nbytes == common
    assert len(own.files) == 1 + for_each * parameters
    steps = STEP * (for_each - 3) * parameters
    assert own.nbytes == common + 12 * NUMEL + steps


def test_each_rank_of_stage_3_reads_everything_and_holds_all_weights() -> None:
    """All have 12Ψ to read, and the file of rank 0. That file and 4Ψ are in the host memory of
    each rank."""
    for ranks in (8, 16):
        own = checkpoint(scenario(3), to_ranks=ranks)
        read = 12 * NUMEL + own.files[0].nbytes
        assert {sum(each.nbytes for each in reads) for reads in own.reads} == {read}
        used = sum(each.used for reads in own.reads for each in reads)
        assert used == 12 * NUMEL
        assert own.load.memory.host_bytes == 4 * NUMEL + own.files[0].nbytes
        assert own.load.memory.node_host_bytes == 8 * own.load.memory.host_bytes
        assert own.load.time.ns >= files_ns(read)


def test_ranks_of_stage_2_read_the_parameters_in_their_part_and_the_model_twice() -> None:
    own = checkpoint(scenario(2), to_ranks=4)
    for reads in own.reads:
        used = sum(each.used for each in reads if each.nbytes > STEP)
        nbytes = sum(each.nbytes for each in reads)
        assert used == 12 * NUMEL // 4
        assert 2 * own.files[0].nbytes + used <= nbytes <= (
            2 * own.files[0].nbytes + used + 2 * 12 * LARGEST
        )
    assert own.load.memory.host_bytes >= 8 * NUMEL // 4


def converted(own: CheckpointReport) -> list[int]:
    assert own.conversion is not None
    return [phase.memory.node_host_bytes for phase in own.conversion.phases]


@pytest.mark.parametrize(("extract", "merge"), [(1, 1), (4, 2), (8, 3)])
def test_processes_of_a_conversion_hold_a_ranks_file_or_four_times_a_parameter(
    extract: int, merge: int
) -> None:
    """A fragment is there besides a file; then fragments and a tensor of two kinds of states."""
    workers = {"extract_workers": extract, "merge_workers": merge}
    own = checkpoint(scenario(3, checkpoint=workers))
    file = own.files[0].nbytes
    extracting, merging, finishing = converted(own)
    assert extracting == extract * (file + 4 * LARGEST // 8)
    assert finishing == file
    large = 4 * 4 * LARGEST
    others = 4 * 4 * 11_008 * 4096  # of a layer's projections, the largest else
    assert merging == min(merge, 2) * large + max(0, merge - 2) * others


def test_a_conversion_reads_and_writes_everything_twice() -> None:
    """Ranks' files become fragments, and these become files of parameters. Rank 0's file is read
    thrice, and written once."""
    made = checkpoint(scenario(3)).conversion
    assert made is not None
    file = 12 * NUMEL // 8 + STEP
    assert made.moved_bytes("read") == 8 * file + 2 * file + 12 * NUMEL
    assert made.moved_bytes("write") == 2 * 12 * NUMEL + file
    assert made.files_bytes == 8 * file + 2 * 12 * NUMEL + file


def test_more_processes_convert_faster() -> None:
    times = []
    for workers in (1, 2, 8):
        table = {"extract_workers": workers, "merge_workers": workers}
        made = checkpoint(scenario(3, checkpoint=table)).conversion
        assert made is not None
        times.append(sum(phase.time.ns for phase in made.phases[:2]))
    assert 1.9 * times[1] < times[0] < 2 * times[1]
    assert 3 * times[2] < times[1] < 4 * times[2]


def test_a_host_that_is_too_small_is_refused_with_what_would_help() -> None:
    own = scenario(3)

    def on(gigabytes: int) -> Scenario:
        host = replace(own.cluster.host, memory=gigabytes * GB)
        return derived(own, cluster=replace(own.cluster, host=host))

    with pytest.raises(CheckpointMemoryError, match=r"load: OOM.*stage 3 holds"):
        checkpoint(on(200))
    with pytest.raises(
        CheckpointMemoryError, match=r"convert: OOM.*found 40,000,000,000 B.*extract_workers"
    ):
        checkpoint(on(40))


@pytest.mark.parametrize(("stage", "tables", "problem"), [
    (2, {"optimizer": {"name": "sgd"}},
     "checkpoint.format: expected adamw with universal, found sgd; ds_to_universal needs the "
     "moments exp_avg and exp_avg_sq"),
    (3, {"frozen": ["wte.*"]},
     "checkpoint.format: expected no frozen parameters with universal, found 1, which DeepSpeed "
     "does not load from it"),
    (1, {"strategy": {"round_robin_gradients": True}},
     "checkpoint.format: expected round_robin_gradients = false with universal, found true: "
     "DeepSpeed writes parameters to files of others then"),
    (3, {"checkpoint": {"extract_workers": 0}},
     "checkpoint.extract_workers: expected at least 1, found 0"),
])
def test_what_ds_to_universal_cannot_do_is_refused_by_name(
    stage: int, tables: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ScenarioError) as caught:
        scenario(stage, **tables)
    assert problem in caught.value.problems[0]


@pytest.mark.parametrize(("name", "form", "why"), [
    ("zero3", "universal", "ds_to_universal fails, as it looks for them in files that have none"),
    ("deepspeed3", "universal", "ds_to_universal fails, as it looks for them"),
    ("zero3", "deepspeed", "their files are those of deepspeed3"),
    ("zero3", "consolidated", "reads of drives before its writes are not modelled"),
])
def test_states_on_drives_are_refused_with_what_to_do_instead(
    name: str, form: str, why: str
) -> None:
    tables = {"strategy": {"name": name}, "checkpoint": {"format": form}}
    with pytest.raises(ScenarioError) as caught:
        scenario(3, offload={"optimizer": "nvme"}, **tables)
    (problem,) = caught.value.problems
    assert f"checkpoint.format: expected no states on drives with {form}, found some: {why}" in (
        problem
    )
    assert problem.endswith('take offload.optimizer = "cpu"')
    scenario(3, offload={"optimizer": "cpu"}, **tables)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_our_own_stages_have_the_same_files(stage: int) -> None:
    """Their flat buffers have other orders, and DeepSpeed's files one for each parameter."""
    own, engine = (
        checkpoint(scenario(stage, strategy={"name": f"{name}{stage}"}))
        for name in ("zero", "deepspeed")
    )
    assert {file.name for file in own.files} == {file.name for file in engine.files}
    assert sum(file.nbytes for file in own.files[1:]) == sum(f.nbytes for f in engine.files[1:])


def test_loads_of_very_many_ranks_are_refused_before_they_are_planned() -> None:
    with pytest.raises(CheckpointError, match="at most 1,000,000 tensors of all ranks"):
        checkpoint(scenario(3), to_ranks=10_000)
