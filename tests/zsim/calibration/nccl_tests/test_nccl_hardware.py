"""What nccl rows say of their machine: figures as programs write them, parts nobody has measured,
links and networks in open words."""

from __future__ import annotations

import pytest

from tests.zsim.calibration.nccl_tests.test_nccl_rows import GIB, LOG, published
from zsim.calibration.nccl_tests import network_rates
from zsim.calibration.nccl_tests.files import read_csv
from zsim.calibration.nccl_tests.rows import NcclRow, Prediction, mapped, predict
from zsim.calibration.nccl_tests.text_logs import read_text
from zsim.cluster.cluster import load_cluster
from zsim.cluster.collectives import estimated

COLUMNS = "collective,gpu,n_ranks,n_nodes,size_bytes,time_us\n"


@pytest.mark.parametrize(
    "cells",
    ["8.0,1,1073741824", "8,1.0,1073741824", "8,1,1073741824.0", "8.00,1.,1073741824.000000"],
)
def test_a_whole_number_is_one_also_with_zeros_behind_its_point(cells: str) -> None:
    """As programs write a column that has a gap somewhere."""
    (row,) = read_csv(f"{COLUMNS}all_reduce,A100,{cells},8203.9\n", source="a.csv").rows
    assert (row.n_ranks, row.n_nodes, row.size_bytes) == (8, 1, GIB)


@pytest.mark.parametrize(
    ("cells", "name"),
    [
        ("8.5,1,8", "n_ranks"), ("8,1.01,8", "n_nodes"), ("8,1,.0", "size_bytes"),
        ("8,1,8.0.0", "size_bytes"),
    ],
)
def test_a_part_of_a_rank_or_of_a_byte_is_refused(cells: str, name: str) -> None:
    found = read_csv(f"{COLUMNS}all_reduce,A100,{cells},8203.9\n", source="a.csv")
    assert found.reasons == {f"{name} missing or no whole number": 1}


def row(
    gpu: str = "H100", *, ranks: int = 8, nodes: int = 1, intra: str = "", inter: str = ""
) -> NcclRow:
    place = {"n_ranks": ranks, "n_nodes": nodes, "intra_node": intra, "inter_node": inter}
    return NcclRow(collective="all_reduce", gpu=gpu, size_bytes=GIB, **place)  # type: ignore[arg-type]


def check_wider(found: Prediction, known: Prediction) -> None:
    """The same time, with the band of what is assumed."""
    assert found.microseconds == known.microseconds
    assert found.provenance == "assumed"
    assert (found.low, found.high) == (
        pytest.approx(known.low / 1.5), pytest.approx(known.high * 1.5),
    )


@pytest.mark.parametrize(
    ("gpu", "name", "like"),
    [
        *((name, name, "H200") for name in ("GH200", "H20")),
        *((name, name, "B200") for name in ("GB200", "GB300", "B300", "B100")),
        *(
            ("NVIDIA GH200 480GB", "GH200", "H200"), ("NVIDIA GB200", "GB200", "B200"),
            ("NVIDIA B300 SXM6 AC", "B300", "B200"),
        ),
    ],
)
def test_a_part_that_nobody_has_measured_is_named_and_has_a_wider_band(
    gpu: str, name: str, like: str
) -> None:
    found = predict(row(gpu))
    assert found.assumed == (f"{name} as {like}, for nobody has published its collectives",)
    check_wider(found, predict(row(like)))


def test_a_log_of_a_part_that_nobody_has_measured_is_named_as_well() -> None:
    for one in read_text(LOG.replace("NVIDIA H100 80GB HBM3", "NVIDIA GB200"), source="a").rows:
        assert predict(one).assumed == ("GB200 as B200, for nobody has published its collectives",)


@pytest.mark.parametrize(
    "gpu",
    [
        "H100", "H200-SXM", "B200", "A100", "V100", "H800", "A800", "A100-SXM4-40GB",
        "H100 (GH100 die)",
    ],
)
def test_a_part_that_has_been_measured_or_differs_in_its_links_alone_is_taken_as_it_is(
    gpu: str
) -> None:
    assert predict(row(gpu)).assumed == ()


@pytest.mark.parametrize(
    ("gpu", "name"),
    [("H100 PCIe", "H100"), ("A100-PCIE-40GB", "A100"), ("Tesla V100-PCIE-16GB", "V100")],
)
def test_a_card_whose_row_says_nvlink_is_named(gpu: str, name: str) -> None:
    found = predict(row(gpu, intra="NVLink/NVSwitch"))
    assert found.assumed == (f"{name} on a PCIe card as one on SXM, for intra_node says NVLink",)
    check_wider(found, predict(row(name)))


def test_a_node_of_more_gpus_than_any_that_was_measured_is_named() -> None:
    (words,) = predict(row("H200", ranks=16)).assumed
    assert words == (
        "a node of 16 H200 as one of 8 with longer rings, for nobody has published its times"
    )
    assert predict(row("H200", ranks=16)).provenance == "assumed"
    assert predict(row("H200", ranks=32, nodes=2, inter="16x400G")).assumed == (words,)
    assert predict(row("H200", ranks=16, nodes=2, inter="8x400G")).assumed == ()


@pytest.mark.parametrize(
    "intra",
    [
        *(
            "NVLink/NVSwitch", "NVLink3/NVSwitch", "NVLink", "NVSwitch", "NVLink 4.0",
            "NVLink Gen4", "4th gen NVLink",
        ),
        *("NV18", "NVLS", "nvlink4"),
        *(
            "18x NVLink 900 GB/s", "900 GB/s bidirectional per GPU, 18 links",
            "HGX, NVLink + NVSwitch", "NVLink (SXM5)",
        ),
        *(
            "NVLink P2P", "unknown", "", "NCCL_DEBUG=INFO NVLink", "NVLink, P2P enabled",
            "SHM enabled, NVLink", "NVLink v4", "n/a",
        ),
    ],
)
def test_what_is_understood_of_the_links_of_a_node_changes_nothing(intra: str) -> None:
    assert predict(row(intra=intra)) == predict(row())


@pytest.mark.parametrize(
    "intra",
    ["xGMI", "none", "Infinity Fabric", "NVLink over a riser", "no NVSwitch, NVLink", "PHB"],
)
def test_words_of_links_that_are_not_understood_are_named_and_widen_the_band(intra: str) -> None:
    found = predict(row(intra=intra))
    assert found.assumed == (f"intra_node {intra!r} changes nothing: it is not understood",)
    check_wider(found, predict(row()))


@pytest.mark.parametrize("intra", ["xGMI", "none", "SHM"])
def test_links_of_a_node_say_nothing_of_nodes_with_one_gpu_each(intra: str) -> None:
    assert predict(row(ranks=4, nodes=4, intra=intra, inter="1x NDR400")) == predict(
        row(ranks=4, nodes=4, inter="1x NDR400")
    )


@pytest.mark.parametrize(
    ("intra", "reason"),
    [
        ("P2P disabled", "intra_node: 'P2P disabled': no model of it"),
        ("NVLink, no P2P", "intra_node: 'no P2P': no model of it"),
        ("SHM", "intra_node: 'SHM': no model of it"),
        ("shared memory", "intra_node: 'shared memory': no model of it"),
        ("SHM disabled", "intra_node: 'SHM disabled': no model of it"),
        ("NCCL_P2P_DISABLE=1", "NCCL_P2P_DISABLE=1: no model of it"),
        ("NVLink NCCL_SHM_DISABLE=1", "NCCL_SHM_DISABLE=1: no model of it"),
        ("NVLink, NCCL_ALGO=Tree", "NCCL_ALGO=Tree: no model of it"),
    ],
)
def test_links_of_a_node_that_are_not_used_directly_are_skipped_by_name(
    intra: str, reason: str
) -> None:
    found = read_csv(
        f'{COLUMNS.strip()},intra_node\nall_reduce,H100,8,1,{GIB},50000,"{intra}"\n', source="a.csv"
    )
    assert (found.rows, found.reasons) == ((), {reason: 1})


@pytest.mark.parametrize(
    "intra",
    [
        "no NVLink", "without NVLink", "NVLink disabled", "PCIe Gen5 x16", "PCIe, no NVLink",
        "PCIe 5.0",
    ],
)
def test_gpus_without_nvlink_are_joined_by_pcie(intra: str) -> None:
    found = predict(row(intra=intra))
    assert found == predict(row(intra="PCIe"))
    assert found.assumed == ("20 GB/s for a ring over PCIe",)


def test_bridges_join_pairs_and_larger_rings_cross_pcie() -> None:
    pair, eight = predict(row(ranks=2, intra="NVLink bridge")), predict(row(intra="NVLink bridge"))
    assert pair.assumed == ("NVLink's full rate over a bridge",)
    check_wider(pair, predict(row(ranks=2)))
    assert eight.assumed == (
        "rings over PCIe between the pairs that bridges join", "20 GB/s for a ring over PCIe",
    )
    assert eight.microseconds == predict(row(intra="PCIe")).microseconds


def test_a_switch_that_is_off_by_the_words_of_the_links_does_not_reduce() -> None:
    assert {
        predict(row(intra=intra)).algorithm
        for intra in ("NVLink, no NVLS", "NVLink NCCL_NVLS_ENABLE=0")
    } == {"ring"}


def test_words_of_every_published_node_are_understood() -> None:
    for one in published():
        assert not any(
            "intra_node" in words or "published" in words for words in mapped(one).assumed
        )


def of_gpus(said: str) -> str:
    return (
        f"{said} for each of 8 GPUs; the band covers {said} for the whole node, which its words "
        f"may mean as well"
    )


def of_node(said: str) -> str:
    return (
        f"{said} for the whole node; the band covers {said} for each of 8 GPUs, which its words "
        f"may mean as well"
    )


@pytest.mark.parametrize(
    ("gpu", "inter", "words", "taken", "also"),
    [
        ("H100", "TCP 100G", of_node("100 Gbit/s"), "TCP 1x100G", "TCP 8x100G"),
        ("A100", "TCP/IP 100 Gbps", of_node("100 Gbit/s"), "TCP 1x100G", "TCP 8x100G"),
        ("H100", "100Gbps ENA", of_node("100 Gbit/s"), "TCP 1x100G", "TCP 8x100G"),
        ("H100", "RoCE 100G", of_gpus("100 Gbit/s"), "RoCE 8x100G", "RoCE 1x100G"),
        ("H100", "400 Gbps", of_gpus("400 Gbit/s"), "8x400G", "1x400G"),
        ("A100", "400 Gbps", of_node("400 Gbit/s"), "1x400G", "8x400G"),
        ("H100", "50 GB/s", of_gpus("400 Gbit/s"), "8x400G", "1x400G"),
        ("A100", "50 GB/s", of_node("400 Gbit/s"), "1x400G", "8x400G"),
        ("H100", "HDR", of_gpus("200 Gbit/s"), "8x HDR", "1x HDR"),
        (
            "H100", "InfiniBand NDR 400", of_gpus("400 Gbit/s"), "InfiniBand 8x NDR",
            "InfiniBand 1x NDR",
        ),
        ("H100", "EFA 100Gbps", of_gpus("100 Gbit/s"), "EFA 8x100G", "EFA 1x100G"),
    ],
)
def test_a_network_that_may_be_each_gpu_s_or_the_node_s_says_so_and_its_band_covers_both(
    gpu: str, inter: str, words: str, taken: str, also: str
) -> None:
    found, plain, other = (
        predict(row(gpu, ranks=32, nodes=4, inter=each)) for each in (inter, taken, also)
    )
    assert found.assumed == (words,)
    assert (plain.assumed, other.assumed) == ((), ())
    assert found.microseconds == plain.microseconds
    assert found.low == pytest.approx(min(plain.low / 1.5, other.low))
    assert found.high == pytest.approx(max(plain.high * 1.5, other.high))
    assert found.provenance == "assumed"


@pytest.mark.parametrize(
    ("inter", "gb_s"),
    [
        *(
            ("HDR per node", 25), ("HDR InfiniBand per GPU", 200), ("NDR400/NIC", 400),
            ("NDR 400G per node", 50), ("1x HDR IB", 25),
        ),
        *(
            ("400 Gb/s per port", 400), ("100 Gbps/HCA, RoCE", 100), ("400 Gb/s per node", 50),
            ("8x50 GB/s", 400), ("RoCE 3200 Gbps", 400),
        ),
        *(("EFA 400 Gbps", 400), ("EFA 3200 Gbps/node", 400), ("NDR400 x 8", 400)),
    ],
)
def test_a_network_whose_words_say_whose_it_is_has_nothing_assumed(inter: str, gb_s: float) -> None:
    assert network_rates.node_gb_s(inter, per_node=8) == gb_s
    found = mapped(row(ranks=32, nodes=4, inter=inter))
    assert (found.assumed, found.otherwise) == ((), ())


def test_a_network_of_nodes_with_one_gpu_each_is_its_gpu_s() -> None:
    assert predict(row(ranks=4, nodes=4, inter="RoCE 100G")).assumed == ()


def test_other_jobs_leave_less_of_either_network() -> None:
    found = predict(row(ranks=32, nodes=4, inter="RoCE 100G, shared"))
    slower = predict(row(ranks=32, nodes=4, inter="RoCE 1x100G, shared"))
    assert (
        found.high
        > slower.microseconds
        > predict(row(ranks=32, nodes=4, inter="RoCE 1x100G")).microseconds
    )


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather"])
@pytest.mark.parametrize(("gpu", "preset"), [("H800", "hgx-h800"), ("H100", "dgx-h100")])
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_row_takes_as_long_as_the_same_collective_on_the_preset(
    collective: str, gpu: str, preset: str, nodes: int
) -> None:
    """An H800 has fewer NVLinks: what NCCL does within its nodes holds up the switch's trees
    between them too."""
    one = NcclRow(
        collective=collective, gpu=gpu, n_ranks=8 * nodes, n_nodes=nodes, size_bytes=2**30,
        inter_node="IB 8x400G" if nodes > 1 else "",
    )
    expected = estimated(
        collective, 2**30, cluster=load_cluster(preset, nodes=nodes), ranks=tuple(range(8 * nodes))
    )
    assert predict(one).microseconds == pytest.approx(expected.microseconds)
