"""Losses of kernels to collectives beside them, by hand: channels of the multiprocessors, bytes of
the memory's bandwidth."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.cluster.cluster_presets import load_cluster
from zsim.cluster.collectives.nccl import estimate
from zsim.cluster.collectives.nccl.estimate import Communicator
from zsim.cluster.collectives.nccl.placed import communicator
from zsim.cluster.devices import Device, load_device
from zsim.cluster.links import Generation
from zsim.engine.costs.interference import (
    FAIR_SHARE,
    LARGEST_SHARE,
    DeviceShare,
    KernelLoss,
    device_share,
    lost_share,
    remaining,
)
from zsim.engine.costs.op_costs import Costs, kernel_time
from zsim.engine.execution import EAGER, Execution
from zsim.ir.ops import Kernel

H100, A100 = load_device("h100-80"), load_device("a100-80")
PRODUCT = Kernel("linear", 2 * 8192**3, 3 * 2 * 8192**2, "bfloat16", shape=(1, 8192, 8192, 8192))
STREAM = Kernel("add", 0, 2**32, "bfloat16")
MIB = 2**20
NOTHING = KernelLoss(0.0, 0.0)


def lost(kernel: Kernel, device: Device, execution: Execution, share: DeviceShare) -> float:
    """The share of its time that `kernel` loses to a collective that takes `share` of `device`."""
    return lost_share(kernel, device, execution, remaining(device, share))


def test_an_all_gather_has_its_channels_and_passes_what_it_brings_through_a_buffer() -> None:
    share = device_share(
        "all_gather", 2**30, ranks=8, ns=3_000_000, channels=24, in_the_switch=False, device=H100
    )
    rate = 3 * 2**30 * 7 / 8 / 3e-3
    assert share.multiprocessors == 24 / 132
    assert share.bandwidth == pytest.approx(rate / (H100.memory_bandwidth * H100.memory_efficiency))


@pytest.mark.parametrize(
    ("kind", "switch", "moved"),
    [
        ("reduce_scatter", False, 3 * 7 / 8), ("all_reduce", False, 6 * 7 / 8),
        ("all_reduce", True, 2), ("broadcast", False, 3 * 7 / 8),
    ],
)
def test_each_collective_moves_its_own_share_through_memory(
    kind: str, switch: bool, moved: float
) -> None:
    share = device_share(
        kind, 2**30, ranks=8, ns=10**7, channels=24, in_the_switch=switch, device=A100
    )
    assert share.bandwidth == pytest.approx(
        moved * 2**30 / 1e-2 / (A100.memory_bandwidth * A100.memory_efficiency)
    )


def test_a_product_of_one_wave_needs_two_beside_an_all_gather() -> None:
    """Measured on an H100: 132 tiles beside 24 channels fall from 80 to 47 % of the peak
    (forums.developer.nvidia.com, thread 337991). No constant was fitted to it."""
    m, n, k = 11 * 128, 12 * 256, 8192
    product = Kernel("linear", 2 * m * n * k, 2 * (m * k + n * k + m * n), "bfloat16",
                     shape=(1, m, n, k))
    slower = 1 / (1 - lost(product, H100, EAGER, DeviceShare(24 / 132, 0.0)))
    assert slower == pytest.approx(80 / 47, rel=0.08)


def test_a_small_message_opens_few_channels_and_nothing_takes_all() -> None:
    assert (
        device_share(
            "all_gather", 3 * 2**15, ranks=8, ns=10**5, channels=24, in_the_switch=False,
            device=H100,
        ).multiprocessors
        == 3 / 132
    )
    assert (
        device_share(
            "all_gather", 1, ranks=8, ns=10**5, channels=24, in_the_switch=False, device=H100
        ).multiprocessors
        == 1 / 132
    )
    assert (
        device_share(
            "all_reduce", 2**40, ranks=8, ns=1, channels=24, in_the_switch=False, device=H100
        ).bandwidth
        == FAIR_SHARE
    )


def test_a_product_loses_the_multiprocessors_and_a_stream_the_bandwidth() -> None:
    """24 of 108 multiprocessors make a large product that much longer; half of the bandwidth makes
    a stream twice as long."""
    both = DeviceShare(24 / 108, 0.5)
    assert lost(PRODUCT, A100, EAGER, both) == pytest.approx(24 / 108, abs=0.02)
    assert lost(STREAM, A100, EAGER, both) == pytest.approx(0.5, abs=0.01)
    assert lost(STREAM, A100, EAGER, DeviceShare(24 / 108, 0.0)) == 0
    assert lost(replace(STREAM, location="link"), A100, EAGER, DeviceShare(0.5, 0.5)) == 0


def test_a_product_of_eight_bits_loses_as_many_multiprocessors_as_others() -> None:
    """And one of many tiles as much of its time, but for its last wave and for what casts it."""
    large = Kernel("linear", 2 * 16384**3, 1, "bfloat16", shape=(1, 16384, 16384, 16384))
    for how in (EAGER, Execution(float8=True, compile=True)):
        assert lost(large, H100, how, DeviceShare(33 / 132, 0.0)) == pytest.approx(0.25, abs=0.015)


def test_attention_loses_the_share_of_the_multiprocessors() -> None:
    attention = Kernel(
        "attention", 4 * 64 * 4096 * 4096 * 64, 1, "bfloat16", shape=(64, 4096, 4096, 64)
    )
    for name in H100.attention:
        how, quarter = Execution(attention_kernels=name), DeviceShare(33 / 132, 0.0)  # type: ignore[arg-type]
        assert lost(attention, H100, how, quarter) == pytest.approx(0.25, abs=0.002)


def test_a_product_of_as_many_tiles_as_multiprocessors_takes_another_wave_beside_a_collective() -> (
    None
):
    """1,536 × 1,408 is 66 of the largest tiles and 132 of the next, one wave on an H100's 132
    multiprocessors. On 108 of them a second wave is needed."""
    kernel = Kernel("linear", 0, 0, "bfloat16", shape=(1, 1536, 1408, 8192))
    device = replace(H100, wave_cost=1.0)
    left = remaining(device, DeviceShare(24 / 132, 0.0))
    longer = kernel_time.product_s(kernel.shape, left, "bfloat16") / kernel_time.product_s(
        kernel.shape, device, "bfloat16"
    )
    assert longer > 1.5
    assert lost(kernel, device, EAGER, DeviceShare(24 / 132, 0.0)) == pytest.approx(
        1 - 1 / longer, abs=0.02
    )


SHARES = st.floats(0, LARGEST_SHARE)


@given(sms=SHARES, more=SHARES, bandwidth=SHARES, kernel=st.sampled_from([PRODUCT, STREAM]))
def test_nothing_is_gained_beside_a_collective_and_never_all_is_lost(
    sms: float, more: float, bandwidth: float, kernel: Kernel
) -> None:
    loss = lost(kernel, H100, EAGER, DeviceShare(sms, bandwidth))
    assert 0 <= loss < 1
    assert lost(kernel, H100, EAGER, DeviceShare(sms, max(bandwidth, more))) >= loss


def test_a_collective_over_a_network_takes_less_from_streams_and_has_fewer_channels() -> None:
    inside, across = Costs(load_cluster("dgx-a100")), Costs(load_cluster("dgx-a100", nodes=4))
    near, far = tuple(range(8)), tuple(range(32))
    of_stream = [
        costs.kernel_loss((STREAM,), "all_gather", 512 * MIB, ranks).moving
        for costs, ranks in ((inside, near), (across, far))
    ]
    of_product = [
        costs.kernel_loss((PRODUCT,), "all_gather", 512 * MIB, ranks).moving
        for costs, ranks in ((inside, near), (across, far))
    ]
    assert 0.3 < of_stream[0] < 0.45  # three passes of 240 GB/s in 1,650
    assert of_stream[1] < of_stream[0]
    assert of_product == [pytest.approx(24 / 108, abs=0.02), pytest.approx(16 / 108, abs=0.02)]


@pytest.mark.parametrize(
    ("generation", "nics", "expected"),
    [
        *(("ampere", nics, channels) for nics, channels in ((8, 16), (4, 8), (1, 2))),
        *(
            (newer, nics, channels)
            for newer in ("hopper", "blackwell")
            for nics, channels in ((8, 16), (4, 16), (2, 8), (1, 4))
        ),
    ],
)
def test_between_nodes_each_nic_has_its_channels(
    generation: Generation, nics: int, expected: int
) -> None:
    group = Communicator(
        generation=generation, num_ranks=32, num_nodes=4, bus_gb_s=100.0, nics=nics
    )
    assert estimate.channels(group, "ring") == expected


def test_a_group_of_one_rank_a_node_has_the_channels_of_its_own_nic() -> None:
    """HSDP's replicas: one GPU of each node, and an eighth of the NICs."""
    cluster = load_cluster("dgx-h100", nodes=4)
    groups = [
        communicator(cluster, cluster.path(ranks))
        for ranks in (tuple(range(32)), tuple(range(0, 32, 8)))
    ]
    assert [group.nics for group in groups] == [8, 1]
    shared = load_cluster("p4d", nodes=4)
    assert communicator(shared, shared.path(tuple(range(32)))).nics == 4


def test_to_a_collective_that_waits_products_lose_its_channels_and_streams_nothing() -> None:
    costs, ranks = Costs(load_cluster("dgx-a100")), tuple(range(8))
    product, stream = (
        costs.kernel_loss((kernel,), "all_gather", 512 * MIB, ranks) for kernel in (PRODUCT, STREAM)
    )
    assert product.waiting == product.moving == pytest.approx(24 / 108, abs=0.02)
    assert stream.waiting == 0
    assert stream.at(0.5) == stream.moving / 2


def test_the_switch_takes_fewer_multiprocessors_than_a_ring() -> None:
    costs, ranks = Costs(load_cluster("dgx-h100")), tuple(range(8))
    in_switch, ring = (
        costs.kernel_loss((PRODUCT,), kind, 512 * MIB, ranks).moving
        for kind in ("all_reduce", "all_gather")
    )
    assert in_switch == pytest.approx(16 / 132, abs=0.02)
    assert ring == pytest.approx(24 / 132, abs=0.02)


def test_products_lose_on_average_what_was_published_for_them() -> None:
    """arXiv 2507.03114: 18.9 % slower on average over A100, H100, MI250 and MI210."""
    shares = []
    for name in ("dgx-a100", "dgx-h100"):
        costs = Costs(load_cluster(name))
        shares += [
            1 / (1 - costs.kernel_loss((PRODUCT,), kind, 256 * MIB, tuple(range(8))).moving) - 1
            for kind in ("all_gather", "all_reduce")
        ]
    assert 0.12 < sum(shares) / len(shares) < 0.27


def test_what_is_lost_is_switched_off_and_nothing_is_lost_alone() -> None:
    off = Costs(load_cluster("dgx-h100"), Execution(interference=False))
    assert off.kernel_loss((PRODUCT,), "all_gather", 512 * MIB, tuple(range(8))) == NOTHING
    alone = Costs(load_cluster("dgx-h100"))
    assert alone.kernel_loss((PRODUCT,), "all_gather", 512 * MIB, (0,)) == NOTHING
    assert (
        Costs(load_cluster("cpu-gloo", ranks=4)).kernel_loss(
            (PRODUCT,), "all_gather", 512 * MIB, (0, 1, 2, 3)
        )
        == NOTHING
    )


def test_a_library_that_is_not_nccl_holds_as_many_multiprocessors_as_a_ring_of_an_h100() -> None:
    cluster = load_cluster("dgx-h100")
    ring = Costs(replace(cluster, collectives="ring"))
    held = device_share(
        "all_gather", 512 * MIB, ranks=8, ns=1, channels=24, in_the_switch=False,
        device=cluster.device,
    ).multiprocessors
    waits = lost(PRODUCT, cluster.device, EAGER, DeviceShare(held, 0.0))
    loss = ring.kernel_loss((PRODUCT,), "all_gather", 512 * MIB, tuple(range(8)))
    assert loss.waiting == pytest.approx(cluster.device.interference * waits)
    assert waits > 0.1
