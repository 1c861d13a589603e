"""Which source a table is of: the one that knows most of its columns, whatever columns others are
added."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.support.folders import PUBLISHED
from tests.zsim.calibration.tables.test_measurements import FMS, MEGATRON, ROWS, reason, table
from tests.zsim.calibration.tables.test_row_checks import read, step
from zsim.calibration import tables
from zsim.calibration.tables import Skipped, Step
from zsim.calibration.tables.columns import FILES, HEADERS
from zsim.scenario.plan import plan

ADDED = (
    *(
        "zero_stage", "zero", "mp_mode", "d_model", "n_layers", "n_heads", "d_ff", "n_kv_heads",
        "vocab_size", "sharding", "local_batch",
    ),
    *(
        "global_batch", "micro_batch", "grad_accum", "dp", "nodes", "technique", "attention",
        "attn_impl", "torch_compile", "precision",
    ),
    *(
        "status", "framework", "global_batch_seqs", "n_microbatches", "iter_time_ms",
        "expansion_ratio", "tokens_per_s",
    ),
)
"""What people add to a table of another source: columns that are theirs."""


def published(source: str) -> dict[str, str]:
    """The first row of a source's own table, with all its columns."""
    name = next(file for file, of in FILES.items() if of == source)
    with (PUBLISHED / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return next(csv.DictReader(file))


@pytest.mark.parametrize("source", ROWS)
def test_headers_are_those_that_were_published(source: str) -> None:
    assert HEADERS[source] == set(published(source))


@pytest.mark.parametrize("source", ROWS)
@pytest.mark.parametrize("column", ADDED)
def test_an_added_column_makes_no_table_another_source_s(source: str, column: str) -> None:
    """Neither one more of a whole header nor, where no row says anything there, one of the fewer
    columns that suffice."""
    assert tables.source_of((*published(source), *({column} - published(source).keys()))) == source
    row = {column: ""} | ROWS[source]
    assert tables.sources_of(tuple(row), filled={name for name, value in row.items() if value}) == (
        source,
    )


@pytest.mark.parametrize(
    ("source", "columns"),
    [
        ("fms-fsdp", ("d_model", "n_heads", "n_layers", "d_ff", "n_kv_heads", "global_batch_seqs")),
        ("fms-fsdp", ("local_batch", "global_batch", "tp", "pp")),
        (
            "torchtitan",
            ("sharding", "micro_batch", "grad_accum", "vocab_size", "attention", "optimizer"),
        ),
        ("nanotron", ("sharding", "mp_mode", "torch_compile", "attention", "optimizer")),
        ("nanotron", ("local_batch", "technique", "torch_compile")),
        (
            "megatron-deepspeed",
            ("sharding", "zero_stage", "precision", "vocab_size", "d_ff", "n_kv_heads"),
        ),
        ("llm-foundry", ("zero_stage", "local_batch", "torch_compile", "attention", "optimizer")),
    ],
)
def test_several_added_columns_make_no_table_another_source_s(
    source: str, columns: tuple[str, ...]
) -> None:
    assert tables.source_of((*published(source), *columns)) == source


def alike() -> dict[str, str]:
    """A table with a column of llm-foundry's alone and one of fms-fsdp's, and otherwise what both
    have."""
    names = ("model", "n_gpus", "gpu", "seq_len", "sharding", "micro_batch", "tokens_per_s_per_gpu")
    return {name: FMS[name] for name in names} | {"mp_mode": "PURE", "attention": "SDPA"}


def test_a_table_of_two_sources_alike_is_told_by_its_file_s_name_or_skipped(tmp_path: Path) -> None:
    (skipped,) = tables.rows(table(tmp_path / "mine.csv", alike()))
    assert isinstance(skipped, Skipped)
    assert skipped.reason == (
        "columns of llm-foundry and of fms-fsdp alike: which of them ran is told by a file's "
        "name, mpt_llm_foundry.csv, fms_fsdp.csv"
    )
    (made,) = tables.rows(table(tmp_path / "FMS_fsdp.csv", alike()), name="more/FMS_fsdp.csv")
    assert isinstance(made, Step)
    assert "a row of fms-fsdp, as most of its columns are, though not mp_mode" in made.assumed


def test_an_empty_column_makes_no_table_another_source_s(tmp_path: Path) -> None:
    (made,) = tables.rows(table(tmp_path / "mine.csv", alike() | {"mp_mode": ""}))
    assert isinstance(made, Step)
    assert made.scenario.startswith('description = "fms-fsdp')


def test_a_file_s_name_changes_nothing_where_the_columns_tell(tmp_path: Path) -> None:
    (made,) = tables.rows(table(tmp_path / "mpt_llm_foundry.csv", published("fms-fsdp")))
    assert isinstance(made, Step)
    assert made.scenario.startswith('description = "fms-fsdp')


@pytest.mark.parametrize("source", ROWS)
def test_a_row_says_its_source_only_where_it_has_columns_that_the_source_has_not(
    tmp_path: Path, source: str
) -> None:
    told = "a row of "
    assert not [
        words for words in step(tmp_path, published(source)).assumed if words.startswith(told)
    ]
    (words,) = (
        words
        for words in step(tmp_path, published(source) | {"colour": ""}).assumed
        if words.startswith(told)
    )
    assert words == f"a row of {source}, as most of its columns are, though not colour"


STATED = [
    *(({"zero_stage": words}, "ddp") for words in ("0", "none", "ZeRO-0", "DDP", "0.0")),
    *(({"sharding": words}, "ddp") for words in ("DDP", "NO_SHARD", "none", "0")),
    *(({name: "1"}, "zero1") for name in ("zero_stage", "zero")),
    ({"sharding": "ZeRO-1"}, "zero1"),
    ({"sharding": "SHARD_GRAD_OP"}, "zero2"),
    ({"zero_stage": "3"}, "zero3"),
    ({"sharding": "FULL_SHARD"}, "zero3"),
    ({"framework": "Megatron-DeepSpeed ZeRO-1"}, "zero1"),
    ({"framework": "Megatron-LM (distributed optimizer)"}, "zero1"),
    ({"framework": "Megatron-LM --use-distributed-optimizer"}, "zero1"),
    ({"framework": "Megatron-FSDP"}, "zero3"),
    ({"framework": "Megatron-DeepSpeed (ZeRO stage 2)"}, "zero2"),
    ({"framework": "Megatron-DeepSpeed, zero1", "zero_stage": "1"}, "zero1"),
]


@pytest.mark.parametrize(("change", "strategy"), STATED)
def test_a_row_of_vtrain_may_state_its_stage_of_zero(
    tmp_path: Path, change: dict[str, str], strategy: str
) -> None:
    made, plain = step(tmp_path, MEGATRON | change), step(tmp_path, MEGATRON)
    found = read(made)
    assert (found.strategy, found.mesh.world_size) == (strategy, 4)
    assert plan(found, device="cuda").of_rank(0).steady
    assert not any("not stated" in words or "not known" in words for words in made.assumed)
    assert (made.widened > plain.widened) == (strategy != "ddp")
    assert "ddp with a fused Adam, for the ZeRO stage is not stated" in plain.assumed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"zero_stage": "4"}, "zero_stage: expected 0, 1, 2 or 3, found '4'"),
        ({"sharding": "HYBRID_SHARD"}, "sharding: expected a stage of ZeRO, found 'HYBRID_SHARD'"),
        ({"sharding": "magic"}, "sharding: expected FSDP"),
        ({"framework": "Megatron-DeepSpeed ZeRO-Infinity"}, "framework: expected one stage of "
                                                            "ZeRO, 0 to 3"),
        ({"framework": "Megatron-DeepSpeed ZeRO++"}, "framework: expected one stage of ZeRO, 0 "
                                                     "to 3"),
        (
            {"framework": "Megatron-DeepSpeed ZeRO-1", "zero_stage": "2"},
            "zero_stage and framework: expected one stage of ZeRO, found 2 and 1",
        ),
    ],
)
def test_a_stage_of_zero_that_nothing_here_has_is_why_a_row_of_vtrain_is_skipped(
    tmp_path: Path, change: dict[str, str], words: str
) -> None:
    assert reason(tmp_path, MEGATRON | change).startswith(words)


def test_every_source_is_in_the_tables_of_headers() -> None:
    assert set(HEADERS) == set(FILES.values()) == set(tables.SOURCES)
