"""A testbed of two hosts: it shapes, it counts, and it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import zsim
from zreal.backends import GlooBackend
from zreal.testbed.network import network
from zsim.calibration.machine import shaped
from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.testbed import Layout, cluster_on, layout
from zsim.errors import BackendUnavailableError
from zsim.ir.run import RunRecord
from zsim.runs.backend import CollectiveRequest, MachineRequest, RunOptions
from zsim.runs.simulator import SimBackend
from zsim.scenario.scenario import Scenario

pytestmark = pytest.mark.gloo
LAYOUT = layout("2x500mbit")
OWN = """
import time
from zreal.testbed.network import network
from zsim.cluster.testbed import layout
with network(layout("2x1gbit")) as hosts:
    print(hosts.pid, flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module", autouse=True)
def _allowed() -> None:
    try:
        with network(LAYOUT):
            pass
    except BackendUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def runs() -> tuple[RunRecord, RunRecord]:
    """A step with emulated compute on 500 Mbit/s: predicted by closed forms, and measured."""
    scenario = Scenario(
        model={"family": "mlp", "sizes": {"dims": [384] * 4, "hidden": 768, "num_classes": 10}},
        batch={"micro_batch": 2}, strategy={"name": "fsdp2"},
        cluster={"preset": "cpu-gloo", "ranks": 2}, optimizer={"name": "sgd"},
    )
    cluster = cluster_on(LAYOUT)
    cluster = replace(cluster, device=replace(cluster.device, float32=10**8))
    measured = GlooBackend().run(scenario, options=RunOptions(testbed=LAYOUT, emulated_on=cluster))
    predictor = SimBackend(device="cpu", cluster=cluster)
    return predictor.run(scenario, options=RunOptions(all_ranks=True)), measured


def test_a_slow_link_of_a_scenario_is_slow_on_the_testbed_too(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed_forms(_: object, links: Layout, *, base: ClusterSpec | None) -> ClusterSpec:
        return cluster_on(links, base=base)

    monkeypatch.setattr(shaped, "calibrated", closed_forms)  # which takes half a minute
    scenario = Scenario(
        model={"preset": "mlp-tiny"}, batch={"micro_batch": 2}, strategy={"name": "ddp"},
        cluster={"preset": "cpu-gloo", "nodes": 2}, faults=[
            {"kind": "slow_link", "node": 1, "nic": 0, "bandwidth": "20 Mbit/s"}
        ],
    )
    comparison = zsim.validate(scenario, testbed=LAYOUT.text, numerics="none")
    assert comparison.ok
    assert not comparison.agrees
    assert str(comparison.agreement).startswith("WITH FAULTS, alike in order, bytes and memory; ")
    measured = comparison.measured
    assert measured.provenance["testbed"] == "2x500mbit,1=20mbit"
    wire_ns = measured.ranks[1].bytes_sent * 8 * 10**9 // (20 * 10**6)
    assert (measured.step_time_ns or 0) > wire_ns
    assert (comparison.predicted.step_time_ns or 0) > wire_ns


def test_hosts_send_the_predicted_bytes(runs: tuple[RunRecord, RunRecord]) -> None:
    predicted, measured = runs
    for rank, seen in zip(predicted.ranks, measured.ranks, strict=True):
        assert seen.bytes_sent == pytest.approx(rank.bytes_sent, rel=0.01)


def test_a_step_takes_its_timers_and_its_links(runs: tuple[RunRecord, RunRecord]) -> None:
    predicted, measured = runs
    assert predicted.step_time_ns is not None
    assert measured.step_time_ns is not None
    compute = sum(
        span.end_ns - span.start_ns for span in predicted.ranks[0].spans
        if span.kind in ("forward", "backward")
    )
    wire = measured.ranks[0].bytes_sent * 8 * 10**9 // LAYOUT.rates[0]
    assert measured.step_time_ns > compute + wire  # collectives of FSDP on a CPU are synchronous
    # a machine that others use may take longer, and never less
    assert measured.step_time_ns < 3 * predicted.step_time_ns
    assert "emulated" in measured.provenance["compute"]
    assert measured.provenance["testbed"] == "2x500mbit"


def test_an_all_gather_of_two_that_arrive_apart_sends_three_halves_one_after_another() -> None:
    """The later rank asks for data behind its own half on the wire, and is sent the rest then."""
    shape, nbytes = layout("2x50mbit"), 2**20
    asked = CollectiveRequest(
        kind="all_gather", nbytes=nbytes, ranks=2, repeats=3, apart_ns=2_000_000
    )
    measured = GlooBackend().measure(MachineRequest(
        world_size=2, scenarios=(), collectives=(asked,), repeats=1, timeout_s=60.0, testbed=shape
    ))
    half = nbytes / 2 / 2 * 8 * 10**9 / shape.rates[0]
    assert min(measured.collectives[0]) > 2.5 * half  # less the buckets' bursts


def test_groups_of_every_second_host_share_the_uplink() -> None:
    shape = layout("2x2x1gbit/50mbit")
    asked = [
        CollectiveRequest(
            kind="all_reduce", nbytes=2**18, ranks=2, repeats=5, stride=stride, apart_ns=300_000
        )
        for stride in (1, 2)
    ]
    measured = GlooBackend().measure(MachineRequest(
        world_size=4, scenarios=(), collectives=tuple(asked), repeats=1, timeout_s=60.0,
        testbed=shape,
    ))
    over_the_uplink = 2**18 * 8 * 10**9 / shape.uplink
    # twice, less the buckets' bursts; beside other work the groups may come one after another
    assert max(measured.collectives[1]) > 1.3 * over_the_uplink
    cluster = cluster_on(shape)
    assert [cluster.path(ranks).num_nodes for ranks in ((0, 1), (0, 2))] == [1, 2]


def test_other_numbers_of_ranks_are_refused() -> None:
    scenario = Scenario(
        model={"family": "mlp", "sizes": {"dims": [8, 8], "hidden": 8, "num_classes": 2}},
        batch={"micro_batch": 2}, strategy={"name": "ddp"},
        cluster={"preset": "cpu-gloo", "ranks": 4}, optimizer={"name": "sgd"},
    )
    with pytest.raises(BackendUnavailableError, match="a host for each rank"):
        GlooBackend().run(scenario, options=RunOptions(testbed=LAYOUT))


def test_nothing_is_left_after_a_killed_controller() -> None:
    before = _interfaces()
    with subprocess.Popen(
        [sys.executable, "-c", OWN], stdout=subprocess.PIPE, text=True
    ) as controller:
        assert controller.stdout is not None
        holder = int(controller.stdout.readline())
        assert Path(f"/proc/{holder}").exists()
        assert _interfaces() == before  # nothing is named outside while it runs, either
        os.kill(controller.pid, signal.SIGKILL)
    limit = time.monotonic() + 5
    while _runs(holder) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not _runs(holder)
    assert _interfaces() == before


def _interfaces() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


def _runs(pid: int) -> bool:
    """True while the process runs; one that nobody has reaped yet holds nothing."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"
