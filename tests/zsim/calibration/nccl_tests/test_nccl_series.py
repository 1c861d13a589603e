"""Rows of one series are held to one another: a wrong unit refuses all of it, with counts, and
published series are all kept."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.zsim.calibration.nccl_tests.test_nccl_rows import FILES, LOG, PUBLISHED, report
from zsim.calibration.nccl_tests.checks import Rows
from zsim.calibration.nccl_tests.files import read, read_any

COLUMNS = "collective,gpu,n_ranks,n_nodes,size_bytes,time_us,intra_node,notes\n"
KIB, MIB = 2**10, 2**20
SIZES = [MIB << power for power in range(10)]
FASTER = "faster than its links: a time in another unit, or a size of another message"
LIKELY = (
    "a size of one rank's part, of elements, or a time in another unit; if the link is that slow, "
    "give busbw or algbw too"
)


def us(nbytes: int, *, gb_s: float = 350.0, latency: float = 30.0) -> float:
    """What an all-gather of 8 H100 takes about."""
    return latency + 7 / 8 * nbytes / gb_s / 1000


def table(
    *,
    size: Callable[[int], float] = float,
    time: Callable[[float], float] = float,
    sizes: list[int] = SIZES,
    more: str = ",,",
    nodes: int = 1,
) -> Rows:
    rows = [
        f"all_gather,H100,{8 * nodes},{nodes},{int(size(nbytes))},{time(us(nbytes))!r}{more}\n"
        for nbytes in sizes
    ]
    return read_any(COLUMNS + "".join(rows), source="a.csv")


def sweep(change: Callable[[dict[str, str]], dict[str, object]]) -> Rows:
    """The published sweep of 8 H100 with a column changed."""
    with (PUBLISHED / "nccl_h100_sweep.csv").open(newline="") as file:
        rows = [{**row, **change(row)} for row in csv.DictReader(file)]
    text = (
        "\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]) + "\n"
    )
    return read_any(text, source="a.csv")


@pytest.mark.parametrize(
    ("column", "factor"),
    [
        *(("time_us", factor) for factor in (1000, 1e-3, 1e-6, 8)),
        *(("size_bytes", factor) for factor in (1 / MIB, 1 / KIB, 1 / 4, 1 / 8)),
    ],
)
def test_no_row_of_a_published_sweep_in_another_unit_is_used(column: str, factor: float) -> None:
    """Nanoseconds, milliseconds, seconds, another factor; MiB, KiB, elements of four bytes, bytes
    of one rank."""

    def change(row: dict[str, str]) -> dict[str, object]:
        value = float(row[column]) * factor
        return {column: max(1, round(value)) if column == "size_bytes" else value}

    assert len(sweep(lambda _: {}).rows) == 33
    found = sweep(change)
    assert (found.rows, sum(found.reasons.values())) == ((), 33)


def test_the_rest_of_a_series_is_refused_with_counts_where_a_fifth_of_it_is_impossible() -> None:
    """4 MiB in 4.05 us come to 906 GB/s, 2 MiB to 520."""
    found = table(time=lambda value: value / 10)
    assert (found.rows, found.reasons) == ((), {FASTER: 8, f"as 8 of the 10 rows of its series, "
                                                           f"{FASTER}": 2})
    assert [skip.line for skip in found.skipped] == list(range(2, 12))


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("factor", [1e-3, 1e-6, 1e3])
def test_small_messages_in_another_unit_are_refused_by_what_a_collective_takes(
    nodes: int, factor: float
) -> None:
    """Too small for links to matter: milliseconds, seconds, nanoseconds. Each row by itself,
    whatever is noted of it."""
    found = table(
        sizes=[8 << power for power in range(12)], time=lambda value: factor * value, nodes=nodes
    )
    assert not found.rows
    assert all("a time in another unit" in skip.reason for skip in found.skipped)
    assert len(table(sizes=[8 << power for power in range(12)], nodes=nodes).rows) == 12


def test_what_is_slow_and_says_so_twice_is_believed() -> None:
    """A network that fell back to something slow: its bandwidth agrees with its times."""
    header = COLUMNS.replace("time_us", "time_us,busbw_gb_s")
    rows = [f"all_gather,H100,16,2,{size},{size / 1000},{15 / 16:.4f},,\n" for size in SIZES]
    assert len(read_any(header + "".join(rows), source="a.csv").rows) == len(SIZES)


def test_one_impossible_row_is_refused_alone() -> None:
    found = read_any(
        COLUMNS + f"all_gather,H100,8,1,{MIB},{us(MIB)},,\nall_gather,H100,8,1,{512 * MIB},50,,\n",
        source="a.csv",
    )
    assert (len(found.rows), found.reasons) == (1, {FASTER: 1})


def test_a_few_of_many_rows_leave_the_others() -> None:
    good = "".join(f"all_gather,H100,8,1,{size},{us(size)},,\n" for size in SIZES)
    bad = f"all_gather,H100,8,1,{512 * MIB},50,,\n" * 2
    assert len(read_any(COLUMNS + good + bad, source="a.csv").rows) == 10
    assert len(read_any(COLUMNS + good + bad + bad, source="a.csv").rows) == 0


def test_a_log_whose_times_and_bandwidths_are_off_alike_is_refused_whole() -> None:
    """1 and 2 GiB in 1 and 2 ms have a bus bandwidth that no H100 has; 64 KiB in 20 us could be."""
    lines = [
        "  1073741824     268435456     float     sum      -1  1000.00 1073.74 1073.74       0  "
        "1000.00 1073.74 1073.74       0",
        "  2147483648     536870912     float     sum      -1  2000.00 1073.74 1073.74       0  "
        "2000.00 1073.74 1073.74       0",
        "       65536         16384     float     sum      -1    20.00    3.28    3.28       0   "
        " 20.00    3.28    3.28       0",
    ]
    before = LOG[: LOG.index("  1073741824")]
    found = read_any(
        before + "\n".join(lines) + LOG[LOG.index("\n# Out of bounds") :], source="run.log"
    )
    assert (found.rows, found.reasons) == ((), {FASTER: 2, f"as 2 of the 3 rows of its series, "
                                                           f"{FASTER}": 1})


def test_json_is_held_to_the_same() -> None:
    whole = report()
    good = {"size": 65536, "count": 16384, "type": "float", "experiment_name": "all_reduce_perf"}
    fast = {
        **good, "size": 2**30, "count": 2**28,
        "out_of_place": {"time": 100.0, "alg_bw": 10737.4, "bus_bw": 16106.1},
    }
    whole["results"] = [
        {**good, "out_of_place": {"time": 40.0, "alg_bw": 1.64, "bus_bw": 2.46}}, fast, fast
    ]
    found = read_any(json.dumps(whole), source="run.json")
    assert (found.rows, found.reasons) == ((), {FASTER: 2, f"as 2 of the 3 rows of its series, "
                                                           f"{FASTER}": 1})


def test_a_series_that_no_link_is_as_slow_for_is_refused_with_its_small_messages() -> None:
    """Sizes in KiB: all below 64 MiB, where a row by itself may take as long as it likes."""
    found = table(size=lambda nbytes: nbytes / KIB)
    (reason,) = found.reasons
    assert (found.rows, len(found.skipped)) == ((), 10)
    assert reason == (
        "from 1,024 to 524,288 bytes its series takes 1340 us more, 0.34 GB/s where its links "
        "carry 360: "
        "a time in another unit, or a size in another than bytes"
    )


def test_small_messages_that_take_about_as_long_say_nothing_of_their_unit() -> None:
    assert len(table(sizes=[8, 64, 512, 4096]).rows) == 4
    assert len(table(sizes=[8, 64, 512, 4096], time=lambda value: value * 10).rows) == 4


def test_large_messages_at_a_fraction_of_nvlink_are_refused_with_what_they_are_likely_to_be() -> (
    None
):
    found = table(size=lambda nbytes: nbytes / 8)
    said = (
        "its series comes to 42.8 GB/s of bus bandwidth at most, where rings over its links reach "
        "360"
    )
    assert (found.rows, found.reasons) == ((), {f"{said}: {LIKELY}": 10})


def test_without_large_messages_the_slope_over_the_largest_says_it() -> None:
    """Of 16 MiB in bytes of one rank the slope from 4 MiB on is an eighth of 350 GB/s; below, sizes
    in between hide it."""
    (reason,) = table(size=lambda nbytes: nbytes / 8, sizes=SIZES[:8]).reasons
    assert reason.startswith("its series comes to 43.7 GB/s of bus bandwidth at most")
    assert len(table(size=lambda nbytes: nbytes / 8, sizes=SIZES[:7]).rows) == 7


@pytest.mark.parametrize(
    "notes", ["NCCL_ALGO=Ring", "NCCL_MAX_NCHANNELS=2", "2 channels", "P2P off"]
)
def test_what_is_made_slow_may_be(notes: str) -> None:
    assert len(table(time=lambda value: 4 * value, more=f",,{notes}").rows) == 10


def test_pcie_is_held_to_no_ring_of_nvlink() -> None:
    assert len(table(time=lambda value: 60 * value, more=",PCIe,").rows) == 10


def test_nothing_is_made_slow_by_what_leaves_the_choice_to_nccl() -> None:
    assert table(time=lambda value: 4 * value, more=",,NCCL_ALGO=auto").rows == ()


def test_networks_may_be_slow() -> None:
    assert len(table(time=lambda value: 8 * value, nodes=2).rows) == 10


def test_a_bandwidth_that_agrees_confirms_how_slow_a_link_is() -> None:
    header = COLUMNS.replace("intra_node,notes", "algbw_gb_s,notes")
    rows = [(size, 8 * us(size)) for size in SIZES]
    text = "".join(
        f"all_gather,H100,8,1,{size},{time},{size / time / 1000},\n" for size, time in rows
    )
    assert len(read_any(header + text, source="a.csv").rows) == 10
    alone = "".join(f"all_gather,H100,8,1,{size},{time},,\n" for size, time in rows)
    assert read_any(header + alone, source="a.csv").rows == ()


def test_one_series_does_not_answer_for_another() -> None:
    wrong = "".join(f"all_gather,H100,8,1,{size},{1000 * us(size)},,\n" for size in SIZES)
    right = "".join(f"all_gather,H100,8,1,{size},{us(size)},,\n" for size in SIZES).replace(
        "all_gather", "reduce_scatter"
    )
    found = read_any(COLUMNS + wrong + right, source="a.csv")
    assert {row.collective for row in found.rows} == {"reduce_scatter"}
    assert (len(found.rows), len(found.skipped)) == (10, 10)


@pytest.mark.parametrize(("name", "count"), FILES.items())
@pytest.mark.parametrize(
    "without", [("busbw_gb_s_oop", "busbw_gb_s_ip", "algbw_gb_s_oop", "algbw_gb_s_ip"), ()]
)
def test_published_rows_are_all_kept_with_or_without_their_bandwidths(
    name: str, count: int, without: tuple[str, ...], tmp_path: Path
) -> None:
    with (PUBLISHED / name).open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row.update(dict.fromkeys(set(without) & set(row), "") if row.get("time_us_oop") else {})
    with (tmp_path / name).open("w", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    found = read(tmp_path / name)
    assert (len(found.rows), found.skipped) == (count, ())
