"""Spans of real steps: every collective and every unit of the Program, in the Program's order."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zsim
from tests.support.folders import PARITY
from zreal import torch_private
from zreal.meters.clocks import HostClock, clock_of
from zreal.meters.recording import record, without
from zreal.meters.timeline import TimelineRecorder
from zsim.cli.main import main
from zsim.ir.ops import COLLECTIVES
from zsim.ir.run import CollectiveRecord
from zsim.runs import saved
from zsim.runs.figures import metrics
from zsim.runs.figures.intervals import union_of
from zsim.scenario.plan import plan

COMPUTE = ("forward", "backward", "recompute", "optimizer")
NAMES = ["fsdp2-gpt-2-accumulate-every", "ddp-gpt-2-bucket-view", "zero3-mlp-2-lookahead-0"]


def kinds_and_units(ops) -> list[tuple[str, str]]:
    """Kinds and units of the compute stream, one entry for neighbours that are alike."""
    told = ((op.kind, op.unit) for op in ops if op.stream == "compute" and op.kind in COMPUTE)
    return [key for key, _ in groupby(told)]


@pytest.mark.gloo
@pytest.mark.parametrize("name", NAMES)
def test_spans_of_a_real_step_are_those_of_the_program(name: str) -> None:
    scenario = zsim.load(PARITY / f"{name}.toml")
    run = zsim.run(scenario, backend="gloo", numerics="none")
    for rank in run.ranks:
        ops = plan(scenario, device="cpu").of_rank(rank.rank).steady
        moved = sorted(
            (span for span in rank.spans if span.kind in COLLECTIVES), key=lambda s: s.issued_ns
        )
        assert [(s.kind, s.unit, s.stream, s.nbytes) for s in moved] == [
            (op.kind, op.unit, op.stream, op.nbytes) for op in ops if op.kind in COLLECTIVES
        ]
        assert kinds_and_units(rank.spans) == kinds_and_units(ops)
        assert all(0 <= s.issued_ns <= s.start_ns <= s.end_ns for s in rank.spans)
        assert len(rank.recorded_times_ns) >= 3
        assert rank.recorded_step_ns in rank.recorded_times_ns
        assert 0 < metrics.exposed_ns(rank) <= metrics.communication_ns(rank)
        assert metrics.compute_ns(rank) + metrics.exposed_ns(rank) <= rank.recorded_step_ns
    assert run.exposed_communication


@pytest.mark.gloo
def test_one_trace_has_what_was_predicted_and_what_was_measured(tmp_path: Path, capsys) -> None:
    path = tmp_path / "both.json"
    asked = [str(PARITY / "fsdp2-mlp-2.toml"), "--numerics", "none", "--trace", str(path)]
    assert main(["validate", *asked, "--save", str(tmp_path)]) == 0
    assert f"wrote {path}; open it in ui.perfetto.dev" in capsys.readouterr().err
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {
        0: "predicted rank 0", 1: "predicted rank 1", 2: "measured rank 0", 3: "measured rank 1",
    }
    for side, first in (("predicted", 0), ("measured", 2)):
        run = saved.load(tmp_path / f"fsdp2-mlp-2.{side}.json")
        for rank in run.ranks:
            shown = [
                e["name"] for e in events
                if e["ph"] in "Xi" and e["pid"] == first + rank.rank
                and e["cat"] not in ("part", "kernel")
            ]
            assert shown == [span.name for span in rank.spans]
    arrows = [event["id"] for event in events if event["ph"] == "s"]
    assert len(set(arrows)) == len(arrows) > 0


def test_a_backend_without_time_writes_no_trace(capsys, tmp_path: Path) -> None:
    asked = [str(PARITY / "fsdp2-mlp-2.toml"), "--trace", str(tmp_path / "t.json")]
    assert main(["validate", *asked, "--against", "fake"]) == 2
    assert "found fake, whose trace would be empty" in capsys.readouterr().err


def test_nothing_stays_behind_where_a_step_was_recorded() -> None:
    """Hooks, the wait of works and c10d's operators are what they were."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    wait, seen = dist.Work.wait, []

    def describe(name, arguments):
        seen.append(name)

    recorder = TimelineRecorder(
        root=module, units={"0": [module[0]]}, describe=describe, clock=HostClock()
    )
    with torch_private.fake_group(rank=0, world_size=2):
        with recorder.active():
            dist.all_reduce(torch.ones(2))
            step = recorder.recorded(lambda: module(torch.ones(1, 4)).sum().backward())
        dist.all_reduce(torch.ones(2))
    assert seen == ["c10d::allreduce_"]
    assert dist.Work.wait is wait
    assert not module._forward_hooks
    assert not module[0]._forward_pre_hooks
    told = [(mark.kind, mark.unit) for mark in step.marks if mark.kind]
    assert told == [
        ("forward", "root"), ("forward", "0"), ("forward", "root"), ("backward", "root"),
        ("backward", "0"),
    ]


def test_a_waiting_stream_is_cut_out_of_what_computes() -> None:
    waits = union_of([(30, 40), (10, 20), (15, 25)])
    assert waits == [(10, 25), (30, 40)]
    assert list(without((0, 35), waits)) == [(0, 10), (25, 30)]
    assert list(without((10, 25), waits)) == []


def test_a_collective_without_a_work_ends_on_the_stream_that_it_runs_on(monkeypatch) -> None:
    """NCCL returns no Work for a collective that is called without async_op."""
    monkeypatch.setattr(torch_private, "works", lambda _: [])
    called = CollectiveRecord(op="all_gather", nbytes=32, group="dp_shard", group_size=2)
    recorder = TimelineRecorder(
        root=torch.nn.Linear(1, 1), units={}, describe=lambda *_: called,
        clock=HostClock(overlaps=True),
    )
    recorder._collective("_allgather_base_", (), lambda: None)
    (call,) = recorder.step.calls
    assert call.begun < call.ended
    assert recorder.step.waits == [(call.begun, call.ended)]


def test_a_null_work_is_none(monkeypatch) -> None:
    monkeypatch.setattr(dist.Work, "unbox", staticmethod(lambda _: None))
    with torch_private.fake_group(rank=0, world_size=2):
        group = dist.group.WORLD.boxed()
        assert torch_private.works((torch.ones(1), group)) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_spans_of_a_gpu_are_told_by_its_events() -> None:
    """One rank alone: its units compute one after another, later than the host issues them."""
    module = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).cuda()
    inputs = torch.ones(512, 512, device="cuda")
    with torch_private.fake_group(rank=0, world_size=1):
        recording = record(
            lambda: module(inputs).sum().backward(), device="cuda", root=module,
            units={str(i): [module[i]] for i in range(4)}, describe=lambda *_: None, planned=(),
            number=5,
        )
    forward = [span.unit for span in recording.spans if span.kind == "forward"]
    assert [unit for unit in forward if unit != "root"] == ["0", "1", "2", "3"]
    assert all(span.start_ns < span.end_ns <= recording.step_ns for span in recording.spans)
    assert clock_of("cuda").overlaps


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_time_in_which_the_compute_stream_waits_for_another_is_no_units() -> None:
    """A long product on another stream comes before the unit, inside its forward."""
    factor, other = torch.ones(4096, 4096, device="cuda"), torch.cuda.Stream()

    class Waiting(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.cuda.stream(other):
                for _ in range(20):
                    torch.mm(factor, factor)
            torch.cuda.current_stream().wait_stream(other)
            return super().forward(x)

    module = torch.nn.Sequential(Waiting(64, 64)).cuda()
    inputs = torch.ones(64, 64, device="cuda")
    with torch_private.fake_group(rank=0, world_size=1):
        recording = record(
            lambda: module(inputs).sum().backward(), device="cuda", root=module,
            units={"0": [module[0]]}, describe=lambda *_: None, planned=(), number=5,
        )
    unit = sum(s.end_ns - s.start_ns for s in recording.spans if s.unit == "0")
    assert recording.step_ns
    assert unit < recording.step_ns / 2
