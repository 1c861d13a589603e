"""Pairs of measured steps that differ in one field: none is missed because of a column that nobody
lists, and none is made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zsim.calibration.tables.test_measurements import (
    FOUNDRY,
    MEGATRON,
    ROWS,
    TITAN,
    found,
    table,
)
from zsim.calibration import accuracy
from zsim.calibration.accuracy import Predicted, pairs
from zsim.calibration.tables import Skipped, Step

OTHERWISE: dict[str, tuple[str, ...]] = {
    "accumulation": ("4",), "activation_checkpointing": ("True", "none", "full", "every 2"),
    "attention": ("SDPA flash v2", "flash_attention_2", "eager", "SDPA math (flash disabled)"),
    "attn_impl": ("flash_attention_2", "triton", "torch"),
    "attn_implementation": ("flash_attention_2", "eager"), "d_ff": ("4096", "8192", "16384"),
    "date": ("2022-01", "2025-01"), "dp_replicate": ("2",), "dp_shard": ("4", "2"),
    "expansion_ratio": ("2", "4", "8"), "float8": ("tensorwise", "rowwise"),
    "framework": ("Megatron-DeepSpeed ZeRO-2", "Megatron-LM with its distributed optimizer"),
    "global_batch": ("64",), "global_batch_seqs": ("32", "64", "1024"),
    "gpu": ("A100-SXM4-80GB", "H100-80GB", "H200", "h100_80gb"), "grad_accum": ("2", "16"),
    "learned_pos_emb": ("False",), "local_batch": ("1", "4"), "measured_by": ("2022-01",),
    "micro_batch": ("1", "4"), "model": ("llama2-13b", "llama3.1-70B"),
    "mp_mode": ("DEFAULT", "PURE", "FULL"), "n_gpus": ("8", "16", "128"), "n_heads": ("8", "32"),
    "n_kv_heads": ("4", "8"), "n_layers": ("8", "32"), "n_microbatches": ("2", "16"),
    "optimizer": ("AdamW fused", "AdamW foreach", "AdamW (foreach=False)"),
    "precision": ("fp16", "bf16", "amp_fp8", "bf16 + fp32 grad accumulation"),
    "reshard_after_forward": ("True", "False"), "seq_len": ("512", "4096"),
    "sharding": ("SHARD_GRAD_OP", "FULL_SHARD", "NO_SHARD", "HSDP", "ZeRO-2"),
    "softmax": ("fused",),
    "technique": (
        "FSDP + compile", "FSDP with float8", "DDP", "FSDP1", "FSDP (reshard_after_forward=False)"
    ),
    "tied_embeddings": ("False", "True"), "torch": ("2.0", "2.10"),
    "torch_compile": ("True", "False"), "torch_version": ("2.0", "2.10"),
    "vocab_size": ("32000", "50304"), "zero": ("1", "2"), "zero_stage": ("0", "1", "2", "3"),
}
"""Columns that a table may have, and what may be in them."""
SAID_TWICE = ("global_batch_seqs", "mfu_frac")
"""Columns that would contradict what is changed."""


def run(made: Step) -> str:
    """What ran, without the words that describe it."""
    return made.scenario.partition("\n")[2]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("source", ROWS)
def test_rows_that_ran_otherwise_differ_in_a_field(
    tmp_path: Path, source: str, checkpointed: bool
) -> None:
    """Whatever column made the difference: else the pair is missed, or counts as one of another
    field."""
    base = {name: value for name, value in ROWS[source].items() if name not in SAID_TWICE}
    base.pop("tokens_per_s_per_gpu" if "tokens_per_s" in base else "", "")
    base |= {"activation_checkpointing": "full"} if checkpointed else {}

    def made(**change: str) -> Step | Skipped:
        (one,) = found(table(tmp_path / "t.csv", base | change))
        return one

    as_it_is = made()
    assert isinstance(as_it_is, Step)
    untold, changed = [], 0
    for name, value in ((name, value) for name, values in OTHERWISE.items() for value in values):
        one = made(**{name: value})
        if isinstance(one, Step) and run(one) != run(as_it_is):
            changed += 1
            untold += [(name, value)] if one.fields == as_it_is.fields else []
    assert untold == []
    assert changed > 12


def test_rows_that_differ_in_two_columns_are_no_pair_though_one_is_not_the_source_s(
    tmp_path: Path
) -> None:
    rows = [("0", "2", "406"), ("3", "2", "520"), ("1", "1", "300")]
    table(
        tmp_path / "a.csv",
        *(MEGATRON | {"zero_stage": z, "micro_batch": b, "iter_time_ms": ms} for z, b, ms in rows),
    )
    assert [(pair.field, pair.n) for pair in accuracy.accuracy(tmp_path).pairs] == [
        ("zero_stage", 1)
    ]


def test_compiled_and_eager_rows_of_llm_foundry_are_pairs_of_that(tmp_path: Path) -> None:
    short = {
        name: value
        for name, value in FOUNDRY.items()
        if name not in ("global_batch_seqs", "tokens_per_s_per_gpu")
    }
    rows = [("False", "8"), ("True", "8"), ("True", "4")]
    table(
        tmp_path / "a.csv",
        *(short | {"torch_compile": compiled, "micro_batch": batch} for compiled, batch in rows),
    )
    assert [(pair.field, pair.n) for pair in accuracy.accuracy(tmp_path).pairs] == [
        ("micro_batch", 1), ("torch_compile", 1)
    ]


def test_rows_of_torchtitan_on_more_gpus_are_pairs_of_that_as_long_as_all_of_them_shard(
    tmp_path: Path
) -> None:
    """Sharding over all of 8 or of 16 is one technique, and over 8 of 16 another."""
    sizes = [("8", "8"), ("16", "16"), ("16", "8")]
    table(
        tmp_path / "a.csv",
        *(TITAN | {"n_gpus": gpus, "dp_shard": shards} for gpus, shards in sizes),
    )
    assert [(pair.field, pair.n) for pair in accuracy.accuracy(tmp_path).pairs] == [
        ("dp_shard", 1), ("n_gpus", 1)
    ]


def row(measured: float, **fields: str) -> Predicted:
    return Predicted(
        source="s.csv",
        line=2,
        kind="step",
        gpu="A100",
        nodes=1,
        predicted=1.0 if fields["compile"] == "no" else 0.5,
        measured=measured,
        band=(0.9, 1.1),
        assumed=(),
        fields=fields,
    )


def test_every_row_of_a_long_table_counts() -> None:
    many = [row(1.0, compile="no", batch="1") for _ in range(2100)]
    (only,) = pairs([*many, row(0.5, compile="yes", batch="1")])
    assert (only.field, only.n, only.sign_right, only.median_error_of_ratio) == (
        "compile", 2100, 1.0, 0.0,
    )


def test_where_pairs_would_be_millions_each_row_is_held_against_the_next_ones() -> None:
    (only,) = pairs(
        [row(1.0, compile=("no", "yes")[place % 2], batch="1") for place in range(3000)]
    )
    each = accuracy.MAX_PAIRS // 3000
    assert only.n == sum(-(-min(each, 2999 - place) // 2) for place in range(3000))
