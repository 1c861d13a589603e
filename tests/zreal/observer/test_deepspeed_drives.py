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
from zsim.errors import BackendUnavailableError, ScenarioError
from zsim.runs.backend import RunOptions
from zsim.runs.simulator import SimBackend
from zsim.scenario.plan import plan
from zsim.scenario.scenario import parse

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


@needs_async_io
@pytest.mark.usefixtures("async_io")
@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("offload", [measured.PLAIN, measured.BOTH])
def test_deepspeed_loads_no_moments_from_drives_and_nothing_in_memory(
    offload: dict[str, Any], tmp_path: Path
) -> None:
    """So that its checkpoints of states on drives are refused, though it saves them whole."""
    text = measured.scenario(1280, offload=offload).to_toml()
    saved, loaded = (
        launch.launch(
            f"tests.zreal.checkpoints.drive_ranks:{which}_rank",
            {"text": text, "folder": str(tmp_path)}, world_size=2, timeout_s=300,
        )
        for which in ("saved", "loaded")
    )
    rest, moment = 1539 * 4, "exp_avg"
    assert saved[0]["own"] == [4, 4, 4, rest, rest, rest]  # counters, and the one in memory
    assert saved[0]["copied"] == {
        f"{name}{group}.tensor.swp": nbytes
        for name in ("", f"{moment}-", f"{moment}_sq-")
        for group, nbytes in (("0_2", 2_624_512), ("3_6", 2_625_536))
    }
    assert "exceeds dimension size (0)" in saved[0]["converted"]
    for before, after in zip(saved, loaded, strict=True):
        assert [each["is_on_drive"] for each in before["groups"]] == [True, True, False]
        for had, made, has in zip(before["groups"], after["made"], after["loaded"], strict=True):
            assert had["moments"].keys() == {moment, f"{moment}_sq"}
            assert has["moments"] == {}
            assert has["master"] == (had if had["is_on_drive"] else made)["master"]
            assert had["master"] != made["master"]
