"""Cluster presets: they load, and every number has a source."""

from __future__ import annotations

import pytest

from zsim.api import simulate
from zsim.cluster.cluster_presets import clusters, load_cluster
from zsim.cluster.collectives import LIBRARIES
from zsim.cluster.devices import PresetFigure, devices, load_device
from zsim.errors import ScenarioError
from zsim.memory import non_torch
from zsim.scenario import scenario

NAMES = clusters()


@pytest.mark.parametrize("name", [name for name in devices() if load_device(name).runtime])
def test_every_gpu_has_a_verdict_in_nodes_of_another(name: str) -> None:
    """Figures of the device take the place of the other's, with their sources."""
    case = scenario.Scenario(
        model={"preset": "llama-3.2-1b"}, batch={"micro_batch": 1, "sequence_length": 128},
        cluster={"preset": "pcie-box", "device": name}, strategy={"name": "fsdp2"},
    )
    gpu = load_device(name)
    run = simulate(case)
    assert run.device_memory is not None
    capacity = non_torch.capacity(gpu)
    assert run.device_memory.capacity_bytes == capacity.nbytes
    assert 0.9 * gpu.memory < capacity.low <= capacity.nbytes <= capacity.high
    assert capacity.high <= 1.08 * gpu.memory
    of_device = [figure for figure in case.cluster.figures if figure.key.startswith("device.")]
    assert tuple(of_device) == gpu.figures


@pytest.mark.parametrize(("table", "problem"), [
    ({"preset": "pcie-box", "device": "rtx-4090"}, "unknown GPU .*, did you mean rtx-4090-24"),
    ({"preset": "pcie-box", "device": "cpu-core"}, "unknown GPU"),
    ({"preset": "cpu-gloo", "ranks": 2, "device": "l4-24"}, "expected a cluster of GPUs"),
])
def test_another_gpu_is_refused_where_there_is_none(table: dict[str, str], problem: str) -> None:
    with pytest.raises(ScenarioError, match=rf"cluster\.device: {problem}"):
        scenario.Scenario(
            model={"preset": "gpt-tiny"}, batch={"micro_batch": 1}, cluster=table,
            strategy={"name": "fsdp2"},
        )


def test_the_presets_are_those_that_the_documentation_names() -> None:
    assert NAMES == (
        "a100-40-roce", "a100-80-4hdr", "a100-80-roce", "cpu-gloo", "dgx-a100", "dgx-a100-40",
        "dgx-b200", "dgx-h100", "dgx-h200", "grand-teton-h100", "hgx-a800", "hgx-h800", "p4d",
        "p4de", "p5", "pcie-box",
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_source_and_a_provenance(name: str) -> None:
    cluster = load_cluster(name)
    known = {"vendor sheet", "published", "source code", "measured", "calibrated", "assumed"}
    assert len(cluster.figures) == len({figure.key for figure in cluster.figures}) >= 27
    assert all(figure.source and figure.provenance in known for figure in cluster.figures)
    assert cluster.collectives in LIBRARIES
    assert 0 < cluster.device.matmul_efficiency <= 1
    assert 0 < cluster.device.memory_efficiency <= 1


def test_a_figure_shows_what_the_file_says() -> None:
    figures = {figure.key: figure for figure in load_cluster("dgx-h100").figures}
    assert figures["device.bfloat16"] == PresetFigure(
        key="device.bfloat16", text="989 TFLOP/s", provenance="vendor sheet",
        source="NVIDIA H100 data sheet, dense",
    )
    assert "data sheet 450 GB/s" in figures["links.fabric.bandwidth"].source


def test_a_cpu_host_has_as_many_devices_as_ranks() -> None:
    cluster = load_cluster("cpu-gloo", ranks=4)
    assert (cluster.num_ranks, cluster.devices_per_node, cluster.num_nodes) == (4, 4, 1)
    assert load_cluster("cpu-gloo", nodes=2, ranks=4).devices_per_node == 2
    assert load_cluster("cpu-gloo").num_ranks == 1


def test_a_part_of_a_node_can_be_used() -> None:
    assert load_cluster("dgx-h100", ranks=2).num_ranks == 2


def test_an_unknown_cluster_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(
        ScenarioError, match=r'^cluster.preset: unknown cluster "dgx-h10", did you mean dgx-h100\?$'
    ):
        load_cluster("dgx-h10")
    with pytest.raises(ScenarioError, match=r"`zsim list clusters` names them$"):
        load_cluster("%%%")


def test_more_ranks_than_devices_are_refused() -> None:
    message = "^cluster.ranks: expected 1 to 16, the devices of 2 × p4d, found 17$"
    with pytest.raises(ScenarioError, match=message):
        load_cluster("p4d", nodes=2, ranks=17)


@pytest.mark.parametrize("name", NAMES)
def test_nccl_runs_where_the_preset_says_what_its_model_asks(name: str) -> None:
    cluster = load_cluster(name)
    assert (cluster.nccl is not None) == (cluster.collectives == "nccl") == (cluster.kind == "cuda")


def test_an_h200_is_an_h100_with_another_memory():
    """Same NVLink, NICs and arithmetic; 141 GB at 4.8 TB/s."""
    older, newer = load_cluster("dgx-h100"), load_cluster("dgx-h200")
    assert newer.links == older.links
    assert newer.nics_per_node == older.nics_per_node
    assert newer.device.bfloat16 == older.device.bfloat16
    assert newer.device.memory > older.device.memory
    assert newer.device.memory_bandwidth > older.device.memory_bandwidth
