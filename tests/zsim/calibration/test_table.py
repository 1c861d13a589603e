"""A table of measurements is as strict as a scenario file, and each row is the scenario it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.published.convert import TABLES
from tests.support.folders import ROOT, SCENARIOS
from tests.zsim.calibration.tables import GATHER, STEP, table
from zsim.calibration import records
from zsim.calibration.data.table import parse, read
from zsim.calibration.records import Collective, MeasurementError, Step, TableError
from zsim.cli import main
from zsim.scenario.scenario import load


def problems(path: Path) -> list[str]:
    with pytest.raises(TableError) as error:
        read(path)
    return list(error.value.problems)


def test_a_row_is_the_scenario_of_its_cells(tmp_path: Path) -> None:
    """A published scenario, cell by cell, with a list among them."""
    cells = {
        "model.preset": "llama-3-8b", "batch.micro_batch": "2", "batch.sequence_length": "8192",
        "cluster.preset": "dgx-h100", "strategy.name": "fsdp2", "strategy.dp_shard": "8",
        "precision.parameters": "bf16", "optimizer.name": "adamw",
        "activation_checkpointing.mode": "selective",
        "activation_checkpointing.save": '["linear", "attention"]',
        "measured.step_time": "2.84 s", "measured.peak_reserved": "82.4 GiB",
    }
    (row,) = read(table(tmp_path / "a.csv", cells))
    assert isinstance(row, Step)
    assert (row.seconds, row.peaks) == (2.84, {"reserved": round(82.4 * 2**30)})
    assert row.scenario.checkpointing.save == ("linear", "attention")
    assert row.tokens == 2 * 8192
    assert row.scenario.model == load(SCENARIOS / "published" / "llama-3-8b-8-h100.toml").model


def test_the_table_of_the_page_is_predicted_and_is_a_published_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "zsim" / "calibration" / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```csv\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    path = tmp_path / "page.csv"
    path.write_text(block, encoding="utf-8")
    assert main.main(["accuracy", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (row,) = printed["rows"]
    (shown,) = parse(block.encode(), where="page.csv", folder=TABLES)
    assert (printed["skipped"], row["assumed"]) == ([], [])
    assert row["band"][0] < row["measured"] < row["band"][1]
    published = [each for each in read(TABLES / "torchtitan.csv") if isinstance(each, Step)]
    assert isinstance(shown, Step)
    assert (shown.scenario, shown.seconds) in [(each.scenario, each.seconds) for each in published]


@pytest.mark.parametrize(("cells", "problem"), [
    ({"batch.micro_batsh": "4"}, "batch.micro_batsh: unknown key, did you mean micro_batch?"),
    ({"batch.micro_batch": "four"}, 'batch.micro_batch: expected a whole number, found "four"'),
    ({"batch.micro_batch": ""}, "batch.micro_batch: expected a value, found nothing"),
    ({"cluster.preset": "dgx-h10"}, 'cluster.preset: unknown cluster "dgx-h10", did you mean '
                                    "dgx-h100?"),
    ({"strategy.dp_shard": "7"}, "strategy.dp_shard: expected a divisor of the cluster's"),
    ({"execution.compile": "maybe"},
     'execution.compile: expected false, true or "blocks", found "maybe"'),
    ({"measured.step_time": "6"}, "measured.step_time: expected a number of ns, us, "),
    ({"measured.step_time": "0 s"}, "measured.step_time: expected more than nothing"),
    ({"measured.step_time": ""}, "measured.step_time: expected measured.step_time, "),
    ({"measured.peak_reserved": "82 G"}, "measured.peak_reserved: expected a number of "),
    ({"widens": "0.1"}, "assumed: expected the reason why the band is wider, found none"),
    ({"widens": "-1", "assumed": "a"}, "widens: expected a number from 0 to 10"),
    ({"network.least": "0.3"}, "network.least, network.most: expected both or neither"),
])
def test_a_problem_is_named_with_file_line_column_expected_and_found(
    tmp_path: Path, cells: dict[str, str], problem: str
) -> None:
    (complaint,) = problems(table(tmp_path / "a.csv", STEP, STEP | cells))
    assert complaint.startswith(f"a.csv line 3: {problem}")


@pytest.mark.parametrize(("column", "problem"), [
    ("measured.steptime", "unknown column, did you mean measured.step_time?"),
    ("modl.preset", "unknown column, did you mean model.?"),
    ("model", "unknown column, did you mean model.?"), ("n_gpus", "unknown column"),
    ("expect.peak_memory", "unknown column"), ("", "unknown column"),
])
def test_an_unknown_column_is_named_once(tmp_path: Path, column: str, problem: str) -> None:
    (complaint,) = problems(table(tmp_path / "a.csv", STEP | {column: "1"}, STEP | {column: "1"}))
    assert complaint.startswith(f"a.csv line 1: {column or 'a column without a name'}: {problem}")


@pytest.mark.parametrize(("cells", "problem"), [
    ({"frozen": "[2020-01-01]"}, "frozen[0]: expected text, found 2020-01-01"),
    ({"frozen": "{ a = 2020-01-01 }"}, "frozen: expected a list, found { a = 2020-01-01 }"),
    ({"steps": "[07:32:00]"}, "steps: expected a whole number, found [07:32:00]"),
    ({"frozen": "[nan]"}, "frozen[0]: expected a finite number, found nan"),
    ({"frozen": '{ "a b" = 1 }'}, "frozen: expected a list, found { a b = 1 }"),
    ({"frozen": "[" * 30 + "]" * 30}, "frozen[0]: expected text, found […]"),
    ({"steps": "9" * 400}, "steps: expected an integer of at most 64 bits, found a longer"),
    ({"execution.step_overhead": "18 x"}, "execution.step_overhead: expected a number of "),
])
def test_a_cell_of_any_kind_is_refused_by_its_key(
    tmp_path: Path, cells: dict[str, str], problem: str
) -> None:
    (complaint,) = problems(table(tmp_path / "a.csv", STEP | cells))
    assert complaint.startswith(f"a.csv line 2: {problem}")


@pytest.mark.parametrize("order", [1, -1])
def test_a_column_below_one_that_has_a_value_is_refused(tmp_path: Path, order: int) -> None:
    typo = dict([*STEP.items(), ("batch.micro_batch.typo", "9")][::order])
    (complaint,) = problems(table(tmp_path / "a.csv", typo))
    assert complaint == (
        "a.csv line 2: batch.micro_batch.typo: expected one of batch.micro_batch and "
        "batch.micro_batch.typo, found both"
    )
    nodes = {"cluster.nodes.x": "1"}
    (complaint,) = problems(table(tmp_path / "b.csv", GATHER | nodes))
    assert complaint == ("b.csv line 2: cluster.nodes.x: expected one of cluster.nodes and "
                    "cluster.nodes.x, found both")


@pytest.mark.parametrize(("separator", "name"), [(";", "semicolons"), ("\t", "tabs")])
def test_a_table_with_other_separators_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], separator: str, name: str
) -> None:
    rows = [separator.join(cells) for cells in (STEP, STEP.values())]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    for command in (["accuracy", str(tmp_path)], ["calibrate", "--from", f"{tmp_path}/a.csv"]):
        assert main.main(command) == 2
        assert f"a.csv line 1: expected commas between columns, found {name}" in (
            capsys.readouterr().err
        )


def test_the_same_problem_of_many_rows_is_one_line(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", *[STEP | {"batch.micro_batch": "0"}] * 3, STEP)
    (complaint,) = problems(path)
    assert complaint.startswith("a.csv line 2 and 2 more: batch.micro_batch: ")


def test_every_problem_of_a_table_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(
        tmp_path / "a.csv", STEP | {"strategy.name": "fsdp9"}, STEP | {"cluster.preset": "x"}
    )
    lines = [complaint.partition(":")[0] for complaint in problems(path)]
    assert lines == ["a.csv line 2", "a.csv line 3"]
    for command in (["accuracy", str(tmp_path)], ["calibrate", "--from", str(path)]):
        assert main.main(command) == 2
        assert "a.csv line 3: cluster.preset: unknown cluster" in capsys.readouterr().err


@pytest.mark.parametrize(("cells", "problem"), [
    ({"collective": "all_reduced"}, "collective: expected all_gather, reduce_scatter"),
    ({"bytes": "1.5"}, "bytes: expected a number of"), ({"bytes": ""}, "bytes: missing"),
    ({"measured.time": "24.6"}, "measured.time: expected a number of ns"),
    ({"nccl.algorithm": "rings"}, "nccl.algorithm: expected ring, tree, nvls"),
    ({"nccl.nvls": "off"}, "nccl.nvls: expected true or false"),
    ({"cluster.preset": ""}, "cluster: expected one of preset or file, found neither"),
    ({"cluster.ranks": "9"}, "cluster.ranks: expected 1 to 8"),
    ({"cluster.ranks": "1"}, "cluster: expected two ranks or more"),
    ({"cluster.preset": "cpu-gloo"}, "cluster: expected two ranks or more"),
    ({"cluster.node": "1"}, "cluster.node: unknown key, did you mean nodes?"),
    ({"batch.micro_batch": "1"}, "batch.micro_batch: unknown column"),
])
def test_a_table_of_collectives_is_as_strict(
    tmp_path: Path, cells: dict[str, str], problem: str
) -> None:
    assert problem in problems(table(tmp_path / "a.csv", GATHER | cells))[0]


def test_a_collective_has_its_cluster_its_bytes_and_what_nccl_was_made_to_take(
    tmp_path: Path
) -> None:
    forced = {
        "bytes": "64 MiB", "cluster.nodes": "4", "cluster.fabric": "roce",
        "nccl.algorithm": "ring", "nccl.nvls": "false", "nccl.through_torch": "true",
        "cluster.nic_bandwidth": "25 GB/s", "network.least": "0.3", "network.most": "3",
        "widens": "0.3", "assumed": "one; another", "group": "mine", "source": "here",
    }
    plain, row = read(table(tmp_path / "a.csv", GATHER, GATHER | forced))
    assert isinstance(plain, Collective)
    assert isinstance(row, Collective)
    assert (plain.nvls, plain.algorithm, plain.through_torch, plain.caveats) == (
        True, None, False, ()
    )
    assert (row.nbytes, row.seconds, row.cluster.num_ranks) == (2**26, 24.6e-6, 32)
    assert (row.nvls, row.algorithm, row.through_torch) == (False, "ring", True)
    assert (row.network, row.widened, row.group, row.origin) == ((0.3, 3.0), 0.3, "mine", "here")
    assert [caveat.text for caveat in row.caveats] == ["one", "another"]
    assert row.cluster.links.rail.bandwidth == 25 * 10**9


def test_a_cluster_file_is_looked_for_beside_the_table(tmp_path: Path) -> None:
    (complaint,) = problems(
        table(tmp_path / "a.csv", GATHER | {"cluster.preset": "", "cluster.file": "m.toml"})
    )
    assert "cluster.file: m.toml: no such file" in complaint


@pytest.mark.parametrize(("data", "message"), [
    (b'model.preset,"measured.step_time\n1', "unexpected end of data"),
    (b"model.preset,measured.step_time\n\xff,1 s\n", "can't decode"),
])
def test_what_is_no_csv_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(MeasurementError, match=message):
        parse(data, where="a.csv")


def test_sizes_of_tables_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = b",".join(b"model.a%d" % each for each in range(300))
    with pytest.raises(TableError, match="at most 200 columns"):
        parse(wide + b",measured.step_time\n", where="a.csv")
    with pytest.raises(TableError, match="at most 200 columns and 20,000 rows"):
        parse(b"measured.step_time\n" + b"1 s\n" * 20_001, where="a.csv")
    (complaint,) = problems(table(tmp_path / "a.csv", STEP | {"note": "x" * 2001}))
    assert "note: expected at most 2,000 characters, found 2,001" in complaint
    (damaged,) = problems(table(tmp_path / "a.csv", STEP | {"note": "a\0b"}))
    assert "note: expected text, found a NUL byte in it" in damaged
    monkeypatch.setattr(records, "MAX_FILE_BYTES", 10)
    with pytest.raises(MeasurementError, match="at most 10 bytes"):
        read(tmp_path / "a.csv")


def test_a_row_of_more_or_fewer_cells_is_named(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", STEP, STEP)
    path.write_text(path.read_text().rstrip("\n").rpartition(",")[0] + "\n")
    assert f"a.csv line 3: expected {len(STEP)} cells as the header has columns, found " in (
        problems(path)[0]
    )


def test_a_table_without_rows_is_refused() -> None:
    with pytest.raises(TableError, match="expected rows under the header, found none"):
        parse(b"model.preset,measured.step_time\n", where="a.csv")


CELLS = st.text(alphabet='abc01.,:[]{}="\'\n\r\0 -_/%', max_size=12)


@settings(max_examples=60)
@given(columns=st.lists(CELLS, max_size=4), rows=st.lists(st.lists(CELLS, max_size=5), max_size=3))
def test_no_table_makes_the_reader_raise_anything_else(
    columns: list[str], rows: list[list[str]]
) -> None:
    lines = [[*columns, "measured.step_time"], *rows]
    data = "\n".join(",".join(cells) for cells in lines).encode()
    with pytest.raises((MeasurementError, TableError)):
        parse(data, where="a.csv")
