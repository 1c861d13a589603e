"""Notes of nccl rows: what they say of how NCCL ran is predicted, skipped by name, or named as
assumed with a wider band."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zsim.calibration.nccl_tests.test_nccl_rows import (
    GIB,
    HEADER,
    LOG,
    PUBLISHED,
    read,
    swept,
)
from zsim.calibration.nccl_tests.files import read_csv
from zsim.calibration.nccl_tests.rows import NcclRow, Prediction, mapped, predict
from zsim.calibration.nccl_tests.text_logs import read_text

TREES = "notes: trees, or CollNet, alone: no model of them"


def row(notes: str, *, ranks: int = 8, nodes: int = 1, tool: str = "nccl-tests") -> NcclRow:
    """An all-reduce of 1 GiB on H100."""
    place = {"n_ranks": ranks, "n_nodes": nodes, "inter_node": "8xNDR400"}
    return NcclRow(
        collective="all_reduce", gpu="H100", size_bytes=GIB, notes=notes, tool=tool, **place
    )  # type: ignore[arg-type]


def alone(found: Prediction) -> tuple[float, str, tuple[str, ...]]:
    return found.microseconds, found.algorithm, found.assumed


@pytest.mark.parametrize(
    "notes",
    [
        *("ring", "Ring only", "rings", "NVLS disabled"),
        *(
            "NCCL_ALGO=Ring", "NCCL_ALGO: ring; NCCL_DEBUG=INFO", "NCCL_ALGO=Ring,Tree",
            "NCCL_ALGO=^NVLS",
        ),
    ],
)
def test_a_ring_that_is_named_is_what_is_predicted(notes: str) -> None:
    expected = predict(row("NCCL_NVLS_ENABLE=0"))
    found = predict(row(notes))
    assert found.algorithm == "ring"
    assert found.microseconds == expected.microseconds


def test_an_algorithm_that_is_named_is_taken_also_where_another_is_faster() -> None:
    """A ring is faster than a switch at small sizes of B200, and PAT than a ring over many nodes.
    """
    small = {
        "collective": "all_gather", "gpu": "H100", "n_ranks": 64, "n_nodes": 64, "size_bytes": 4096,
        "inter_node": "NDR400 x 1",
    }
    own, ring, pat = (
        predict(NcclRow(**small, notes=notes)) for notes in ("", "NCCL_ALGO=Ring", "NCCL_ALGO=PAT")
    )
    assert (own.algorithm, ring.algorithm, pat.algorithm) == ("pat", "ring", "pat")
    assert ring.microseconds > own.microseconds
    large = small | {"size_bytes": 8 * GIB}
    assert [
        predict(NcclRow(**large, notes=notes)).algorithm for notes in ("", "NCCL_ALGO=PAT")
    ] == ["ring", "pat"]
    assert predict(row("NCCL_ALGO=NVLSTree", ranks=16, nodes=2)).algorithm == "nvls_tree"
    assert predict(row("", tool="nccl-tests, NCCL_ALGO=Ring")).algorithm == "ring"


@pytest.mark.parametrize(
    ("row_of", "reason"),
    [
        ({"notes": "NCCL_ALGO=Tree"}, "NCCL_ALGO=Tree: no model of it"), ({"notes": "Tree"}, TREES),
        ({"notes": "double binary trees"}, TREES),
        ({"notes": "NCCL_ALGO=CollnetDirect"}, "NCCL_ALGO=CollnetDirect: no model of it"),
        ({"notes": "NCCL_ALGO=^Ring"}, "NCCL_ALGO=^Ring: no model of it"),
        ({"notes": "NCCL_ALGO=allreduce:tree"}, "NCCL_ALGO=allreduce:tree: no model of it"),
        ({"notes": "NCCL_ALGO=Ring,NCCL_PROTO=LL"}, "NCCL_PROTO=LL: no model of it by itself"),
        (
            {"notes": "NCCL_PROTO=Simple", "size_bytes": "1048576"},
            "NCCL_PROTO=Simple: no model of it by itself",
        ),
        ({"notes": "NCCL_P2P_DISABLE=1"}, "NCCL_P2P_DISABLE=1: no model of it"),
        ({"notes": "NCCL_P2P_LEVEL=LOC"}, "NCCL_P2P_LEVEL=LOC: no model of it"),
        ({"notes": "NCCL_P2P_LEVEL=0"}, "NCCL_P2P_LEVEL=0: no model of it"),
        ({"notes": "8 GPUs across 2 nodes"}, "notes: 8 ranks on 2 nodes contradict 8 ranks on 1"),
        ({"notes": "on 4 hosts"}, "notes: 4 nodes contradict 8 ranks on 1"),
        ({"notes": "4 GPUs per node"}, "notes: 4 ranks a node contradict 8 ranks on 1"),
        (
            {"notes": "NCCL_ALGO=NVLS"},
            "nvls for all_reduce on A100, 8 ranks on 1 nodes: no model of it",
        ),
        ({"notes": "", "algo": "Tree"}, "NCCL_ALGO=Tree: no model of it"),
        ({"notes": "", "proto": "LL128"}, "NCCL_PROTO=LL128: no model of it by itself"),
    ],
)
def test_what_forces_nccl_to_what_has_no_model_is_skipped_by_name(
    row_of: dict[str, str], reason: str
) -> None:
    cells = {
        "collective": "all_reduce", "gpu": "A100", "n_ranks": "8", "n_nodes": "1",
        "size_bytes": str(GIB),
    } | row_of
    cells["time_us"] = "100" if "size_bytes" in row_of else "8203.9"
    quoted = ",".join(f'"{cell}"' for cell in cells.values())
    found = read_csv(f"{','.join(cells)}\n{quoted}\n", source="rows.csv")
    assert (found.rows, found.reasons) == ((), {reason: 1})


@pytest.mark.parametrize(
    ("notes", "words"),
    [
        ("NCCL_MAX_NCHANNELS=4", "NCCL_MAX_NCHANNELS=4"),
        ("while a checkpoint was written", "while a checkpoint was written"),
    ],
)
def test_what_is_not_understood_is_named_and_widens_the_band(notes: str, words: str) -> None:
    known, found = predict(row("")), predict(row(notes))
    assert found.microseconds == known.microseconds
    assert found.assumed == (f"notes {words!r} change nothing: they are not understood",)
    assert found.provenance == "assumed"
    assert (found.low, found.high) == (
        pytest.approx(known.low / 1.5), pytest.approx(known.high * 1.5),
    )


@pytest.mark.parametrize(
    "notes",
    ["no trees", "trees off", "ring not used", "without rings", "tree is disabled", "not a ring"],
)
def test_what_did_not_run_forces_nothing(notes: str) -> None:
    assert alone(predict(row(notes))) == alone(predict(row("")))


@pytest.mark.parametrize(
    ("value", "named"),
    [
        *(("mlx5_0", True), ("mlx5_0:1,mlx5_1:1", True), ("mlx5", False), ("^mlx5_bond_0", False)),
        (",".join(f"mlx5_{i}" for i in range(8)), False),
    ],
)
def test_fewer_nics_than_gpus_are_named_and_widen_the_band_between_nodes(
    value: str, named: bool
) -> None:
    notes = f"NCCL_IB_HCA={value}"
    assert alone(predict(row(notes))) == alone(predict(row("")))
    found = predict(row(notes, ranks=16, nodes=2))
    assert any("NCCL_IB_HCA" in words for words in found.assumed) == named
    assert (found.high > predict(row("", ranks=16, nodes=2)).high) == named


@pytest.mark.parametrize(
    "notes",
    [
        "NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=eth0",
        "NCCL_IB_DISABLE=1",
        "NCCL_P2P_DISABLE=0",
        "NCCL_ALGO=default",
        "NCCL_PROTO=Simple",
        "8 GPUs on 1 node, 8 GPUs per node",
        "torch 2.9.1; median of 5 runs; size=256MB; p95=461.54",
        "default",
        *("bf16", "dtype=half", "fp32, p50 of 20 runs", "float", "p50 over 100 iterations"),
    ],
)
def test_what_changes_nothing_of_a_node_is_understood(notes: str) -> None:
    assert alone(predict(row(notes))) == alone(predict(row("")))


@pytest.mark.parametrize("notes", ["via torch.distributed", "bf16 via PyTorch.", "torch"])
def test_notes_say_that_torch_called_nccl_where_the_tool_does_not_say(notes: str) -> None:
    """Which takes longer, and as long as where the tool says so."""
    found = predict(row(notes, tool=""))
    assert (
        found
        == predict(row("", tool="torch.distributed"))
        == predict(row(notes, tool="torch.distributed"))
    )
    assert found.microseconds > predict(row("", tool="")).microseconds
    against = predict(row(notes))
    assert against.microseconds == predict(row("")).microseconds
    assert against.assumed == ("nccl-tests as the tool: notes contradict it, for they say torch",)


@pytest.mark.parametrize("notes", ["p99 of 20 runs", "torchrun crashed", "half of the nodes"])
def test_words_that_only_look_like_those_of_known_columns_widen_the_band(notes: str) -> None:
    assert predict(row(notes)).assumed == (f"notes {notes!r} change nothing: they are not "
                                           f"understood",)


def test_published_notes_are_all_understood() -> None:
    for name in ("nccl_collectives.csv", "nccl_h100_sweep.csv"):
        for one in read(PUBLISHED / name).rows:
            assert not any("not understood" in words for words in mapped(one).assumed), one.notes


@pytest.mark.parametrize(
    "line", ["$ mpirun -x NCCL_ALGO=Tree ./all_reduce_perf", "node-a:7:7 [0] NCCL INFO NCCL_ALGO "
                                                             "set by environment to Tree."]
)
def test_what_a_log_says_was_set_is_read_as_notes_are(line: str) -> None:
    assert read_text(f"{line}\n{LOG}", source="a").reasons == {"NCCL_ALGO=Tree: no model of it": 2}
    ring = read_text(f"{line.replace('Tree', 'Ring')}\n{LOG}", source="a")
    assert [one.notes for one in ring.rows] == ["NCCL_ALGO=Ring"] * 2


def test_a_network_that_is_switched_off_is_one_of_several_nodes_alone() -> None:
    cells = f"all_reduce,H100,16,2,{GIB},6000,"
    found = read_csv(f"{HEADER.strip()},notes\n{cells},NCCL_IB_DISABLE=1\n", source="rows.csv")
    assert found.reasons == {"NCCL_IB_DISABLE=1: no model of it": 1}


def test_a_table_without_its_last_line_end_may_have_lost_the_end_of_its_last_field(
    tmp_path: Path
) -> None:
    """Cut in 1286.4 it says 1286: a caution, which moves neither the time nor the band."""
    header = "collective,gpu,n_ranks,n_nodes,size_bytes,time_us\n"
    text = header + "all_gather,H100,8,1,268435456,1286.4\nall_gather,H100,8,1,268435456,1286"
    whole, cut = read_csv(text, source="t.csv").rows
    words = "time_us = '1286' whole, though the file ends there without a line end"
    assert (predict(whole).assumed, predict(cut).assumed) == ((), (words,))
    assert (predict(cut).low, predict(cut).high) == (predict(whole).low, predict(whole).high)
    assert not any(one.cautions for one in read_csv(text + "\n", source="t.csv").rows)
    assert not swept("all_gather", 268435456, "", us="1286").rows[0].cautions
