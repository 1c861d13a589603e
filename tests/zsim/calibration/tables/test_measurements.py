"""Rows of published measurements: each known schema becomes scenarios, and what cannot be used is
skipped by name."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from zsim.calibration import tables
from zsim.calibration.rows.checks import RATES
from zsim.calibration.rows.records import OTHER_FIELDS
from zsim.calibration.tables import MeasurementError, Skipped, Step
from zsim.scenario import scenario

FOUNDRY = {
    "model": "mpt-1b",
    "d_model": "2048",
    "n_heads": "16",
    "n_layers": "24",
    "vocab_size": "50368",
    "seq_len": "2048",
    "n_gpus": "8",
    "gpu": "a100_40gb",
    "precision": "bf16",
    "mp_mode": "PURE",
    "sharding": "FULL_SHARD",
    "activation_checkpointing": "False",
    "micro_batch": "8",
    "grad_accum": "8",
    "global_batch_seqs": "512",
    "tokens_per_s": "154171",
    "tokens_per_s_per_gpu": "19271",
}
MEGATRON = {
    "d_model": "2048",
    "n_heads": "16",
    "n_layers": "12",
    "seq_len": "1024",
    "n_gpus": "4",
    "tp": "1",
    "dp": "4",
    "pp": "1",
    "micro_batch": "2",
    "n_microbatches": "4",
    "iter_time_ms": "300",
    "gpu": "A100",
    "framework": "Megatron-DeepSpeed",
}
TITAN = {
    "model": "llama3.1-8B",
    "n_gpus": "8",
    "seq_len": "8192",
    "local_batch": "2",
    "dp_shard": "8",
    "tp": "1",
    "pp": "1",
    "cp": "1",
    "activation_checkpointing": "selective op",
    "torch_compile": "True",
    "float8": "none",
    "technique": "FSDP",
    "gpu": "H100-96GB HBM2e",
    "tokens_per_s_per_gpu": "6667",
}
NANOTRON = {
    "model": "llama-1B",
    "seq_len": "4096",
    "nodes": "1",
    "n_gpus": "8",
    "micro_batch": "2",
    "grad_accum": "4",
    "dp": "8",
    "pp": "1",
    "tp": "1",
    "zero_stage": "0",
    "status": "ok",
    "tokens_per_s_per_gpu": "40150",
    "gpu": "H100-80GB",
    "n_layers": "16",
    "d_model": "2048",
    "n_heads": "32",
    "d_ff": "8192",
    "vocab_size": "131072",
}
FMS = {
    "model": "llama2-7b",
    "n_gpus": "128",
    "gpu": "A100-80GB",
    "seq_len": "4096",
    "micro_batch": "2",
    "grad_accum": "1",
    "sharding": "HSDP",
    "activation_checkpointing": "none",
    "mfu_frac": "0.57",
    "tokens_per_s_per_gpu": "3700",
}
ROWS = {
    "llm-foundry": FOUNDRY,
    "megatron-deepspeed": MEGATRON,
    "torchtitan": TITAN,
    "nanotron": NANOTRON,
    "fms-fsdp": FMS,
}


def table(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def found(path: Path) -> list[Step | Skipped]:
    columns, records = tables.read(path)
    return list(tables.steps(tables.source_of(columns), records, file=path.name))


def reason(tmp_path: Path, row: dict[str, str]) -> str:
    (skipped,) = found(table(tmp_path / "t.csv", row))
    assert isinstance(skipped, Skipped)
    return skipped.reason


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_each_source_is_a_scenario_that_can_be_read(tmp_path: Path, name: str) -> None:
    path = table(tmp_path / "any-name.csv", ROWS[name])
    columns, _ = tables.read(path)
    assert tables.source_of(columns) == name
    (step,) = found(path)
    assert isinstance(step, Step)
    read = scenario.parse(step.scenario.encode(), where="row")
    assert read.world_size == int(ROWS[name]["n_gpus"])
    assert step.line == 2
    assert step.assumed


def test_every_source_has_a_row_here() -> None:
    assert set(ROWS) == set(tables.SOURCES)


def test_a_row_of_llm_foundry_says_in_a_scenario_what_it_ran(tmp_path: Path) -> None:
    row = FOUNDRY | {
        "activation_checkpointing": "True",
        "mp_mode": "DEFAULT",
        "gpu": "h100_80gb",
        "precision": "amp_fp8",
    }
    (step,) = found(table(tmp_path / "t.csv", row))
    assert isinstance(step, Step)
    read = scenario.parse(step.scenario.encode(), where="row")
    assert (read.model.num_parameters, read.batch.accumulation) == (
        24 * (12 * 2048**2 + 13 * 2048) + 2 * 2048 + 50368 * 2048 + 2048 * 2048,
        8,
    )
    assert (read.precision.parameters, read.precision.reduce) == ("bfloat16", "float32")
    assert (read.checkpointing.mode, read.checkpointing.early_stop) == ("full", True)
    assert (read.execution.float8, read.execution.attention_kernels) == (True, "triton")
    assert read.cluster.name == "dgx-h100"
    assert step.seconds == 512 * 2048 / 154171
    older = scenario.parse(
        found(table(tmp_path / "t.csv", row | {"gpu": "a100_80gb", "precision": "amp_bf16"}))[
            0
        ].scenario.encode(),
        where="row",
    )  # type: ignore[union-attr]
    assert not older.checkpointing.early_stop


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens_per_s": "", "tokens_per_s_per_gpu": ""}, "tokens_per_s: missing"),
        ({"tokens_per_s": "fast"}, "tokens_per_s: expected a number, found 'fast'"),
        ({"tokens_per_s": "nan"}, "tokens_per_s: expected a number above 0, found 'nan'"),
        ({"tokens_per_s": "-3"}, "tokens_per_s: expected a number above 0, found '-3'"),
        ({"n_layers": "2.5"}, "n_layers: expected a whole number of at least 1, found '2.5'"),
        ({"gpu": "v100"}, "gpu: expected an A100 SXM of 80 GB, A100 SXM of 40 GB, H100"),
        ({"mp_mode": "OTHER"}, "mp_mode: expected one of DEFAULT, PURE, FULL, found 'OTHER'"),
        (
            {"global_batch_seqs": "500"},
            "global_batch_seqs: 500 contradicts 512, which the other fields say",
        ),
        ({"tokens_per_s_per_gpu": "154171"}, "tokens_per_s_per_gpu: 154171 contradicts 19271.4"),
        ({"activation_checkpointing": "maybe"}, "activation_checkpointing: not known: 'maybe'"),
    ],
)
def test_a_row_that_cannot_be_used_is_skipped_by_name(
    tmp_path: Path, change: dict[str, str], message: str
) -> None:
    assert reason(tmp_path, FOUNDRY | change).startswith(message)


@pytest.mark.parametrize(
    ("row", "axis"),
    [(MEGATRON, "tp"), (MEGATRON, "pp"), (TITAN, "tp"), (TITAN, "cp"), (NANOTRON, "pp")],
)
def test_other_axes_than_data_parallel_ones_are_skipped_by_name(
    tmp_path: Path, row: dict[str, str], axis: str
) -> None:
    assert reason(tmp_path, row | {axis: "2"}) == f"{axis} = 2: only data parallelism is simulated"


def test_a_run_that_failed_is_skipped(tmp_path: Path) -> None:
    assert reason(tmp_path, NANOTRON | {"status": "failed (OOM)"}) == "status: failed (OOM)"


def test_a_line_with_more_fields_than_columns_is_skipped(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", FOUNDRY)
    path.write_text(path.read_text().rstrip("\r\n") + ",1,2\r\n")
    (skipped,) = found(path)
    reason = f"{OTHER_FIELDS}: expected {len(FOUNDRY)} between commas, found {len(FOUNDRY) + 2}"
    assert skipped == Skipped(source="t.csv", line=2, reason=reason)


@pytest.mark.parametrize("name", ROWS)
def test_a_line_that_ends_early_is_skipped_wherever_it_was_cut(tmp_path: Path, name: str) -> None:
    """Also in the middle of a rate behind which only remarks follow, which without its end is a
    rate as well; the row before it is kept."""
    rate = next(
        column
        for column in ("tokens_per_s", "tokens_per_s_per_gpu", "iter_time_ms")
        if column in ROWS[name]
    )
    row = {key: value for key, value in ROWS[name].items() if key not in RATES} | {
        rate: ROWS[name][rate], "date": "2024-12", "source": "x"
    }
    path = table(tmp_path / "t.csv", row, row)
    whole = path.read_text()
    begin = len(whole) - len(f"{row[rate]},2024-12,x\n")
    for length in range(begin + 1, len(whole) - len(",x\n")):
        path.write_text(whole[:length])
        kept, skipped = found(path)
        assert isinstance(kept, Step)
        assert isinstance(skipped, Skipped)
        assert (skipped.line, skipped.reason.partition(" between")[0]) == (
            3, f"{OTHER_FIELDS}: expected {len(row)}",
        )


def test_a_field_that_is_read_and_may_have_lost_its_end_is_named(tmp_path: Path) -> None:
    """Of a whole file, and of one whose last field nobody reads, there is nothing to name."""
    last = {key: value for key, value in TITAN.items() if key != "tokens_per_s_per_gpu"} | {
        "tokens_per_s_per_gpu": "5762"
    }
    words = "tokens_per_s_per_gpu = '576' whole, though the file ends there without a line end"
    for row, end, expected in ((last, 2, [words]), (last, 1, []), (last | {"source": "x"}, 1, [])):
        path = table(tmp_path / "t.csv", row, row)
        path.write_text(path.read_text()[:-end] + ("" if end == 2 or "source" in row else "\n"))
        first, second = found(path)
        assert isinstance(first, Step)
        assert isinstance(second, Step)
        assert [one for one in second.assumed if one not in first.assumed] == expected
        assert second.widened == first.widened


def test_a_column_without_a_name_spoils_no_row(tmp_path: Path) -> None:
    """As that of row numbers, which some programs put first."""
    (step,) = found(table(tmp_path / "t.csv", {"": "0", **FOUNDRY}))
    assert isinstance(step, Step)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xfe\x00", "expected a CSV table in UTF-8"),
        (b'a,b\n"unclosed', "expected a CSV table in UTF-8"),
        (b"a,b, a\n1,2,3\n", "two columns 'a'"),
        (b"a,b\n" + b"x" * 30_000 + b",1\n", "a field of more than 20,000 characters"),
        (
            b",".join(b"c%d" % place for place in range(1001)) + b"\n",
            "1,001 columns, more than 1,000",
        ),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(data)
    with pytest.raises(MeasurementError, match=message):
        tables.read(path)


def test_a_folder_without_tables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="expected a folder with CSV files of "
                                               "measurements, or logs of nccl-tests, found none"):
        tables.files(tmp_path)


def test_words_of_a_row_cannot_change_its_scenario(tmp_path: Path) -> None:
    (step,) = found(table(tmp_path / "t.csv", FOUNDRY | {"model": 'x"\n[expect]\nall_gathers = 1 '
                                                                  '#'}))
    assert isinstance(step, Step)
    assert scenario.parse(step.scenario.encode(), where="row").expect == ()


@pytest.mark.parametrize("words", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_on_one_gpu_nothing_is_sharded(tmp_path: Path, words: str) -> None:
    alone = {
        name: value
        for name, value in FOUNDRY.items()
        if name not in ("tokens_per_s_per_gpu", "global_batch_seqs")
    }
    (one,) = found(
        table(
            tmp_path / "t.csv", alone | {"n_gpus": "1", "sharding": words, "tokens_per_s": "19271"}
        )
    )
    assert isinstance(one, Step)
    read = scenario.parse(one.scenario.encode(), where="row")
    assert (read.strategy, read.world_size) == ("ddp", 1)
