"""Streams of a Program's ops: collectives go on beside the host's work until an op waits for them.

The device has the Program's order, neither more nor less of it.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.support.logged_device import LoggedDevice
from zreal import torch_private
from zreal.executor.communication_stream import CollectiveQueue, DeviceStreams
from zreal.executor.executor import execute
from zreal.meters.collectives import C10D_OPS
from zreal.processes.launch import launch
from zreal.zero.zero import ZeRO
from zsim.ir.ops import COLLECTIVES, Op
from zsim.ir.order.happens_before import happened
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario

GATHER, REDUCTION = (
    Op(index=index, kind=kind, unit="blocks.0", stream=kind, group="dp_shard", nbytes=8)
    for index, kind in enumerate(("all_gather", "reduce_scatter"))
)
COMPUTE = ("forward", "backward", "recompute")
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {}, "zero1": {"form": "all_reduce"}, "zero2": {}, "zero3": {"lookahead": 2},
    "zero2 in groups": {"dp_replicate": 2},
}


def op_that_waits(*waits: int, stream: str = "compute", kind: str = "forward") -> Op:
    """An op with such waits."""
    return Op(index=9, kind=kind, unit="blocks.0", stream=stream, waits=waits)


def scenario(
    strategy: str, *, cluster: str = "dgx-h100", ranks: int = 8, reduce: str = "fp32"
) -> Scenario:
    """Two micro-batches and clipping: every stream is in use."""
    return Scenario(
        model={"preset": "gpt-tiny"},
        batch={"micro_batch": 2, "sequence_length": 32, "accumulation": 2},
        cluster={"preset": cluster} | ({"ranks": ranks} if cluster == "cpu-gloo" else {}),
        strategy={"name": strategy.split()[0], **STRATEGIES[strategy]},
        precision={"parameters": "bf16", "reduce": reduce},
        optimizer={"name": "adamw", "clip_norm": 1.0},
    )


def test_the_host_goes_on_and_an_op_waits_for_what_it_names() -> None:
    queue, permitted, ended = CollectiveQueue(), threading.Event(), []
    queue.issue(lambda: permitted.wait(5) and ended.append("gather"), GATHER)
    queue.wait(op_that_waits())
    freed = torch.ones(2)
    queue.free(freed)
    assert (ended, freed.untyped_storage().size()) == ([], 8)
    permitted.set()
    with queue.on(op_that_waits(GATHER.index)):
        queue.free(freed)
    assert (ended, freed.untyped_storage().size()) == (["gather"], 0)


def test_a_communicator_is_one_queue_and_a_step_ends_with_it() -> None:
    queue, permitted, ended = CollectiveQueue(), threading.Event(), []
    queue.issue(lambda: permitted.wait(5) and ended.append("reduction"), REDUCTION)
    queue.issue(lambda: ended.append("gather"), GATHER)
    permitted.set()
    queue.wait(op_that_waits(GATHER.index))
    assert ended == ["reduction", "gather"]
    queue.issue(lambda: ended.append("another"), REDUCTION)
    queue.join()
    assert ended == ["reduction", "gather", "another"]


def test_an_op_on_a_collectives_stream_comes_after_it_and_another_collective_does_not() -> None:
    queue, permitted, ended = CollectiveQueue(), threading.Event(), []
    queue.issue(lambda: permitted.wait(5) and ended.append("reduction"), REDUCTION)
    queue.wait(REDUCTION)
    assert ended == []
    permitted.set()
    queue.wait(op_that_waits(stream="reduce_scatter", kind="copy"))
    assert ended == ["reduction"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_streams_and_events_give_the_order_of_the_program_and_no_more(strategy: str) -> None:
    device = LoggedDevice()
    streams = DeviceStreams(device)
    program = plan(scenario(strategy), device="cuda").of_rank(0)
    ended: list[tuple[int, int]] = []
    for ops in (program.first, program.second, program.steady):
        earlier, work = ended, []
        for op in ops:
            if op.kind in COMPUTE:
                streams.wait(op)
                work.append(device.current_stream().work())
            else:
                with streams.on(op):
                    work.append(device.current_stream().work())
        ended = [(stream, count) for stream, count, _ in work]
        order = happened(ops)
        wrong = [
            (a.index, b.index)
            for a in ops for b in ops[a.index + 1 :]
            if "host" not in (a.stream, b.stream)
            and order.before(a.index, b.index)
            != (work[b.index][2].get(work[a.index][0], 0) >= work[a.index][1])
        ]
        assert wrong == []
        starts = [clock for _, _, clock in work]
        assert all(clock.get(stream, 0) >= count for clock in starts for stream, count in earlier)
    streams.join()
    joined = device.current_stream().clock
    assert all(joined.get(stream, 0) >= count for stream, count in ended)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_executor_issues_each_collective_on_the_stream_of_its_op(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, seen = LoggedDevice(), []
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    case = scenario(strategy, cluster="cpu-gloo")

    def watched(name: str, arguments: Any, carry_out: Any) -> Any:
        seen.append(device.current_stream().number)
        return carry_out()

    with torch_private.fake_group(rank=0, world_size=8):
        trained = execute(case, plan(case, device="cpu"), rank=0, steps=2)
        with torch_private.c10d_calls(C10D_OPS, watched):
            trained.plain_step()
    planned = [
        op.stream for op in plan(case, device="cpu").of_rank(0).steady if op.kind in COLLECTIVES
    ]
    numbers = dict(zip(planned, seen, strict=True))
    assert seen == [numbers[stream] for stream in planned]
    assert len({*numbers.values()}) == len(numbers)
    assert 0 not in seen, "on the stream of compute"


def test_the_loop_of_a_user_has_the_same_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    device, seen = LoggedDevice(), []
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    with torch_private.fake_group(rank=0, world_size=4):
        zero = ZeRO(module, torch.optim.AdamW(module.parameters()), stage=3, units=["0", "1", "2"])
        for step in range(2):
            watched: Any = lambda name, _, call: seen.append(  # noqa: E731
                (name, device.current_stream().number)
            ) or call()
            with torch_private.c10d_calls(C10D_OPS if step else (), watched):
                module(torch.ones(2, 8)).sum().backward()
                zero.step()
                zero.zero_grad()
    by_kind = {name: {number for other, number in seen if other == name} for name, _ in seen}
    assert len(by_kind) == 2
    assert all(len(numbers) == 1 and 0 not in numbers for numbers in by_kind.values())


@pytest.mark.parametrize(("device", "strategy", "reduce"), [
    pytest.param("cpu", "zero3", "fp32", marks=pytest.mark.gloo),
    *(
        pytest.param("cuda", strategy, reduce, marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ])
        for strategy in STRATEGIES for reduce in ("bf16", "fp32")
    ),
])
def test_streams_of_a_device_change_no_bit_of_what_is_trained(
    device: str, strategy: str, reduce: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, which share a GPU where there is one."""
    monkeypatch.setenv("NCCL_HOSTID", "test")
    case = scenario(strategy, cluster="cpu-gloo", ranks=2, reduce=reduce)
    body = "tests.zreal.executor.stream_ranks:both_forms"
    arguments = {"text": case.to_toml(), "device": device}
    for losses, one_stream, parameters, gradients in launch(body, arguments, world_size=2):
        assert losses == one_stream
        assert len(set(losses)) > 1
        assert (parameters, gradients) == ([], [])
