"""Words of a row that decide what ran, and are refused or remarked on where they are not
understood: recipes, stages, names of models."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zsim.calibration.tables.test_measurements import (
    FMS,
    FOUNDRY,
    MEGATRON,
    NANOTRON,
    TITAN,
    reason,
    table,
)
from tests.zsim.calibration.tables.test_row_checks import read, step
from tests.zsim.calibration.tables.test_row_columns import without
from tests.zsim.calibration.test_accuracy import PRODUCT
from zsim.calibration.tables import Skipped, rows
from zsim.calibration.tables.matmul_peaks import Product
from zsim.scenario.plan import plan

FLOAT8 = {
    False: (
        "", "N/A", "nan", "-", "null", "None", "False", "no", "off", "0", "bf16", "BF16", "fp16",
        "fp32", "no float8", "False (bf16)",
    ),
    True: (
        *(
            "True (dynamic)", "yes, rowwise", "True", "yes", "1", "tensorwise", "rowwise",
            "rowwise_with_gw_hp", "float8 tensorwise", "fp8",
        ),
        *("FP8 (rowwise)", "delayed"),
    ),
}
NOT_KNOWN = (
    "foo", "50%", "-1", "auto", "2", "bf16 all-gather", "tensorwise?", "not tensorwise", "int8",
    "True (foo)", "True (auto)",
)


@pytest.mark.parametrize(
    ("narrow", "words"), [(narrow, words) for narrow, cells in FLOAT8.items() for words in cells]
)
def test_float8_is_what_a_recipe_or_a_yes_turns_on(
    tmp_path: Path, narrow: bool, words: str
) -> None:
    assert read(step(tmp_path, TITAN | {"float8": words})).execution.float8 is narrow


@pytest.mark.parametrize("words", NOT_KNOWN)
def test_float8_that_nobody_understands_is_why_a_row_is_skipped(tmp_path: Path, words: str) -> None:
    assert reason(tmp_path, TITAN | {"float8": words}).startswith("float8: expected True, False "
                                                                  "or a recipe as ")


def test_a_technique_with_float8_is_contradicted_by_another_dtype_and_not_by_an_empty_cell(
    tmp_path: Path
) -> None:
    row = TITAN | {"technique": "FSDP + float8"}
    assert reason(tmp_path, row | {"float8": "bf16"}) == (
        "float8: bf16 contradicts technique = FSDP + float8"
    )
    assert read(step(tmp_path, row | {"float8": "n/a"})).execution.float8 is True


@pytest.mark.parametrize("stage", ["-1", "-0", "_2", "--3", "- 1"])
def test_a_stage_below_0_is_none(tmp_path: Path, stage: str) -> None:
    assert reason(tmp_path, NANOTRON | {"zero_stage": stage}).startswith(
        "zero_stage: expected 0, 1, 2 or 3, found"
    )


@pytest.mark.parametrize(
    "row", [FMS, FOUNDRY, MEGATRON, NANOTRON, TITAN],
    ids=["fms", "foundry", "megatron", "nanotron", "titan"],
)
@pytest.mark.parametrize("words", ["-1", "-2", "selective -2", "every -1", "\N{MINUS SIGN}1"])
def test_recomputing_a_number_of_blocks_below_0_is_refused(
    tmp_path: Path, row: dict[str, str], words: str
) -> None:
    assert reason(tmp_path, row | {"activation_checkpointing": words}).startswith(
        "activation_checkpointing: "
    )


LARGER = {"n_layers": "32", "d_model": "4096", "n_heads": "32"}
TIMED = {
    "tokens_per_s": "20000", "tokens_per_s_per_gpu": "2500", "micro_batch": "1", "grad_accum": "1",
    "global_batch_seqs": "8",
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "mpt-7b"}, "d_model: 2048 contradicts model = mpt-7b, which has 4096"),
        ({"model": "MPT 7B"}, "d_model: 2048 contradicts model = MPT 7B, which has 4096"),
        (
            {"model": "mosaicml/mpt-30b-instruct"},
            "d_model: 2048 contradicts model = mosaicml/mpt-30b-instruct, which has 7168",
        ),
        (LARGER | TIMED, "d_model: 4096 contradicts model = mpt-1b, which has 2048"),
        (
            LARGER | TIMED | {"model": "mpt-7b", "n_layers": "30"},
            "n_layers: 30 contradicts model = mpt-7b, which has 32",
        ),
    ],
)
def test_an_mpt_of_other_sizes_than_its_name_has_is_refused(
    tmp_path: Path, change: dict[str, str], words: str
) -> None:
    assert reason(tmp_path, without(FOUNDRY, "n_params") | change) == words


def test_a_name_that_says_nothing_and_heads_that_are_unusual_widen_the_band(tmp_path: Path) -> None:
    plain = step(tmp_path, FOUNDRY)
    for change, words in (
        ({"model": "mine"}, "model = 'mine' is not known: a gpt of the row's sizes"),
        ({"n_heads": "32"}, "32 heads, where mpt-1b has 16"),
    ):
        found = step(tmp_path, FOUNDRY | change)
        assert words in found.assumed
        assert found.widened > plain.widened
    for spelled in ("MPT-1B", "mpt 1b", "mosaicml/mpt-1b"):
        assert step(tmp_path, FOUNDRY | {"model": spelled}).widened == plain.widened


@pytest.mark.parametrize(
    ("kernels", "heads", "words"),
    [
        (
            "triton", "8",
            "n_heads: heads of 256 are wider than 128, the most that triton attention has",
        ),
        (
            "flash", "4",
            "n_heads: heads of 512 are wider than 256, the most that flash2 attention has",
        ),
        (
            "flash", "1",
            "n_heads: heads of 2048 are wider than 256, the most that flash2 attention has",
        ),
    ],
)
def test_heads_wider_than_its_attention_has_are_refused(
    tmp_path: Path, kernels: str, heads: str, words: str
) -> None:
    assert reason(tmp_path, FOUNDRY | {"attn_impl": kernels, "n_heads": heads}) == words
    assert step(tmp_path, FOUNDRY | {"attn_impl": "torch", "n_heads": heads}).assumed
    assert step(tmp_path, FOUNDRY | {"attn_impl": "flash", "n_heads": "8"}).assumed


RECOMPUTED = {
    "selective": ("SAC", "selective", "selective AC", "per-op SAC", "SAC (op)", "op-level SAC", ""),
    "full": ("full", "Full AC", "True", "every block", "all layers", "full (non-reentrant)"),
    "none": ("none", "no AC", "off", "disabled", "False"),
}


@pytest.mark.parametrize(
    ("mode", "words"), [(mode, words) for mode, cells in RECOMPUTED.items() for words in cells]
)
def test_what_people_write_of_activation_checkpointing(
    tmp_path: Path, mode: str, words: str
) -> None:
    found = read(step(tmp_path, TITAN | {"activation_checkpointing": words})).checkpointing
    assert (found.mode, found.every, found.save_every) == (mode, 1, 2 if mode == "selective" else 1)


@pytest.mark.parametrize(
    "words",
    [
        "True (dynamic)", "full (memory budget)", "full (every 2nd)", "full SAC",
        "selective op except attention", "AC", "attention only",
    ],
)
def test_activation_checkpointing_of_two_minds_is_refused(tmp_path: Path, words: str) -> None:
    assert reason(tmp_path, TITAN | {"activation_checkpointing": words}).startswith(
        "activation_checkpointing: "
    )


def test_a_row_of_torchtitan_that_does_not_say_is_taken_as_its_source_has_it(
    tmp_path: Path
) -> None:
    """Its benchmarks are with selective activation checkpointing; a row without the column is no
    more, and says so."""
    row = TITAN | {"precision": "bf16"}
    made = step(tmp_path, without(row, "activation_checkpointing"))
    said, known = (
        "selective activation checkpointing of ops, as the source's rows have it",
        step(tmp_path, row),
    )
    assert read(made).checkpointing == read(known).checkpointing
    assert said in made.assumed
    assert said not in known.assumed
    assert made.widened > known.widened


PRECISIONS = {
    False: (
        *(
            "bf16", "bfloat16", "torch.bfloat16", "bf16-mixed", "amp bf16", "mp bf16",
            "bf16 mixed precision (autocast)",
        ),
        *(
            "bf16 params, fp32 reduce", "bf16 + fp32 main grads", "mixed bf16/fp32",
            "bf16/fp32 mixed precision",
        ),
    ),
    True: ("float8 rowwise", "fp8", "float8", "bf16 + fp8", "float8 tensorwise + bf16", "fp8_e4m3"),
}


@pytest.mark.parametrize(
    ("narrow", "words"),
    [(narrow, words) for narrow, cells in PRECISIONS.items() for words in cells],
)
def test_words_of_precision_say_whether_some_products_are_in_8_bits(
    tmp_path: Path, narrow: bool, words: str
) -> None:
    """All others are in bf16, torchtitan's own, where only those are named."""
    made = step(tmp_path, TITAN | {"precision": words, "float8": ""})
    found = read(made)
    assert (found.execution.float8, found.precision.parameters, found.precision.reduce) == (
        narrow, "bfloat16", "float32",
    )
    assert ("float8 rowwise takes the time of tensorwise" in made.assumed) == ("rowwise" in words)


@pytest.mark.parametrize(
    "words",
    [
        *(
            "full bf16", "Full bf16 training", "pure bf16", "bf16-true", "all bf16", "bf16 only",
            "int8", "bf16 + int8 linears", "fp64",
        ),
        *(
            "16-true", "bf16, no fp32 master weights", "bf16 with stochastic rounding",
            "bf16 (nf4 weights)", "mxfp8", "mixed", "bf16 LoRA",
        ),
    ],
)
def test_precision_that_nothing_here_has_or_nobody_understands_is_refused(
    tmp_path: Path, words: str
) -> None:
    assert reason(tmp_path, TITAN | {"precision": words}).startswith("precision: expected ")


def test_8_bits_by_one_column_and_none_by_another_contradict_each_other(tmp_path: Path) -> None:
    row = TITAN | {"precision": "float8 rowwise", "float8": "False"}
    assert reason(tmp_path, row) == "float8: false contradicts precision = float8 rowwise"


COMPILED = {
    True: ("True (dynamic)", "True (per-block)", "compiled", "inductor", "yes"),
    False: ("eager", "False (eager)", "no"),
}


@pytest.mark.parametrize(
    ("compiled", "words"),
    [(compiled, words) for compiled, cells in COMPILED.items() for words in cells],
)
def test_what_people_write_of_compiling(tmp_path: Path, compiled: bool, words: str) -> None:
    made = step(tmp_path, TITAN | {"torch_compile": words})
    assert read(made).execution.compile is compiled
    assert ("kernels of dynamic shapes as those of static ones" in made.assumed) == (
        words == "True (dynamic)"
    )


@pytest.mark.parametrize(
    "words", ["max-autotune", "True (max-autotune)", "True (eager)", "False (inductor)", "default"]
)
def test_compiling_that_nobody_understands_is_refused(tmp_path: Path, words: str) -> None:
    assert reason(tmp_path, TITAN | {"torch_compile": words}).startswith(
        "torch_compile: expected True or False, found "
    )


SHARDED = {
    ("full", 1): (
        "FULL_SHARD", "full shard", "ShardingStrategy.FULL_SHARD", "FSDP (ZeRO-3)",
        "FSDP FULL_SHARD", "ZeRO stage 3",
    ),
    ("grad_op", 1): (
        "SHARD_GRAD_OP", "shard-grad-op", "ZeRO-2", "FSDP (SHARD_GRAD_OP)", "FSDP1 (SHARD_GRAD_OP)",
        "FSDP1, grad_op",
    ),
    ("full", 2): ("HYBRID_SHARD", "hybrid", "HSDP", "FSDP hybrid_shard"),
    ("grad_op", 2): ("_HYBRID_SHARD_ZERO2", "HYBRID_SHARD_ZERO2", "hybrid zero-2"),
    ("", 16): ("NO_SHARD", "no shard", "DDP", "DDP (NO_SHARD)"),
}
TWO_NODES = {"n_gpus": "16", "global_batch_seqs": "", "tokens_per_s_per_gpu": ""}


@pytest.mark.parametrize(
    ("form", "replicas", "words"),
    [(*key, words) for key, cells in SHARDED.items() for words in cells],
)
@pytest.mark.parametrize(
    "row", [FMS | {"n_gpus": "16"}, FOUNDRY | TWO_NODES], ids=["fms", "foundry"]
)
def test_what_people_write_of_sharding(
    tmp_path: Path, row: dict[str, str], form: str, replicas: int, words: str
) -> None:
    found = read(step(tmp_path, row | {"sharding": words}))
    assert (getattr(found.options, "sharding", ""), found.mesh.dp_replicate) == (form, replicas)
    assert plan(found, device="cuda").of_rank(0).steady


@pytest.mark.parametrize(
    ("columns", "kept"),
    [
        ({}, "auto"), ({"reshard_after_forward": "False"}, False),
        ({"reshard_after_forward": "4"}, 4),
    ],
)
@pytest.mark.parametrize(
    "row", [FMS | {"n_gpus": "16"}, FOUNDRY | TWO_NODES], ids=["fms", "foundry"]
)
def test_fsdp2_is_what_it_is_called_where_the_source_s_own_rows_are_fsdp1(
    tmp_path: Path, row: dict[str, str], columns: dict[str, str], kept: bool | int | str
) -> None:
    made, usual = step(tmp_path, row | {"sharding": "FSDP2"} | columns), step(tmp_path, row)
    found = read(made)
    assert (found.strategy, found.mesh.dp_shard, found.options.reshard_after_forward) == (
        "fsdp2", 16, kept,
    )  # type: ignore[attr-defined]
    assert made.widened > usual.widened


REPLICATED = [
    ("HSDP (dp_replicate=2)", {"dp_shard": ""}, (2, 8)),
    ("HSDP (dp_replicate=8)", {"dp_shard": ""}, (8, 2)),
    ("HSDP, data_parallel_replicate_degree = 4", {"dp_shard": "4"}, (4, 4)),
    ("FSDP, dp_shard 4", {"dp_shard": ""}, (4, 4)),
    ("FSDP", {"dp_shard": "", "dp_replicate": "4"}, (4, 4)),
    ("FSDP", {"dp_shard": "-1", "dp_replicate": "2"}, (2, 8)),
    ("HSDP (dp_shard=-1, dp_replicate=4)", {"dp_shard": ""}, (4, 4)),
    ("FSDP (dp_replicate=1)", {"dp_shard": ""}, (1, 16)),
    ("DDP", {"dp_shard": "", "dp_replicate": "16"}, (16, 1)),
]


@pytest.mark.parametrize(("technique", "columns", "shape"), REPLICATED)
def test_replicas_and_shards_follow_from_each_other(
    tmp_path: Path, technique: str, columns: dict[str, str], shape: tuple[int, int]
) -> None:
    found = read(
        step(
            tmp_path, TITAN | {"technique": technique, "n_gpus": "16", "global_batch": ""} | columns
        )
    )
    assert (found.mesh.dp_replicate, found.mesh.dp_shard) == shape


@pytest.mark.parametrize(
    ("technique", "columns", "words"),
    [
        (
            "HSDP (dp_replicate=2)", {"dp_shard": "4"},
            "dp_shard × dp_replicate: 4 × 2 are not n_gpus = 16",
        ),
        (
            "HSDP (dp_replicate=2)", {"dp_shard": "", "dp_replicate": "4"},
            "dp_replicate: 2 contradicts 4",
        ),
        ("HSDP (dp_replicate=3)", {"dp_shard": ""}, "dp_replicate: 3 does not divide n_gpus = 16"),
        ("HSDP (dp_replicate=0)", {"dp_shard": ""}, "dp_replicate: 0 does not divide n_gpus = 16"),
        ("DDP", {"dp_shard": "", "dp_replicate": "4"}, "dp_shard: 4 contradicts technique = DDP"),
    ],
)
def test_replicas_that_contradict_shards_or_the_number_of_gpus_are_refused(
    tmp_path: Path, technique: str, columns: dict[str, str], words: str
) -> None:
    assert (
        reason(
            tmp_path, TITAN | {"technique": technique, "n_gpus": "16", "global_batch": ""} | columns
        )
        == words
    )


@pytest.mark.parametrize(
    "words",
    [
        "FULL_SHARD (ZeRO-2)", "NO_SHARD, HSDP", "ZeRO-1", "sharded", "FSDP2, NO_SHARD",
        "FSDP offload", "()",
    ],
)
@pytest.mark.parametrize("row", [FMS, FOUNDRY], ids=["fms", "foundry"])
def test_sharding_of_two_minds_or_none_is_refused(
    tmp_path: Path, row: dict[str, str], words: str
) -> None:
    assert reason(tmp_path, row | {"sharding": words}).startswith("sharding: expected ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("NO_SHARD", ("ddp", 8, None)), ("_HYBRID_SHARD_ZERO2", ("hsdp", 2, False)),
        ("FSDP hybrid shard, no reshard", ("hsdp", 2, False)),
        ("FSDP1 HYBRID_SHARD", ("fsdp1", 2, None)),
    ],
)
def test_torch_s_words_of_sharding_are_a_technique_too(
    tmp_path: Path, words: str, expected: tuple[str, int, bool | None]
) -> None:
    gpus = "8" if expected[0] == "ddp" else "16"
    found = read(
        step(
            tmp_path,
            TITAN | {"technique": words, "dp_shard": "", "n_gpus": gpus, "global_batch": ""},
        )
    )
    kept = getattr(found.options, "reshard_after_forward", None)
    assert (found.strategy, found.mesh.dp_replicate, kept) == expected


def unread(tmp_path: Path, change: dict[str, str]) -> str:
    """Why a product with this change is skipped."""
    (skipped,) = rows(table(tmp_path / "g.csv", PRODUCT | change))
    assert isinstance(skipped, Skipped), skipped
    return skipped.reason


def test_replicas_of_nodes_are_no_ddp(tmp_path: Path) -> None:
    assert reason(tmp_path, TITAN | {"technique": "DDP, hybrid"}).startswith(
        "technique: expected FSDP, FSDP1, HSDP or DDP"
    )
    made = step(tmp_path, TITAN | {"technique": "HYBRID_SHARD", "dp_shard": "", "n_gpus": "16"})
    assert "FSDP2, which is torchtitan's own" not in made.assumed


ALONE = (
    (TITAN, {"technique": "HSDP", "dp_shard": "8"}, {"technique": "FSDP", "dp_shard": "8"}),
    (
        TITAN, {"technique": "FSDP1 HYBRID_SHARD", "dp_shard": "8"},
        {"technique": "FSDP1", "dp_shard": "8"},
    ),
    (TITAN, {"technique": "HSDP", "dp_shard": ""}, {"technique": "FSDP", "dp_shard": ""}),
    (FOUNDRY, {"sharding": "HYBRID_SHARD"}, {"sharding": "FULL_SHARD"}),
    (
        FMS, {"n_gpus": "8", "mfu_frac": ""},
        {"n_gpus": "8", "mfu_frac": "", "sharding": "FULL_SHARD"},
    ),
)


@pytest.mark.parametrize(("row", "hybrid", "whole"), ALONE)
def test_a_hybrid_of_one_replica_is_named_as_what_it_is_taken_for(
    tmp_path: Path, row: dict[str, str], hybrid: dict[str, str], whole: dict[str, str]
) -> None:
    """Eight GPUs that shard over eight have no replicas, whatever the row calls it: the same step
    as of full shards, and said to be."""
    made, other = step(tmp_path, row | hybrid), step(tmp_path, row | whole)
    assert read(made).options == read(other).options
    assert read(made).mesh == read(other).mesh
    words = (
        "a hybrid of one replica as 8 shards over all GPUs, for there is nothing that it "
        "replicates"
    )
    assert (words in made.assumed, words in other.assumed) == (True, False)


def test_a_hybrid_of_several_replicas_is_one(tmp_path: Path) -> None:
    made = step(tmp_path, TITAN | {"technique": "HSDP", "dp_shard": "4"})
    assert not [words for words in made.assumed if "hybrid" in words]


DENSE = (
    "max achievable matmul", "GEMM peak", "gemm", "HGEMM (cuBLAS)", "matmul, no sparsity",
    "dense GEMM", "",
)
ANOTHER_KIND = (
    "sparse matmul", "2:4 sparse GEMM", "peak with sparsity", "batched GEMM", "bmm", "grouped gemm",
    "p2p NVLink", "attention",
)


@pytest.mark.parametrize("words", DENSE)
@pytest.mark.parametrize(
    "shape", ["1024x10240x5120", "1024*10240*5120", "1024 X 10240 X 5120", "1024 × 10240 × 5120"]
)
def test_a_dense_product_is_one_however_its_kind_and_shape_are_written(
    tmp_path: Path, words: str, shape: str
) -> None:
    (made,) = rows(
        table(
            tmp_path / "g.csv",
            PRODUCT | {"kind": words, "shape_mxnxk": shape, "notes": "no sparsity"},
        )
    )
    assert isinstance(made, Product)
    assert made.shape == (1024, 10240, 5120)


@pytest.mark.parametrize("words", ANOTHER_KIND)
def test_a_product_of_another_kind_is_not_taken_for_a_dense_one(tmp_path: Path, words: str) -> None:
    assert unread(tmp_path, {"kind": words}).startswith("kind: expected a dense product, found ")


@pytest.mark.parametrize(
    "notes", ["with sparsity", "2:4", "batched, 16", "batch=8", "grouped by expert"]
)
def test_a_note_that_a_product_was_sparse_or_several_is_read(tmp_path: Path, notes: str) -> None:
    assert unread(tmp_path, {"notes": notes}).startswith("notes: expected a dense product, found ")


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("1x1x1", "271.2 of 1x1x1 are 7.37e-09 us, where a kernel takes at least 1"),
        ("256x512x512", "271.2 of 256x512x512 are 0.495 us, where a kernel takes at least 1"),
        (
            "1x65536x65536",
            "271.2 of 1x65536x65536 are 31.7 us, where its bytes from memory take 4.15e+03",
        ),
        (
            "16384x16x16384",
            "271.2 of 16384x16x16384 are 31.7 us, where its bytes from memory take 198",
        ),
    ],
)
def test_a_rate_that_no_kernel_of_its_shape_can_reach_is_refused(
    tmp_path: Path, shape: str, words: str
) -> None:
    """By its start, and by its bytes beyond any cache: of an A100 of 2,039 GB/s at 87 % of its
    peak."""
    assert unread(tmp_path, {"gpu": "NVIDIA A100 SXM 80GB", "shape_mxnxk": shape}) == (
        f"tflops: {words}: another shape, or another unit"
    )


@pytest.mark.parametrize(
    "shape", ["512x512x1024", "2048x2048x2048", "8192x8192x128", "4096x8192x8192"]
)
def test_small_products_that_stay_in_the_cache_may_be_fast(tmp_path: Path, shape: str) -> None:
    (made,) = rows(table(tmp_path / "g.csv", PRODUCT | {"shape_mxnxk": shape}))
    assert isinstance(made, Product)


@pytest.mark.parametrize(
    "shape", ["8x1024x10240x5120", "1024x10240*5120", "1,024x10,240x5,120", "4096"]
)
def test_a_shape_that_is_no_single_product_is_refused(tmp_path: Path, shape: str) -> None:
    assert unread(tmp_path, {"shape_mxnxk": shape}).startswith("shape_mxnxk: expected sizes as ")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("BF16", "bfloat16"), ("torch.bfloat16", "bfloat16"), ("half", "float16"),
        ("FP32", "float32"),
    ],
)
def test_dtypes_of_products_as_people_write_them(tmp_path: Path, dtype: str, expected: str) -> None:
    (made,) = rows(table(tmp_path / "g.csv", PRODUCT | {"dtype": dtype, "tflops": "15"}))
    assert isinstance(made, Product)
    assert made.dtype == expected


@pytest.mark.parametrize("dtype", ["fp8 (e4m3)", "float8_e4m3fn", "FP8_E5M2", "FP8"])
def test_products_of_8_bits_as_people_write_them(tmp_path: Path, dtype: str) -> None:
    (made,) = rows(table(tmp_path / "g.csv", PRODUCT | {"dtype": dtype, "gpu": "NVIDIA H100 SXM"}))
    assert isinstance(made, Product)
    assert made.dtype == "float8"


@pytest.mark.parametrize(
    ("gpu", "dtype", "width"),
    [("H100 SXM", "bf16", 0.1), ("H100 SXM", "fp8", 0.3), ("L40S", "bf16", 0.3)],
)
def test_a_product_has_the_band_of_its_own_efficiency(
    tmp_path: Path, gpu: str, dtype: str, width: float
) -> None:
    """Calibrated of 16 bits on H100, assumed elsewhere."""
    (made,) = rows(table(tmp_path / "g.csv", PRODUCT | {"dtype": dtype, "gpu": gpu}))
    assert isinstance(made, Product)
    assert made.band == pytest.approx((1 - width, 1 / (1 - width)))


REDUCED = [
    (FMS, "fp16", "float16", "reductions in fp16, as its products"),
    (FMS, "fp16 mixed", "float16", "reductions in fp16, as its products"),
    (FMS, "bf16", "bfloat16", "reductions in bf16, as the source has them"),
    (NANOTRON, "fp16", "float16", "reductions in fp16, as its products"),
    (NANOTRON, "bf16", "bfloat16", "reductions in bf16, as the source has them"),
    (NANOTRON, "fp16 + fp32 grad accumulation", "float32", ""),
    (MEGATRON, "bf16", "bfloat16", "reductions in bf16, as its products"),
    (MEGATRON, "fp16", "float16", "reductions in fp16, as the source has them"),
    (MEGATRON, "bf16, fp32 reduce", "float32", ""),
    (TITAN, "fp16", "float32", "reductions in fp32, as the source has them"),
]


@pytest.mark.parametrize(("row", "precision", "reduce", "words"), REDUCED)
def test_reductions_that_a_row_does_not_say_are_the_source_s_or_follow_its_products(
    tmp_path: Path, row: dict[str, str], precision: str, reduce: str, words: str
) -> None:
    made = step(tmp_path, row | {"precision": precision})
    found = read(made).precision
    assert (found.parameters, found.reduce) == (
        "float16" if precision.startswith("fp16") else "bfloat16", reduce,
    )
    said = [
        one.removesuffix(", for the row does not say")
        for one in made.assumed
        if one.startswith("reductions in ")
    ]
    assert said == [words] * bool(words)


def test_fp16_is_less_certain_where_the_source_s_rows_are_in_bf16(tmp_path: Path) -> None:
    for row in (FMS, NANOTRON, TITAN):
        narrow, usual = (step(tmp_path, row | {"precision": said}) for said in ("fp16", "bf16"))
        assert "without its scaler of gradients" in narrow.assumed
        assert narrow.widened > usual.widened
    assert (
        "without its scaler of gradients"
        not in step(tmp_path, MEGATRON | {"precision": "fp16"}).assumed
    )


@pytest.mark.parametrize("row", [FMS, NANOTRON, MEGATRON], ids=["fms", "nanotron", "megatron"])
def test_reductions_in_the_other_dtype_of_two_bytes_are_still_refused(
    tmp_path: Path, row: dict[str, str]
) -> None:
    words = "precision: expected reductions in bf16 or fp32, found 'bf16, fp16 reduce'"
    assert reason(tmp_path, row | {"precision": "bf16, fp16 reduce"}) == words
