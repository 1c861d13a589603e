"""Tables in other words than those published: fewer columns, other separators and spellings. The
same rows come out, and what was read into them is said.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.zsim.calibration.tables.test_measurements import (
    FMS,
    FOUNDRY,
    MEGATRON,
    NANOTRON,
    ROWS,
    TITAN,
    found,
    reason,
    table,
)
from tests.zsim.calibration.tables.test_row_checks import read, step
from zsim.calibration import tables
from zsim.calibration.tables import Skipped, Step


def without(row: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in row.items() if name not in names}


LESS: list[tuple[dict[str, str], tuple[str, ...], str]] = [
    (FOUNDRY, ("tokens_per_s",), "the time by tokens_per_s_per_gpu, for there is no tokens_per_s"),
    (FOUNDRY, ("grad_accum",), ""),
    (FOUNDRY, ("micro_batch",), "micro-batches of 8, which global_batch_seqs makes"),
    (FOUNDRY, ("model",), ""), (FOUNDRY, ("mp_mode",), "mp_mode DEFAULT, which is Composer's own"),
    (
        FOUNDRY, ("n_heads", "n_layers", "d_model"),
        "sizes of the preset mpt-1b where the row has none",
    ),
    (TITAN, ("dp_shard",), "shards over 8 GPUs"),
    (TITAN, ("technique",), "FSDP2, which is torchtitan's own"),
    (TITAN, ("torch_compile",), "eager, for the row does not say whether it is compiled"),
    (
        TITAN | {"global_batch": "16"}, ("local_batch",),
        "micro-batches of 2, which global_batch makes of one a step",
    ),
    (
        TITAN | {"tokens_per_s_total": "53336"}, ("tokens_per_s_per_gpu",),
        "the time by tokens_per_s_total",
    ),
    (NANOTRON, ("nodes", "status", "model"), ""), (NANOTRON, ("dp",), ""),
    (NANOTRON | {"global_batch_seqs": "64"}, ("grad_accum",), ""),
    (
        NANOTRON | {"step_time_s_derived": "0.8161"}, ("tokens_per_s_per_gpu",),
        "the time by step_time_s_derived",
    ),
    (MEGATRON, ("framework",), "Megatron-DeepSpeed, for the row names no framework"),
    (MEGATRON, ("n_gpus",), "as many GPUs as dp says"),
    (MEGATRON | {"step_time_s": "0.3"}, ("iter_time_ms",), "the time by step_time_s"),
    (MEGATRON | {"global_batch_seqs": "32"}, ("n_microbatches",), ""), (FMS, ("mfu_frac",), ""),
    (FMS | {"global_batch_seqs": "256"}, ("grad_accum",), ""),
]


@pytest.mark.parametrize(
    ("row", "names", "words"), LESS, ids=[f"{'-'.join(names)}-{len(row)}" for row, names, _ in LESS]
)
def test_a_column_that_others_make_up_for_may_be_missing(
    tmp_path: Path, row: dict[str, str], names: tuple[str, ...], words: str
) -> None:
    whole, less = step(tmp_path, row), step(tmp_path, without(row, *names))
    assert less.seconds == pytest.approx(whole.seconds, rel=1e-4)
    assert [text for text in less.assumed if text.startswith(words)]
    if names not in (("mp_mode",), ("torch_compile",)):
        assert replace(read(less), description="", text="") == replace(
            read(whole), description="", text=""
        )


def test_what_no_other_column_makes_up_for_is_still_missing(tmp_path: Path) -> None:
    assert reason(tmp_path, without(FOUNDRY, "tokens_per_s", "tokens_per_s_per_gpu")) == (
        "tokens_per_s: missing"
    )
    assert reason(tmp_path, without(FOUNDRY, "model", "d_model")) == "d_model: missing"
    assert reason(tmp_path, without(FOUNDRY, "grad_accum", "global_batch_seqs")) == (
        "grad_accum: missing"
    )
    assert reason(tmp_path, FOUNDRY | {"micro_batch": "", "global_batch_seqs": "500"}) == (
        "global_batch_seqs: 500 is no multiple of 64, which the other fields say"
    )


def test_without_compile_the_band_is_as_wide_as_it_makes_of_a_step(tmp_path: Path) -> None:
    """torch.compile moves a step by 15 to 25 %."""
    assert (
        step(tmp_path, without(TITAN, "torch_compile")).widened
        > 0.15 + step(tmp_path, TITAN).widened
    )


@pytest.mark.parametrize("source", ROWS)
@pytest.mark.parametrize("separator", [";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_other_separators_capitals_and_encodings_are_read(
    tmp_path: Path, source: str, separator: str, encoding: str
) -> None:
    row = ROWS[source]
    path = tmp_path / ("t.tsv" if separator == "\t" else "t.csv")
    head = separator.join(name.upper().replace("_", " ") for name in row)
    path.write_text(f"{head}\n{separator.join(row.values())}\n", encoding=encoding)
    assert [name for _, name in tables.files(tmp_path).files] == [path.name]
    (made,) = tables.rows(path, name="t.csv")
    assert made == step(tmp_path, row)


@pytest.mark.parametrize(
    ("row", "name", "words", "plain"),
    [
        (TITAN, "tokens_per_s_per_gpu", "6,667", "6667"),
        (FOUNDRY, "tokens_per_s", "154,171.0", "154171"),
        (FOUNDRY, "activation_checkpointing", "full", "True"),
        (FOUNDRY, "activation_checkpointing", "none", "False"),
        (FOUNDRY, "attn_impl", "FA2", "flash"),
        (FOUNDRY, "attn_impl", "Flash Attention 2", "flash"),
        (TITAN, "torch_compile", "on", "True"),
        *(
            (NANOTRON, "zero_stage", said, plain)
            for said, plain in (
                ("ZeRO-1", "1"), ("zero3", "3"), ("ZeRO stage 2", "2"), ("none", "0")
            )
        ),
    ],
)
def test_a_value_is_known_however_it_is_spelled(
    tmp_path: Path, row: dict[str, str], name: str, words: str, plain: str
) -> None:
    said, usual = step(tmp_path, row | {name: words}), step(tmp_path, row | {name: plain})
    assert (said.scenario, said.seconds, said.assumed) == (
        usual.scenario, usual.seconds, usual.assumed,
    )


def test_commas_that_group_no_thousands_are_no_numbers(tmp_path: Path) -> None:
    assert reason(tmp_path, TITAN | {"tokens_per_s_per_gpu": "6,66"}) == (
        "tokens_per_s_per_gpu: expected a number, found '6,66'"
    )


def test_sdpa_is_flash_attention_and_less_certain(tmp_path: Path) -> None:
    made = step(tmp_path, FOUNDRY | {"attn_impl": "sdpa"})
    assert read(made).execution.attention_kernels == "flash2"
    assert made.widened > step(tmp_path, FOUNDRY | {"attn_impl": "flash"}).widened


def test_a_part_of_the_blocks_is_no_way_of_llm_foundry(tmp_path: Path) -> None:
    words = "activation_checkpointing: expected full or none, found 'selective'"
    assert reason(tmp_path, FOUNDRY | {"activation_checkpointing": "selective"}) == words


SAID = [
    ("FSDP, reshard_after_forward=False", False),
    ("FSDP, reshard_after_forward: True", True),
    ("FSDP2 (reshard_after_forward=4)", 4),
    ("FSDP reshard never", False),
    ("FSDP, no resharding", False),
    ("FSDP without reshard after forward", False),
    ("FSDP ZeRO-2", False),
    ("FSDP SHARD_GRAD_OP", False),
    ("FSDP, ZeRO-3", True),
    ("FSDP, reshard_after_forward=None", "auto"),
    ("FSDP full shard", "auto"),
]


@pytest.mark.parametrize(("words", "value"), SAID)
def test_a_technique_says_whether_parameters_are_freed_after_forward(
    tmp_path: Path, words: str, value: object
) -> None:
    asked = read(step(tmp_path, TITAN | {"technique": words})).options.reshard_after_forward
    assert (asked, type(asked)) == (value, type(value))


@pytest.mark.parametrize(
    "column", ["reshard_after_forward", "fsdp_reshard_after_forward", "Reshard After Forward"]
)
@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("True", True), ("False", False), ("never", False), ("always", True), ("4", 4),
        ("default", "auto"),
    ],
)
def test_a_column_says_so_too(tmp_path: Path, column: str, cell: str, value: object) -> None:
    made = step(tmp_path, TITAN | {column: cell})
    assert read(made).options.reshard_after_forward == value
    assert not any("not known" in words for words in made.assumed)


def test_fsdp1_frees_parameters_or_keeps_them(tmp_path: Path) -> None:
    for cell, sharding in (("", "full"), ("True", "full"), ("False", "grad_op")):
        for row in (TITAN | {"technique": "FSDP1"}, FOUNDRY, FMS):
            asked = read(step(tmp_path, row | {"reshard_after_forward": cell}))
            assert (asked.strategy, asked.options.sharding) == ("fsdp1", sharding)
    hybrid = read(step(tmp_path, TITAN | {"technique": "FSDP1", "dp_shard": "4"}))
    assert (hybrid.strategy, hybrid.mesh.dp_replicate) == ("fsdp1", 2)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            TITAN | {"technique": "FSDP, prefetch off"},
            "technique: expected FSDP, FSDP1, HSDP or DDP",
        ),
        (TITAN | {"technique": "magic"}, "technique: expected FSDP, FSDP1, HSDP or DDP"),
        (
            TITAN | {"technique": "FSDP, no reshard", "reshard_after_forward": "True"},
            "reshard_after_forward: True contradicts False",
        ),
        (
            TITAN | {"technique": "FSDP ZeRO-2, ZeRO-3"},
            "technique: 'FSDP ZeRO-2, ZeRO-3' says two things of reshard_after_forward",
        ),
        (
            TITAN | {"reshard_after_forward": "sometimes"},
            "reshard_after_forward: expected True, False or a number of ranks",
        ),
        (
            TITAN | {"technique": "FSDP1", "reshard_after_forward": "4"},
            "reshard_after_forward: expected True or False of FSDP1, found 4",
        ),
        (
            TITAN | {"technique": "DDP", "dp_shard": "", "reshard_after_forward": "True"},
            "reshard_after_forward: True contradicts",
        ),
        (
            TITAN | {"technique": "FSDP + compile", "torch_compile": "False"},
            "torch_compile: False contradicts technique = FSDP + compile",
        ),
        (
            TITAN | {"technique": "FSDP + float8"},
            "float8: none contradicts technique = FSDP + float8",
        ),
        (
            TITAN | {"float8": "mxfp8"},
            "float8: H100 SXM of 96 GB has no products of scaled blocks, which mxfp8 is",
        ),
        (
            TITAN | {"float8": "nvfp4", "gpu": "B200"},
            "float8: expected products of 8 bits, found nvfp4",
        ),
        (
            FOUNDRY | {"sharding": "SHARD_GRAD_OP", "reshard_after_forward": "True"},
            "reshard_after_forward: True contradicts sharding",
        ),
        (
            FOUNDRY | {"reshard_after_forward": "4"},
            "reshard_after_forward: expected True or False of FSDP1, found 4",
        ),
    ],
)
def test_what_a_technique_has_that_is_not_understood_is_why_its_row_is_skipped(
    tmp_path: Path, row: dict[str, str], words: str
) -> None:
    assert reason(tmp_path, row).startswith(words)


def test_a_technique_names_compile_and_float8_where_no_column_does(tmp_path: Path) -> None:
    asked = read(
        step(
            tmp_path,
            without(TITAN, "torch_compile", "float8")
            | {"technique": "FSDP2 + torch.compile + float8"},
        )
    )
    assert (asked.execution.compile, asked.execution.float8) == (True, True)


def test_rows_that_keep_parameters_are_a_pair_with_those_that_free_them(tmp_path: Path) -> None:
    """However they say it: what tells rows apart is what ran."""
    rows = (
        TITAN,
        TITAN | {"technique": "FSDP, no reshard"},
        TITAN | {"technique": "DDP", "dp_shard": ""},
    )
    made = [one for one in found(table(tmp_path / "t.csv", *rows)) if not isinstance(one, Skipped)]
    first, kept, replicas = (one.fields for one in made if isinstance(one, Step))
    assert {name for name in first if first[name] != kept[name]} == {"reshard_after_forward"}
    assert {name for name in first if first[name] != replicas[name]} == {"technique"}
