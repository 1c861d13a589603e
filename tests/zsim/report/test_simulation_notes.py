"""Notes of a trace against the Run: reasons, arrows, bytes by kind, bytes that leave on links."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

import zsim
from tests.support.folders import PARITY
from zsim.cli.main import main
from zsim.report.simulation_notes import trace_notes
from zsim.runs.figures import metrics
from zsim.runs.pictures import chrome_trace

STRATEGIES = ("ddp", "zero3", "fsdp2", "zero_redundancy")


def scenario(strategy: str, *, nodes: int = 1, **mesh: int) -> zsim.Scenario:
    return zsim.Scenario(
        model={"preset": "gpt-tiny"}, batch={"micro_batch": 1, "sequence_length": 32},
        cluster={"preset": "dgx-h100", "nodes": nodes}, strategy={"name": strategy, **mesh},
        precision={"parameters": "bf16"},
    )


CASES = [scenario(name) for name in STRATEGIES]
HSDP = scenario("hsdp", nodes=2, dp_replicate=2, dp_shard=8)
ON_GLOO = zsim.load(PARITY / "zero3-mlp-4.toml")  # its host awaits each collective
CASES += [HSDP, ON_GLOO]


def events_of(
    case: zsim.Scenario, *, all_ranks: bool = False
) -> tuple[zsim.Run, list[dict[str, Any]]]:
    run = zsim.simulate(case, all_ranks=all_ranks)
    table = chrome_trace.trace(run.record, trace_notes(case, run.record))
    return run, json.loads(json.dumps(table))["traceEvents"]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case.strategy}-{case.world_size}")
def traced(request: pytest.FixtureRequest) -> tuple[zsim.Run, list[dict[str, Any]]]:
    return events_of(request.param)


def test_exposed_nanoseconds_of_slices_are_those_of_each_rank(traced):
    run, events = traced
    exposed: dict[int, int] = defaultdict(int)
    for event in events:
        if "exposed_ns" in event.get("args", {}):
            exposed[event["pid"]] += event["args"]["exposed_ns"]
            assert event["args"]["exposed_by"]
    assert exposed == {
        rank.rank: ns for rank in run.ranks if (ns := metrics.exposed_ns(rank))
    }


def test_collectives_say_their_group_algorithm_and_bus_bandwidth(traced):
    run, events = traced
    slices = [event for event in events if event.get("cat") in metrics.COLLECTIVES]
    assert slices
    for event in slices:
        arguments, size = event["args"], event["args"]["group_size"]
        assert size == run.record.mesh.size(arguments["group"])
        steps = {"all_reduce": 2 * (size - 1), "broadcast": size}.get(event["cat"], size - 1)
        bus = arguments["bytes"] * steps / size / (event["dur"] * 1000)
        assert arguments["bus_bandwidth_GB_s"] == pytest.approx(bus, abs=0.001)
        assert arguments["algorithm"]


def test_arrows_lead_from_the_end_of_what_a_span_waited_for_to_its_start(traced):
    _, events = traced
    slices = {
        (e["pid"], e["tid"], round(e["ts"] * 1000)): e for e in events
        if e["ph"] == "X" and e["dur"] and e["cat"] != "kernel"
    }
    ends = {
        (pid, tid, at + round(e["dur"] * 1000)): e for (pid, tid, at), e in slices.items()
    }
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    arrows = [e for e in events if e["ph"] == "f"]
    assert len(arrows) == len(starts) > 0
    for arrow in arrows:
        start, at = starts[arrow["id"]], round(arrow["ts"] * 1000)
        span = slices[arrow["pid"], arrow["tid"], at]
        assert (start["pid"], start["tid"], round(start["ts"] * 1000) + 1) in ends
        assert round(start["ts"] * 1000) + 1 <= at
        assert span["args"]["waited_for"] == arrow["name"]
        if arrow["name"] in ("a dependency", "its communicator's queue"):
            assert round(start["ts"] * 1000) + 1 == at  # the last to end is when it began


def test_memory_by_kind_reaches_the_peak_and_its_split(traced):
    run, events = traced
    for rank in run.ranks:
        memory = rank.phases["steady"].memory
        points = [
            e["args"] for e in events if e["name"] == "memory by kind" and e["pid"] == rank.rank
        ]
        highest = max(points, key=lambda point: sum(point.values()))
        assert sum(highest.values()) == memory.peak_bytes
        assert {kind: n for kind, n in highest.items() if n} == {
            kind: n for kind, n in memory.by_kind.items() if n
        }


def test_kernels_lie_one_after_another_inside_their_computations(traced):
    _, events = traced
    slices: dict[tuple[int, int], list[tuple[int, int, bool]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["cat"] != "part":
            at, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
            slices[event["pid"], event["tid"]].append((at, at + length, event["cat"] == "kernel"))
    kernels = 0
    for track in slices.values():
        ends = 0, 0  # of the computation, and of the last kernel in it
        for at, end, is_kernel in track:
            if is_kernel:
                assert ends[1] <= at <= end <= ends[0]
                ends, kernels = (ends[0], end), kernels + 1
            else:
                ends = end, at
    assert kernels > 30


def sent_on(events: list[dict[str, Any]], rank: int, link: str) -> float:
    points = [
        (e["ts"] / 1e6, e["args"]["sent"]) for e in events
        if e["name"] == f"{link}, bytes/s" and e["pid"] == rank
    ]
    assert points[-1][1] == 0
    return sum(rate * (after - at) for (at, rate), (after, _) in pairwise(points))


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=["ddp", "zero_redundancy"])
def test_rates_of_the_fabric_add_up_to_the_bytes_that_each_rank_sends(case):
    run, events = events_of(case, all_ranks=True)
    for rank in run.ranks:
        assert sent_on(events, rank.rank, "fabric") == pytest.approx(rank.bytes_sent, rel=1e-3)


def test_replicas_send_over_the_rail_of_each_rank_and_shards_in_their_node():
    run, events = events_of(HSDP, all_ranks=True)
    for rank in run.ranks:
        replicas = [s for s in rank.spans if s.group == "dp_replicate"]
        crossing = sum(span.nbytes for span in replicas)  # 2 (N - 1) / N of it, N = 2
        rail = sent_on(events, rank.rank, f"rail{rank.rank % 8}")
        assert rail == pytest.approx(crossing, rel=1e-3)
        inside = sent_on(events, rank.rank, "fabric")
        assert inside == pytest.approx(rank.bytes_sent - crossing, rel=1e-3)


def test_the_command_writes_a_trace_with_notes(tmp_path):
    file, out = tmp_path / "mine.toml", tmp_path / "trace.json"
    file.write_text(scenario("fsdp2").to_toml())
    assert main(["run", str(file), "--trace", str(out)]) == 0
    names = {event["name"] for event in json.loads(out.read_text())["traceEvents"]}
    assert names >= {"memory by kind", "fabric, bytes/s", "forward", "backward", "optimizer"}
