"""Memory outside torch's reserved bytes: NCCL's buffers by hand and as others have measured
them, and what is summed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from tests.support.cases.sampling import WHOLE
from tests.support.programs.small_programs import small_training
from zsim.cluster.cluster_presets import clusters, load_cluster
from zsim.cluster.collectives.nccl.buffers import (
    LL,
    LL128,
    NETWORK,
    READS,
    SIMPLE,
    WRITES,
    Ring,
    Wire,
    layout,
)
from zsim.ir.mesh import Mesh
from zsim.ir.program import Program
from zsim.memory.non_torch import (
    capacity,
    communicators,
    cublas_workspace,
    outside,
    runtime,
    total,
)
from zsim.scenario.plan import plan
from zsim.strategies import ddp, fsdp2, hsdp
from zsim.testing.strategies import scenarios

KIB, MIB, GIB = 2**10, 2**20, 2**30
CUDA = [name for name in clusters() if load_cluster(name).kind == "cuda"]


def in_a_node(cluster: str, members: int, rank: int = 0, *, reads: bool = False) -> Ring:
    gpu = runtime(load_cluster(cluster).device)
    return layout(
        load_cluster(cluster), tuple(range(members)), rank, channels=gpu.channels, reads=reads
    )


def fsdp(ranks: int) -> Program:
    return fsdp2.plan(small_training(), mesh=Mesh(dp_shard=ranks), options=fsdp2.Options())


def test_a_channels_buffers_are_4_mib_simple_512_kib_ll_and_4800_kib_ll128():
    assert (SIMPLE, LL, LL128) == (4 * MIB, 512 * KIB, 4800 * KIB)


def test_shared_buffers_are_rounded_to_2_mib_and_are_the_two_sizes_that_nccl_logs_on_h100():
    assert (WRITES.receive, WRITES.send) == (10_485_760, 2_097_152)
    assert Wire(receive=6 * MIB, send=6 * MIB) == READS
    assert Wire(receive=10 * MIB, send=10 * MIB) == NETWORK


def test_two_a100_hold_the_published_544_mib_and_the_first_of_four_688_with_the_eager_buffers_of_older_nccl():  # noqa: E501
    """NVIDIA nccl issue 964. Ring and trees leave 256 MiB both times. That NCCL connected
    everything at once, for 32 channels of 16 chunks of 512 KiB to send and to receive, as its
    source has it."""
    eager = 32 * 16 * 512 * KIB
    two, four = (in_a_node("dgx-a100", members, reads=True) for members in (2, 4))
    assert two.ring_bytes() + two.chain_bytes() + eager == 544 * MIB
    assert four.ring_bytes() + four.chain_bytes() + eager == 688 * MIB


def test_a_ring_in_a_node_takes_12_mib_a_channel_whoever_has_the_buffers():
    assert in_a_node("dgx-a100", 8, reads=True).ring_bytes() == 24 * 12 * MIB
    assert in_a_node("dgx-h100", 8).ring_bytes() == 24 * 12 * MIB
    assert in_a_node("dgx-b200", 8).ring_bytes() == 32 * 12 * MIB


def test_a_chain_runs_back_from_its_last_rank_to_its_first():
    chain = [in_a_node("dgx-h100", 3, rank).chain_bytes() for rank in range(3)]
    assert chain == [24 * 10 * MIB, 24 * 12 * MIB, 24 * 2 * MIB]


def test_between_nodes_there_are_two_channels_per_nic_and_each_rank_has_its_share_of_the_crossings():  # noqa: E501
    cluster = load_cluster("dgx-h100", nodes=4)
    ring = layout(cluster, tuple(range(32)), 9, channels=24, reads=False)
    assert (ring.channels, ring.members, ring.position) == (16, 8, 1)
    assert (ring.nodes, ring.crossing) == (4, 2)
    assert ring.ring_bytes() == 14 * 12 * MIB + 2 * 20 * MIB
    assert ring.tree_bytes() == 2 * 2 * 20 * MIB


def test_replicas_of_one_shard_on_each_node_have_two_channels_through_the_network():
    cluster = load_cluster("dgx-h100", nodes=2)
    ring = layout(cluster, (3, 11), 11, channels=24, reads=False)
    assert (ring.channels, ring.crossing, ring.ring_bytes(), ring.tree_bytes()) == (
        2, 2, 40 * MIB, 0,
    )
    assert (ring.chain_bytes(), ring.nvls_bytes(16)) == (0, 0)


def test_nvls_of_eight_h100_takes_256_mib():
    assert in_a_node("dgx-h100", 8).nvls_bytes(16) == 256 * MIB


def test_a_communicator_is_made_for_each_group_that_a_rank_talks_in_and_only_with_peers():
    groups = communicators(fsdp(4).of_rank(0), fsdp(4).mesh, rank=0)
    assert groups == {"dp_shard": frozenset({"all_gather", "reduce_scatter"})}
    assert communicators(fsdp(1).of_rank(0), fsdp(1).mesh, rank=0) == {}


def test_what_a_rank_of_fsdp2_holds_on_h100_is_named_figure_by_figure():
    items = outside(fsdp(8), load_cluster("dgx-h100"))
    assert [
        (item.name, item.nbytes, item.low, item.high, item.inside_reserved) for item in items
    ] == [
        ("CUDA context", 550 * MIB, 300 * MIB, 1024 * MIB, False),
        ("cuBLAS workspaces", 64 * MIB, 32 * MIB, 66 * MIB, True),
        ("NCCL ring, dp_shard", 288 * MIB, 144 * MIB, 576 * MIB, False),
    ]
    assert (total(items).low, total(items).nbytes, total(items).high) == (
        444 * MIB, 838 * MIB, 1600 * MIB,
    )


def test_network_buffers_may_be_there_only_where_a_communicator_spans_nodes():
    """NVIDIA nccl issue 2363: they belong to connections through the network, of which a
    communicator in a node has none."""
    cluster = load_cluster("dgx-h100", nodes=2)
    program = hsdp.plan(
        small_training(), mesh=Mesh(dp_replicate=2, dp_shard=8), options=hsdp.Options()
    )
    buffers = [
        (item.name, item.nbytes, item.low, item.high) for item in outside(program, cluster)
        if "network" in item.name
    ]
    assert buffers == [("NCCL shared network buffers, dp_replicate", 0, 0, 512 * MIB)]


def test_all_reduce_brings_nvls_on_hopper_and_trees_on_ampere():
    names = {}
    for cluster in ("dgx-a100", "dgx-h100"):
        program = ddp.plan(small_training(), mesh=Mesh(dp_replicate=8), options=ddp.Options())
        names[cluster] = {
            item.name: item.nbytes for item in outside(program, load_cluster(cluster), rank=1)
        }
    assert names["dgx-a100"]["NCCL trees, dp_replicate"] == 24 * 12 * MIB
    assert names["dgx-h100"]["NCCL NVLS, dp_replicate"] == 256 * MIB
    assert "NCCL trees, dp_replicate" not in names["dgx-h100"]
    assert "NCCL NVLS, dp_replicate" not in names["dgx-a100"]


def test_only_ampere_with_a_fabric_faster_than_pcie_reads_its_peers_memory():
    """NCCL p2p.cc: reads are for compute capability 8.0 over NVLink; whose buffers a chain takes
    depends on it."""
    cluster = load_cluster("dgx-a100")
    slow = replace(cluster, links=replace(cluster.links, fabric=cluster.links.pcie))
    program = ddp.plan(small_training(), mesh=Mesh(dp_replicate=8), options=ddp.Options())
    buffers = [
        {item.name: item.nbytes for item in outside(program, each)}["NCCL trees, dp_replicate"]
        for each in (cluster, slow)
    ]
    assert buffers == [
        in_a_node("dgx-a100", 8, reads=reads).chain_bytes() for reads in (True, False)
    ]
    assert buffers[0] != buffers[1]


def test_what_torch_does_not_reserve_on_two_a100_is_within_the_band():
    """meta-pytorch torchrec pull request 3580: used 6,753 MiB, reserved 5,964 MiB."""
    whole = total(outside(fsdp(2), load_cluster("dgx-a100", ranks=2)))
    assert whole.nbytes == 738 * MIB
    assert whole.low <= (6753 - 5964) * MIB <= whole.high


@pytest.mark.parametrize(("cluster", "nbytes"), [
    ("dgx-a100", 8_519_680), ("dgx-h100", 32 * MIB), ("dgx-b200", 32 * MIB),
    ("pcie-box", 8_519_680),
])
def test_a_workspace_of_cublas_is_32_mib_on_hopper_and_blackwell_and_8_mib_and_128_kib_else(
    cluster, nbytes
):
    assert cublas_workspace(load_cluster(cluster).device) == nbytes


def test_a_cpu_holds_nothing_besides():
    assert outside(fsdp(2), load_cluster("cpu-gloo", ranks=2)) == ()


@pytest.mark.parametrize("cluster", CUDA)
def test_every_gpu_of_the_presets_has_its_figures_with_sources_and_none_is_called_confirmed(
    cluster
):
    spec = load_cluster(cluster)
    memory = capacity(spec.device)
    assert memory.low <= memory.nbytes <= memory.high
    assert all(figure.source for figure in runtime(spec.device).figures)
    for item in outside(fsdp(2), spec):
        assert item.source
        assert not item.confirmed
        assert 0 <= item.low <= item.nbytes <= item.high


@WHOLE
@given(scenarios())
def test_every_scenario_on_gpus_has_a_band_that_holds_its_figure(case):
    program = plan(case, device="cuda")
    for rank in {0, case.mesh.world_size - 1}:
        items = outside(program, case.cluster, rank=rank)
        assert (items == ()) is (case.cluster.kind == "cpu")
        assert all(0 <= item.low <= item.nbytes <= item.high for item in (*items, total(items)))
        assert len({item.name for item in items}) == len(items)
