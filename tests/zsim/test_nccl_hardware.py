"""What nccl rows say of their machine: figures as programs write them, parts nobody has measured, links and networks in open words."""

from __future__ import annotations

import pytest

from tests.zsim.test_nccl_rows import GIB, LOG
from zsim.measurements.nccl_files import read_csv
from zsim.measurements.nccl_logs import read_text
from zsim.measurements.nccl_rows import NcclRow, Prediction, predict

COLUMNS = "collective,gpu,n_ranks,n_nodes,size_bytes,time_us\n"


@pytest.mark.parametrize("cells", ["8.0,1,1073741824", "8,1.0,1073741824", "8,1,1073741824.0", "8.00,1.,1073741824.000000"])
def test_a_whole_number_is_one_also_with_zeros_behind_its_point(cells: str) -> None:
    """As programs write a column that has a gap somewhere."""
    (row,) = read_csv(f"{COLUMNS}all_reduce,A100,{cells},8203.9\n", source="a.csv").rows
    assert (row.n_ranks, row.n_nodes, row.size_bytes) == (8, 1, GIB)


@pytest.mark.parametrize(
    ("cells", "name"), [("8.5,1,8", "n_ranks"), ("8,1.01,8", "n_nodes"), ("8,1,.0", "size_bytes"), ("8,1,8.0.0", "size_bytes")]
)
def test_a_part_of_a_rank_or_of_a_byte_is_refused(cells: str, name: str) -> None:
    found = read_csv(f"{COLUMNS}all_reduce,A100,{cells},8203.9\n", source="a.csv")
    assert found.reasons == {f"{name} missing or no whole number": 1}


def row(gpu: str = "H100", *, ranks: int = 8, nodes: int = 1, intra: str = "", inter: str = "") -> NcclRow:
    place = {"n_ranks": ranks, "n_nodes": nodes, "intra_node": intra, "inter_node": inter}
    return NcclRow(collective="all_reduce", gpu=gpu, size_bytes=GIB, **place)  # type: ignore[arg-type]


def check_wider(found: Prediction, known: Prediction) -> None:
    """The same time, with the band of what is assumed."""
    assert found.microseconds == known.microseconds
    assert found.provenance == "assumed"
    assert (found.low, found.high) == (pytest.approx(known.low / 1.5), pytest.approx(known.high * 1.5))


@pytest.mark.parametrize(
    ("gpu", "name", "like"),
    [
        *((name, name, "H200") for name in ("GH200", "H20")),
        *((name, name, "B200") for name in ("GB200", "GB300", "B300", "B100")),
        *(("NVIDIA GH200 480GB", "GH200", "H200"), ("NVIDIA GB200", "GB200", "B200"), ("NVIDIA B300 SXM6 AC", "B300", "B200")),
    ],
)
def test_a_part_that_nobody_has_measured_is_named_and_has_a_wider_band(gpu: str, name: str, like: str) -> None:
    found = predict(row(gpu))
    assert found.assumed == (f"{name} as {like}, for nobody has published its collectives",)
    check_wider(found, predict(row(like)))


def test_a_log_of_a_part_that_nobody_has_measured_is_named_as_well() -> None:
    for one in read_text(LOG.replace("NVIDIA H100 80GB HBM3", "NVIDIA GB200"), source="a").rows:
        assert predict(one).assumed == ("GB200 as B200, for nobody has published its collectives",)


@pytest.mark.parametrize("gpu", ["H100", "H200-SXM", "B200", "A100", "V100", "H800", "A800", "A100-SXM4-40GB", "H100 (GH100 die)"])
def test_a_part_that_has_been_measured_or_differs_in_its_links_alone_is_taken_as_it_is(gpu: str) -> None:
    assert predict(row(gpu)).assumed == ()


@pytest.mark.parametrize(("gpu", "name"), [("H100 PCIe", "H100"), ("A100-PCIE-40GB", "A100"), ("Tesla V100-PCIE-16GB", "V100")])
def test_a_card_whose_row_says_nvlink_is_named(gpu: str, name: str) -> None:
    found = predict(row(gpu, intra="NVLink/NVSwitch"))
    assert found.assumed == (f"a {name} on a PCIe card as one on SXM, for intra_node says NVLink",)
    check_wider(found, predict(row(name)))


def test_a_node_of_more_gpus_than_any_that_was_measured_is_named() -> None:
    (words,) = predict(row("H200", ranks=16)).assumed
    assert words == "a node of 16 H200 as one of 8 with longer rings, for nobody has published its times"
    assert predict(row("H200", ranks=16)).provenance == "assumed"
    assert predict(row("H200", ranks=32, nodes=2, inter="16x400G")).assumed == (words,)
    assert predict(row("H200", ranks=16, nodes=2, inter="8x400G")).assumed == ()
