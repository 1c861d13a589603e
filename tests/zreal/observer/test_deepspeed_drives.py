"""DeepSpeed's states on NVMe against the engine itself. tests/measured/deepspeed_drives.json has
recorded it with its own op async_io; it runs for real where that can be compiled."""

import json
import subprocess
from collections import namedtuple
from ctypes.util import find_library
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import zsim
from tests.measured import deepspeed_drives as measured
from tests.support.folders import ROOT
from zreal.observer.subjects import deepspeed_engine
from zreal.observer.subjects.deepspeed_ops import command
from zreal.processes import launch, rank_folder
from zsim.analysis.checkpoints.checkpoint import checkpoint
from zsim.analysis.scenario_warnings import caveats
from zsim.errors import BackendUnavailableError, ScenarioError
from zsim.ir.program import Program
from zsim.runs.backend import RunOptions
from zsim.runs.simulator import SimBackend
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse

WHOLE = {"hidden": 2560, "sub_group_size": 1_400_000, "offload": measured.WHOLE}
CHECKPOINTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"hidden": 1280}, ["read 2624512", "write 2624512", "read 2625536", "write 2625536"]),
    ({"hidden": 1280, "offload": measured.BOTH}, ["read 5250048", "write 5250048"]),
    (WHOLE, [
        "read 7870464", f"write {3 * 2621440 + 7870464}", "read 2633728",
        f"write {2621440 + 2633728}",
    ]),
    (WHOLE | {"dtype": "bf16"}, [
        "read 7870464", f"write {3 * 1310720 + 7870464}", "read 2633728",
        f"write {1310720 + 2633728}",
    ]),
]
"""Scenarios that save, with the requests of a load as DeepSpeed 0.19.8 made them; those of one kind
that nothing lies between are one."""
RECORD = json.loads((ROOT / "tests/measured/deepspeed_drives.json").read_text())
needs_async_io = pytest.mark.skipif(
    find_spec("deepspeed") is None or find_library("aio") is None,
    reason="no DeepSpeed, or no libaio: zsim[real,deepspeed], libaio-dev",
)
Usage = namedtuple("Usage", "total used free")


def wrong(row: dict[str, Any]) -> list[str]:
    """The figures of a row that are not predicted: collectives, bytes and memory of each phase. So
    is the order of requests, waits and steps among collectives."""
    scenario = parse(row["text"].encode(), where="row.toml")
    ranks = SimBackend().run(scenario, options=RunOptions(all_ranks=True)).ranks
    program, differ = plan(scenario, device="cpu"), []
    for which, rank in (("first_rank", 0), ("last_rank", scenario.world_size - 1)):
        for phase, seen in row[which].items():
            told = measured.figures(ranks[rank].phases[phase])
            if phase != "construction":
                told["order"] = measured.planned(program.of_rank(rank).phase(phase))
            differ += [f"{which}, {phase}, {key}: {row['text']}" for key in seen
                       if told[key] != seen[key]]
    return differ


@pytest.mark.parametrize("number", range(len(RECORD["rows"])))
def test_recorded_requests_waits_steps_and_memory_are_predicted(number: int) -> None:
    assert wrong(RECORD["rows"][number]) == []


def test_the_record_is_of_the_scenarios_and_of_deepspeeds_own_op() -> None:
    assert RECORD["deepspeed"] == "0.19.8"
    assert "libaio" in RECORD["async_io"]
    texts = {row["text"] for row in RECORD["rows"]}
    assert texts == {each.to_toml() for each in measured.scenarios()}


def test_the_record_has_reads_ahead_writes_behind_and_waits_within_backward() -> None:
    orders = [row["first_rank"]["steady"]["order"] for row in RECORD["rows"]]
    pairs = {
        (before.partition(" ")[0], after) for order in orders for before, after in pairwise(order)
    }
    assert ("read", "step") in pairs  # not awaited, as the next sub-group's is
    assert ("write", "await read") in pairs
    backwards = [order[: order.index("all_reduce")] for order in orders]
    assert any("await write" in order for order in backwards)
    assert any("await write" not in order for order in backwards)


def test_a_folder_without_room_for_the_files_of_all_ranks_is_refused_and_left_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    case = measured.scenario(1280)
    nbytes = 2 * 4 * 4 * sum(-(-p.numel // 2) for p in case.model.parameters)
    monkeypatch.setattr(rank_folder, "disk_usage", lambda _: Usage(1, 1, nbytes // 2))
    with pytest.raises(BackendUnavailableError, match="let TMPDIR name a folder with room"):
        deepspeed_engine.config(case)
    assert list(tmp_path.iterdir()) == []


def test_the_engine_is_told_of_buffers_pipelines_and_requests_in_a_folder_that_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    offload = measured.BOTH | {"block_size": "2 MiB", "queue_depth": 4}
    with deepspeed_engine.files_removed():
        made = deepspeed_engine.config(measured.scenario(1280, offload=offload))
        folder = Path(made["zero_optimization"]["offload_optimizer"].pop("nvme_path"))
        assert folder.parent == tmp_path
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []
    assert made["aio"] == {"block_size": 2**21, "queue_depth": 4}
    assert made["zero_optimization"]["offload_optimizer"] == {
        "device": "nvme", "pin_memory": True, "buffer_count": 12, "pipeline_read": True,
        "pipeline_write": True,
    }


def test_parameters_on_drives_have_their_buffers_and_the_same_folder() -> None:
    with deepspeed_engine.files_removed():
        zero = deepspeed_engine.config(
            measured.scenario(2560, offload=measured.WHOLE | {"parameter_buffer_count": 7})
        )["zero_optimization"]
    path = zero["offload_optimizer"]["nvme_path"]
    assert zero["offload_param"] == {
        "device": "nvme", "pin_memory": True, "nvme_path": path, "max_in_cpu": 0,
        "buffer_count": 7, "buffer_size": 1_400_000,
    }


def test_a_shard_that_would_be_read_twice_at_once_is_refused_as_deepspeed_fails() -> None:
    """DeepSpeed 0.19.8 ends there: "param 14 already assigned swap buffer id 8"."""
    case = measured.scenario(
        2560, dims=(512,) * 5, offload=measured.WHOLE | {"parameter_buffer_count": 9},
        stage3_max_reuse_distance=3_000_000, stage3_prefetch_bucket_size=2_000_000,
    )
    with pytest.raises(ScenarioError, match="found none for blocks.3.fc2.weight, where DeepSpeed"):
        plan(case, device="cpu")


@pytest.fixture(scope="module")
def async_io() -> None:
    """The op, compiled by the line that refusals tell."""
    subprocess.run(command("AsyncIOBuilder", "cpu"), shell=True, check=True)


@needs_async_io
@pytest.mark.usefixtures("async_io")
@pytest.mark.slow  # the op takes ten minutes to compile, once
@pytest.mark.gloo
@pytest.mark.parametrize("offload", [measured.PLAIN, measured.BOTH, measured.WHOLE])
def test_a_scenario_with_drives_agrees_with_the_engine_and_trains(offload) -> None:
    case = measured.scenario(2560, accumulation=2, offload=offload, num_classes=8)
    comparison = zsim.validate(case, against="gloo", timeout_s=300)
    details = {check.name: check.detail for check in comparison.checks if check.status != "ok"}
    assert {name: text for name, text in details.items() if "unsupported" not in text} == {}
    exact = {check.name for check in comparison.checks if check.detail.startswith("exact")}
    assert {"collective order", "bytes", "memory at rest", "memory of parts"} <= exact
    assert any(check.name == "numerics" and check.status == "ok" for check in comparison.checks)


def checkpointed(number: int) -> Scenario:
    """A scenario of CHECKPOINTS that saves."""
    return measured.scenario(**CHECKPOINTS[number][0]).with_(checkpoint={"format": "deepspeed"})


def requests(program: Program) -> list[str]:
    """Requests of a load to drives, once files are there."""
    ops = program.of_rank(0).steady
    copied = max(op.index for op in ops if op.stream == "files")
    return measured.planned(ops[copied + 2 : -1])


@pytest.mark.parametrize("number", range(len(CHECKPOINTS)))
def test_a_load_reads_float32_weights_alone_and_writes_them_and_parameters(number: int) -> None:
    """Requests are those that the engine has made."""
    made = checkpoint(checkpointed(number))
    assert requests(made.load.program) == CHECKPOINTS[number][1]
    used = {read.used / read.nbytes for read in made.reads[0]}
    assert used == {0, 1}
    whole = sum(p.numel for p in made.scenario.model.parameters) * 12
    assert whole < made.nbytes < 1.01 * whole  # files are of whole KiB


def test_a_checkpoint_on_drives_says_what_a_load_loses() -> None:
    (caveat,) = caveats(checkpointed(0))
    assert "moments begin anew" in caveat.text
    assert caveats(measured.scenario(1280)) == ()


@needs_async_io
@pytest.mark.usefixtures("async_io")
@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("number", range(len(CHECKPOINTS)))
def test_deepspeed_saves_all_and_loads_no_moments_and_nothing_in_memory(
    number: int, tmp_path: Path
) -> None:
    case = checkpointed(number)
    saved, loaded = (
        launch.launch(
            f"tests.zreal.checkpoints.drive_ranks:{which}_rank",
            {"text": case.to_toml(), "folder": str(tmp_path)}, world_size=2, timeout_s=300,
        )
        for which in ("saved", "loaded")
    )
    told = checkpoint(case)
    assert {file.name: sorted(file.tensors) for file in told.files} == saved[0]["files"]
    assert measured.joined(loaded[0]["requests"]) == requests(told.load.program)
    assert "exceeds dimension size (0)" in saved[0]["converted"]
    for before, after in zip(saved, loaded, strict=True):
        for had, made, has in zip(before["groups"], after["made"], after["loaded"], strict=True):
            assert had["moments"].keys() == {"exp_avg", "exp_avg_sq"}
            assert has["moments"] == {}
            assert has["master"] == (had if had["is_on_drive"] else made)["master"]
            assert had["master"] != made["master"]
