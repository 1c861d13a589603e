"""A GPU's constants: recovered from times of a changed H100, and written to a file for scenarios.
GPUs and scenarios of another kind are refused."""

from dataclasses import replace

import pytest

import zsim
from tests.support.folders import PARITY
from zsim import api
from zsim.calibration.collectives import predict
from zsim.calibration.machine import choice, device_file, device_fit, here, machine_file
from zsim.calibration.machine.device_fit import ALONE, HOST_LINK, START, number
from zsim.calibration.machine.device_request import device_request
from zsim.calibration.machine.fit import MachineError
from zsim.calibration.records import Collective
from zsim.cluster.cluster_presets import load_cluster
from zsim.cluster.collectives.nccl.measured_curves import curves_of
from zsim.engine.bands.error_bands import calibration
from zsim.engine.costs.kernel_time import kernel_ns
from zsim.io import files
from zsim.runs.backend import Capabilities, DeviceMeasurements, Gpus, RepeatedCall
from zsim.scenario.parts import cluster_file

H100 = Gpus(name="NVIDIA H100 80GB HBM3", count=8, driver="570.1", nccl="2.27.3")
BASE = device_file.base_of(H100, "")
NODE = BASE.with_ranks(8)
TRUE = replace(
    NODE.device, matmul_efficiency=0.6, float32_efficiency=0.7, memory_efficiency=0.92,
    elementwise_efficiency=0.75, kernel=1500,
    attention={
        **NODE.device.attention,
        "flash2": replace(NODE.device.attention["flash2"], rate=410 * 10**12, backward=0.62),
    },
)
HOST_BANDWIDTH, ISSUE_NS, ISSUE_COLLECTIVE_NS = 40 * 10**9, 4_500, 21_000
SLOWER = 1.2
"""Times of this node's collectives over those of the preset."""


def times_of(ns: float, issue: int, spread: float) -> RepeatedCall:
    device = tuple(round(ns * (1 + spread * turn)) for turn in (-1, -0.5, 0, 0.5, 1))
    return RepeatedCall(device=device, issue=(issue,) * 5)


def kernel_times(kernel, device):
    link = 1e9 * kernel.nbytes / HOST_BANDWIDTH
    return link if kernel.location == "link" else kernel_ns(kernel, device, ALONE)


def collective_ns(kind, nbytes, ranks):
    row = Collective(
        source="", line=0, op=kind, nbytes=nbytes, seconds=1.0, cluster=BASE.with_ranks(ranks),
        through_torch=True,
    )
    return 1000 * SLOWER * predict(row, curves=curves_of(row.cluster)).microseconds


class Node:
    """A backend whose GPUs have the constants `device`, by the simulator's own times."""

    name = "constants"

    def __init__(self, device=TRUE, *, spread=0.01):
        self.device, self.spread = device, spread

    def measure_device(self, request):
        """Times of a node with these constants."""
        return DeviceMeasurements(
            kernels=tuple(
                times_of(kernel_times(kernel, self.device), ISSUE_NS, self.spread)
                for kernel in request.kernels
            ),
            collectives=tuple(
                times_of(
                    collective_ns(kind, nbytes, request.world_size), ISSUE_COLLECTIVE_NS,
                    self.spread,
                )
                for kind, nbytes in request.collectives
            ),
        )


def calibrated(node=None, *, gpus=H100, world_size=1, preset="", quick=True):
    return here.gpus_calibrated(
        node or Node(), gpus, world_size=world_size, quick=quick, preset=preset
    )


@pytest.fixture(scope="module")
def whole_node():
    """Eight GPUs, collectives included."""
    return calibrated(world_size=8)


@pytest.mark.parametrize("quick", [True, False])
def test_the_fit_finds_the_constants_that_the_times_were_made_of(quick):
    fitted = calibrated(quick=quick).fitted
    keys = [constant.key for constant in fitted.constants]
    paced = {f"overheads.{name}" for name in ("issue_kernel", "issue_operator", "issue_hook")}
    assert {*device_fit.RATES, START, HOST_LINK, *paced} == {*keys}
    for key in (*device_fit.RATES, START):
        fitted_to = number(fitted.cluster.device, key)
        assert fitted_to == pytest.approx(number(TRUE, key), rel=0.005), key
    assert fitted.doubts == ()
    assert "one GPU alone" in fitted.without_curves


def test_the_file_has_the_constants_for_scenarios(whole_node, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(whole_node.text)
    cluster = cluster_file.load(str(path), folder=None, nodes=1, ranks=8)
    for key in (*device_fit.RATES, START):
        in_file = number(cluster.device, key)
        assert in_file == pytest.approx(number(TRUE, key), rel=0.005), key
    assert cluster.links.host.bandwidth == pytest.approx(HOST_BANDWIDTH, rel=1e-3)
    assert cluster.overheads.issue_kernel == ISSUE_NS
    preset = load_cluster("dgx-h100").overheads
    for name in device_fit.PACED:  # a host that launches in twice the time takes twice as long
        own = getattr(cluster.overheads, name) / getattr(preset, name)
        assert own == pytest.approx(ISSUE_NS / preset.issue_kernel, rel=1e-3)
    assert cluster.overheads.issue_collective == ISSUE_COLLECTIVE_NS
    assert calibration(cluster) == "calibrated"
    scenario = zsim.Scenario(
        model={"preset": "llama-3.2-1b"}, batch={"micro_batch": 1, "sequence_length": 1024},
        cluster={"file": str(path)}, strategy={"name": "fsdp2"},
    )
    assert zsim.simulate(scenario).record.provenance["calibration"] == "calibrated"


def test_the_curves_are_those_of_the_collectives(whole_node):
    curves = whole_node.fitted.curves
    assert {(curve.scope, curve.collective) for curve in curves.curves} == {
        ("ring", "all_gather"), ("ring", "reduce_scatter"), ("nvls", "all_reduce")
    }
    # a curve is smooth, and NCCL's times have corners where it changes its protocol
    assert all(abs(error) < 0.2 for error in curves.errors)


def test_a_rate_above_the_vendors_peak_stays_there_and_is_said():
    faster = replace(TRUE, memory_efficiency=1.3, matmul_efficiency=1.1)
    fitted = calibrated(Node(faster)).fitted
    device = fitted.cluster.device
    assert device.memory_efficiency == 1.0
    assert device.matmul_efficiency == device.products_alone  # alone, products are at the peak
    assert "device.memory_efficiency: faster than the vendor's peak" in str(fitted.doubts)


def test_equal_calls_that_differ_widen_the_band_and_are_said():
    made = calibrated(Node(spread=0.4))
    widths = {constant.key: constant.width for constant in made.fitted.constants}
    assert widths["device.matmul_efficiency"] == pytest.approx(0.4, abs=0.01)
    assert "device.matmul_efficiency: equal calls differ by 40%" in str(made.fitted.doubts)
    assert "doubtful: device.matmul_efficiency" in made.text


@pytest.mark.parametrize(("name", "preset", "message"), [
    ("NVIDIA GeForce GTX 1080", "", "cluster.device"), ("NVIDIA L4", "", "--cluster PRESET"),
    ("NVIDIA L4", "cpu-gloo", "a cluster of GPUs"), ("NVIDIA L4", "dgx-h199", "unknown cluster"),
])
def test_gpus_without_a_preset_are_refused_by_name(name, preset, message):
    with pytest.raises(zsim.ZsimError, match=message):
        calibrated(gpus=replace(H100, name=name), preset=preset)


def test_a_gpu_that_is_sold_alone_begins_in_the_node_that_the_user_names():
    made = calibrated(gpus=replace(H100, name="NVIDIA L4"), preset="pcie-box", world_size=2)
    assert made.fitted.cluster.device.name == "L4 24 GB"
    assert "rings over PCIe have no curve" in made.fitted.without_curves
    cluster = cluster_file.parse(made.text.encode(), where="mine.toml", ranks=2)
    assert cluster.device.name == "L4 24 GB"


def test_more_ranks_than_gpus_and_missing_times_are_refused():
    with pytest.raises(MachineError, match="1 to 2, a rank on each GPU"):
        calibrated(gpus=replace(H100, count=2), world_size=3)
    asked = device_request(NODE.device, 1, quick=True)
    nothing = DeviceMeasurements(kernels=(), collectives=())
    with pytest.raises(MachineError, match="some are missing"):
        device_fit.fit(asked, nothing, NODE, source="")


@pytest.mark.parametrize(("cluster", "reason"), [
    ({"preset": "dgx-h100"}, ""), ({"preset": "cpu-gloo", "ranks": 4}, ""),
    ({"preset": "dgx-a100"}, "H100 SXM 80 GB here, A100 SXM 80 GB in the scenario"),
    ({"preset": "dgx-h100", "nodes": 2}, "one node here, 2 in the scenario"),
    ({"preset": "cpu-gloo", "ranks": 16}, "8 GPUs here, 16 in the scenario"),
])
def test_the_file_stands_for_scenarios_on_such_a_node_alone(cluster, reason):
    scenario = zsim.Scenario(
        model={"preset": "gpt-tiny"}, batch={"micro_batch": 2, "sequence_length": 64},
        cluster=cluster, strategy={"name": "ddp"},
    )
    assert device_file.unfit(NODE, scenario).startswith(reason)
    assert bool(device_file.unfit(NODE, scenario)) == bool(reason)


def test_ranks_on_gpus_are_predicted_by_the_file_only_where_it_is_of_them(
    whole_node, tmp_path, monkeypatch
):
    monkeypatch.setenv(machine_file.CACHE, str(tmp_path))
    able = Capabilities(memory=True, numerics=True, time=False, device="cuda", gpus=H100)
    fits, other = (
        zsim.Scenario(
            model={"preset": "gpt-tiny"}, batch={"micro_batch": 2, "sequence_length": 64},
            cluster={"preset": preset}, strategy={"name": "ddp"},
        )
        for preset in ("dgx-h100", "dgx-a100")
    )
    assert choice.find_machine(able, fits, None) is None
    assert "not calibrated here" in choice.reason_for_preset(H100, fits)
    files.write(machine_file.cached(8, H100), whole_node.text)
    cluster = choice.load_machine(fits, choice.find_machine(able, fits, None))
    assert cluster.device.kernel == TRUE.kernel
    assert choice.find_machine(able, other, None) is None
    assert "here, A100 SXM 80 GB in the scenario" in choice.reason_for_preset(H100, other)
    assert machine_file.cached(8, replace(H100, driver="580")) != machine_file.cached(8, H100)


@pytest.mark.parametrize(("gpu", "cluster"), [
    ("NVIDIA H200", "dgx-h200"), ("NVIDIA H100 80GB HBM3", "dgx-h100"),
    ("A GPU of no preset", "dgx-h100"),
])
def test_real_ranks_of_a_cpus_scenario_are_judged_by_the_preset_of_their_gpus(gpu, cluster):
    scenario = zsim.load(PARITY / "fsdp2-mlp-2.toml")
    gpus = replace(H100, name=gpu)
    measured = zsim.simulate(scenario).record
    capabilities = Capabilities(memory=True, numerics=True, time=False, device="cuda", gpus=gpus)
    predicted = api.compare_with_simulation(scenario, measured, capabilities).predicted
    assert predicted.provenance["cluster"] == cluster
