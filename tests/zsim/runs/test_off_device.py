"""Waits of a step for drives, copies and the host, and the bytes of its drives."""

from __future__ import annotations

import json

import pytest

import zsim
from tests.support.folders import SCENARIOS
from zsim.cli.main import main
from zsim.ir.ops import Kernel, Op
from zsim.ir.run import OffDevice
from zsim.runs import saved
from zsim.runs.figures.off_device import off_device
from zsim.runs.saved import dump


def on_drives(strategy: str = "deepspeed3") -> zsim.Scenario:
    return zsim.Scenario(
        model={"preset": "llama-2-7b"}, batch={"micro_batch": 4, "sequence_length": 2048},
        cluster={"preset": "dgx-a100"}, strategy={"name": strategy},
        precision={"parameters": "bf16", "reduce": "bf16"},
        activation_checkpointing={"mode": "full"},
        offload={"optimizer": "nvme", "parameters": "nvme", "adam": "deepspeed"},
    )


def op(index: int, kind, stream, location: str = "device", operator: str = "read") -> Op:
    kernels = (Kernel(operator, 0, 100 + index, "float32", location=location),)
    return Op(index=index, kind=kind, unit="a", stream=stream, kernels=kernels)


def test_waits_are_time_of_work_off_the_device_beside_which_nothing_is_computed():
    """Compute has 0 to 10 and 20 to 30; the copy on its own stream, 30 to 34, is none."""
    ops = [
        op(0, "forward", "compute"), op(1, "backward", "compute"),
        op(2, "copy", "drive_read", "drive"), op(3, "copy", "drive_write", "drive", "write"),
        op(4, "optimizer", "host", "host"), op(5, "copy", "compute", "link"),
        op(6, "copy", "all_gather_copy_in"),
    ]
    starts, ends = [0, 20, 5, 12, 28, 30, 40], [10, 30, 14, 25, 40, 34, 90]
    assert off_device(ops, starts, ends) == OffDevice(
        drives_ns=10, copies_ns=4, host_ns=10, read_bytes=102, written_bytes=103
    )
    assert off_device(ops[:2], starts[:2], ends[:2]) is None


def test_a_step_on_drives_says_in_text_and_json_that_it_waits_for_them(tmp_path, capsys):
    """Gradients, master copies and two moments, 16 bytes an element, are read and written once. On
    drives of 20 and 10 GB/s the bytes alone are most of the step."""
    path = tmp_path / "drives.toml"
    path.write_text(on_drives().to_toml())
    assert main(["run", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    case, work = zsim.load(path), told["off_device"]
    of_a_rank = 16 * case.model.num_parameters // 8
    assert work["read_bytes"] == pytest.approx(of_a_rank, rel=1e-3)
    assert work["written_bytes"] == pytest.approx(of_a_rank, rel=1e-3)
    assert told["drive_bytes"] == zsim.simulate(case).to_dict()["drive_bytes"] > 0
    drives = case.cluster.drives
    least_s = 8 * (work["read_bytes"] / drives.read + work["written_bytes"] / drives.write)
    assert work["drives_ns"] == pytest.approx(least_s * 1e9, rel=0.01)
    assert work["drives_ns"] > told["step_time_ns"] / 2 > told["exposed_communication_ns"]
    assert main(["run", str(path)]) == 0
    text = capsys.readouterr().out
    assert f"compute waits           {work['drives_ns'] / 1e9:.3f} s for drives" in text
    assert "12.55 GiB read, 12.55 GiB written in a step" in text


def test_the_critical_path_of_such_a_step_names_drives_and_host():
    why = zsim.why(zsim.simulate(on_drives()))
    times = why.off_device
    assert list(times) == ["drives", "host", "copies"]
    assert times["drives"] + times["host"] > why.step_ns / 2
    assert why.to_dict()["critical_off_device_ns"] == times
    named = f"{'reads and writes of drives':<43} {times['drives'] / 1e9:.3f} s, "
    assert " ".join(named.split()) in " ".join(str(why).split())
    assert "the optimizer's step on the host" in str(why)


def test_a_step_on_the_device_alone_says_nothing_of_it():
    case = zsim.load(SCENARIOS / "memory" / "fsdp2-mlp-small-4.toml")
    run = zsim.simulate(case)
    assert run.figures.off_device is None
    assert not {"off_device", "drive_bytes"} & run.to_dict().keys()
    assert "off_device" not in dump(run.record)
    assert "critical_off_device_ns" not in zsim.why(run).to_dict()


def test_what_a_step_does_off_the_device_is_saved_with_its_run(tmp_path):
    run = zsim.simulate(on_drives("zero3"))
    run.save(tmp_path / "run.json")
    assert saved.load(tmp_path / "run.json") == run.record
    assert run.record.ranks[0].off_device is not None
