"""Rates of networks as people write them: numbers of ports, the rates of those, whose they are, and
words that contradict each other."""

from __future__ import annotations

from dataclasses import replace
from time import process_time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zsim.calibration.nccl_tests import network_rates
from zsim.calibration.nccl_tests.rows import NcclRow, mapped, predict
from zsim.calibration.rows.checks import Assumed
from zsim.calibration.rows.records import Record
from zsim.calibration.vocabulary.cluster import machine
from zsim.cluster.collectives.nccl.estimate import estimate


def row(inter: str, *, gpu: str = "H100") -> NcclRow:
    return NcclRow(
        collective="all_reduce", gpu=gpu, n_ranks=32, n_nodes=4, size_bytes=2**30, inter_node=inter
    )


@pytest.mark.parametrize(
    ("inter", "gb_s"),
    [
        *(
            ("8x NDR200", 200), ("NDR200 x8", 200), ("4x HDR100", 50), ("HDR100 x4", 50),
            ("HDR 100 x 4", 50), ("8 x HDR-100", 100),
        ),
        *(
            ("InfiniBand NDR200 (200 Gb/s) x 4", 100), ("8x NDR400", 400), ("8x HDR200", 200),
            ("8x EDR100", 100), ("4x XDR800", 400),
        ),
        *(
            ("8x NDR200 (1600 Gb/s per node)", 200), ("NDR200, 1600 Gb/s per node", 200),
            ("8x HDR (100 Gb/s)", 100),
        ),
        *(
            ("8x NDR (3200 Gb/s)", 400), ("HDR InfiniBand, 100 Gb/s per GPU", 100),
            ("NDR InfiniBand 1600 Gb/s per node", 200),
        ),
        *(
            ("1x NDR400 per GPU", 400), ("1x400G per GPU", 400), ("1 x 400 Gb/s per GPU", 400),
            ("1x HDR200/GPU", 200),
        ),
        *(
            ("2x200G per GPU", 400), ("8x (2x200G) RoCE", 400), ("8 x 2 x 200 Gb/s RoCE", 400),
            ("2x200Gb/s bonded RoCE per GPU", 400),
        ),
        *(("2x200G RoCE (bonded) per GPU", 400), ("8+1 x 400G", 400), ("dual HDR per node", 50)),
        *(
            ("EFA 3,200 Gbps", 400), ("IB 1,600 Gb/s per node", 200),
            ("RoCE 8x400 Gb/s, 3,200 Gb/s in all", 400),
        ),
        *(
            ("1 NDR per GPU", 400), ("1 x ConnectX-7 400 Gb/s per GPU", 400),
            ("1x 400 Gbps NDR per GPU", 400),
        ),
        ("2 x 100 Gbps EFA per GPU", 200),
        *(
            ("one HDR200 per 2 GPUs", 100), ("1x200Gb/s HDR per 2 GPUs", 100),
            ("one 400 Gbps NIC per GPU", 400),
        ),
        ("1 NDR400 NIC per 2 GPUs", 200),
        *(
            ("2 GPUs per NIC, NDR400", 200), ("1:1 GPU:NIC, NDR400", 400),
            ("1 NIC per GPU, NDR400", 400), ("4 NICs per node, HDR", 100),
        ),
        *(
            ("4 NICs of 200 Gbit/s", 100), ("8 NICs, 400 Gb/s each", 400), ("quad-rail HDR", 100),
            ("8x400G per node", 400),
        ),
        *(
            ("8x NDR400 per node", 400), ("8x 400 Gb/s per NIC", 400),
            ("8 NICs, 3200 Gb/s per node", 400), ("1x NDR400", 50),
        ),
    ],
)
def test_ports_are_as_many_as_fast_and_whose_the_words_say(inter: str, gb_s: float) -> None:
    assert network_rates.taken(inter, per_node=8) == network_rates.Taken(gb_s=gb_s)
    assert mapped(row(inter)).assumed == ()


@pytest.mark.parametrize(
    "words",
    ["100 GbE", "100 GbE TCP", "100 Gb/s Ethernet (TCP sockets)", "100Gbps ENA", "TCP 100 Gbps"],
)
def test_of_plain_ethernet_a_node_has_one_nic_however_it_is_spelled(words: str) -> None:
    assert (
        mapped(row(words)).communicator.bus_gb_s == mapped(row("TCP 1x100G")).communicator.bus_gb_s
    )
    table = {"gpu": "H100-80GB", "n_gpus": "16", "interconnect": f"NVLink 8/node; {words}"}
    found = machine(Record(1, table), Assumed())
    assert (found.nodes, found.nic_gb_s) == (2, pytest.approx(12.5 * 0.96 / 8, rel=0.05))


def test_thousands_are_told_from_lists() -> None:
    assert network_rates.without_thousands("EFA 3,200 Gbps, 8,192 ranks; 400, 800") == (
        "EFA 3200 Gbps, 8192 ranks; 400, 800"
    )


@pytest.mark.parametrize(("inter", "end"), [("400 Gbps", "high"), ("800 Gbps", "low")])
def test_what_torch_adds_is_in_the_other_reading_of_a_network_too(inter: str, end: str) -> None:
    """8.5 us for each collective that is called through torch, at the end of the band that is the
    other reading's."""
    direct = replace(row(inter), size_bytes=2**28)
    called = replace(direct, tool="all_reduce_bench.py (torch)")
    (other,) = mapped(direct).otherwise
    assert getattr(predict(direct), end) == getattr(estimate("all_reduce", 2**28, other), end)
    assert getattr(predict(called), end) == pytest.approx(getattr(predict(direct), end) + 8.5)


@pytest.mark.parametrize(
    ("inter", "gb_s", "other"),
    [("NDR200", 200, 25), ("HDR 100", 100, 12.5), ("2x200G per NIC", 400, 50)],
)
def test_what_is_nobodys_may_be_the_nodes_as_well(inter: str, gb_s: float, other: float) -> None:
    assert network_rates.taken(inter, per_node=8) == network_rates.Taken(gb_s=gb_s, other=other)


@pytest.mark.parametrize(
    ("inter", "gb_s", "instead", "words"),
    [
        ("NDR200 (400 Gb/s)", 200, 400, "NDR200 contradicts 400 Gbit/s: 200 Gbit/s, and the band "
                                        "covers 400"),
        ("8x NDR200 (400 Gb/s)", 200, 400, "NDR200 contradicts 400 Gbit/s: 1600 Gbit/s, and the "
                                           "band covers 3200"),
        ("8x NDR200 400 Gb/s", 400, 200, "NDR200 contradicts 400 Gbit/s: 3200 Gbit/s, and the "
                                         "band covers 1600"),
        ("NDR800 per GPU", 400, 800, "NDR800 contradicts 400 Gbit/s of a port of NDR: 400 "
                                     "Gbit/s, and the band covers 800"),
    ],
)
def test_a_name_whose_number_another_rate_contradicts_is_named_and_the_band_covers_both(
    inter: str, gb_s: float, instead: float, words: str
) -> None:
    found = network_rates.taken(inter, per_node=8)
    assert found is not None
    assert (found.gb_s, found.instead, found.assumed) == (gb_s, instead, (words,))
    taken, one, other = (
        predict(row(each))
        for each in (inter, f"IB {8 * gb_s} Gbps/node", f"IB {8 * instead} Gbps/node")
    )
    assert words in taken.assumed
    assert taken.microseconds == pytest.approx(one.microseconds, rel=1e-6)
    assert taken.low <= min(one.low, other.low)
    assert taken.high >= max(one.high, other.high)
    training, assumed = Record(1, {"gpu": "H100", "n_gpus": "16", "interconnect": inter}), Assumed()
    machine(training, assumed)
    assert words in assumed.words


@pytest.mark.parametrize(
    ("inter", "gb_s", "said"),
    [
        ("Slingshot-11 4x200", 100, "4x200 as 4 times 200"), ("8x400", 400, "8x400 as 8 times 400"),
        ("4x200", 100, "4x200 as 4 times 200"), ("32x100 EFA", 400, "32x100 as 32 times 100"),
        ("200 x 4", 100, "200 x 4 as 4 times 200"),
        ("Omni-Path 100 x4", 50, "100 x4 as 4 times 100"),
    ],
)
def test_a_rate_without_a_unit_is_one_that_ports_are_sold_with_and_named(
    inter: str, gb_s: float, said: str
) -> None:
    words = f"{said} Gbit/s, for the row has no unit"
    assert network_rates.taken(inter, per_node=8) == network_rates.Taken(
        gb_s=gb_s, assumed=(words,)
    )
    assert words in mapped(row(inter)).assumed
    assumed = Assumed()
    machine(Record(1, {"gpu": "H100", "n_gpus": "16", "interconnect": inter}), assumed)
    assert words in assumed.words


def test_a_node_alone_has_nothing_assumed_of_a_network_that_it_does_not_use() -> None:
    assumed, silent = Assumed(), Assumed()
    machine(
        Record(1, {"gpu": "H100 SXM 80GB", "n_gpus": "8", "interconnect": "NVLink; 8x400"}), assumed
    )
    machine(Record(1, {"gpu": "H100 SXM 80GB", "n_gpus": "8", "interconnect": "NVLink"}), silent)
    assert (assumed.words, assumed.widened) == (silent.words, silent.widened)


@pytest.mark.parametrize(
    "inter", ["8x40 GB", "4x4", "8x A100", "8x8", "2x8x400", "4x200 nodes", "4x Cassini", "v2 400"]
)
def test_what_is_no_rate_is_none(inter: str) -> None:
    assert network_rates.taken(inter, per_node=8) is None


def test_more_than_a_slot_carries_for_each_gpu_is_the_nodes() -> None:
    found = network_rates.taken("8x400G per GPU", per_node=8)
    assert found == network_rates.Taken(gb_s=400, assumed=("3200 Gbit/s as a node's, for no GPU "
                                                           "has a slot for them",))


PARTS = (
    *"01248x:(),/", "per", "GPU", "NIC", "NDR200", "HDR", "400", "Gb/s", "network", "each", "one",
    " ",
)


@given(words=st.lists(st.sampled_from(PARTS), max_size=12))
@example(words=["400 Gb/s per 0 GPU"])
@example(words=["HDR 0 Gb/s"])
@example(words=["0 GPUs per NIC, NDR400"])
@example(words=["8x NDR200 0 Gb/s"])
@example(words=["1 NIC per 0 GPU, NDR400"])
def test_no_words_make_it_raise_or_find_less_than_nothing(words: list[str]) -> None:
    for text in ("".join(words), " ".join(words)):
        found = network_rates.taken(text, per_node=8)
        assert found is None or found.gb_s >= 0


@pytest.mark.parametrize(
    "word",
    ["network ", "8x ", "NDR ", "400 G", "per ", "1 NIC of ", "4 x aa ", "9", "a-", "8 NDR ("],
)
def test_a_field_of_any_words_is_read_in_no_time(word: str) -> None:
    start = process_time()
    network_rates.taken(word * (20_000 // len(word)), per_node=8)
    assert process_time() - start < 2
