"""Words of a row that decide what ran, and are refused or remarked on where they are not understood: recipes, stages, names of models."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zsim.test_measurements import FMS, FOUNDRY, MEGATRON, NANOTRON, TITAN, reason
from tests.zsim.test_row_checks import read, step
from tests.zsim.test_row_columns import without

FLOAT8 = {
    False: ("", "N/A", "nan", "-", "null", "None", "False", "no", "off", "0", "bf16", "BF16", "fp16", "fp32", "no float8"),
    True: ("True", "yes", "1", "tensorwise", "rowwise", "rowwise_with_gw_hp", "float8 tensorwise", "fp8", "FP8 (rowwise)", "delayed"),
}
NOT_KNOWN = ("foo", "50%", "-1", "auto", "2", "bf16 all-gather", "tensorwise?", "not tensorwise", "int8")


@pytest.mark.parametrize(("narrow", "words"), [(narrow, words) for narrow, cells in FLOAT8.items() for words in cells])
def test_float8_is_what_a_recipe_or_a_yes_turns_on(tmp_path: Path, narrow: bool, words: str) -> None:
    assert read(step(tmp_path, TITAN | {"float8": words})).execution.float8 is narrow


@pytest.mark.parametrize("words", NOT_KNOWN)
def test_float8_that_nobody_understands_is_why_a_row_is_skipped(tmp_path: Path, words: str) -> None:
    assert reason(tmp_path, TITAN | {"float8": words}).startswith("float8: expected True, False or a recipe as ")


def test_a_technique_with_float8_is_contradicted_by_another_dtype_and_not_by_an_empty_cell(tmp_path: Path) -> None:
    row = TITAN | {"technique": "FSDP + float8"}
    assert reason(tmp_path, row | {"float8": "bf16"}) == "float8: bf16 contradicts technique = FSDP + float8"
    assert read(step(tmp_path, row | {"float8": "n/a"})).execution.float8 is True


@pytest.mark.parametrize("stage", ["-1", "-0", "_2", "--3", "- 1"])
def test_a_stage_below_0_is_none(tmp_path: Path, stage: str) -> None:
    assert reason(tmp_path, NANOTRON | {"zero_stage": stage}).startswith("zero_stage: expected 0, 1, 2 or 3, found")


@pytest.mark.parametrize("row", [FMS, FOUNDRY, MEGATRON, NANOTRON, TITAN], ids=["fms", "foundry", "megatron", "nanotron", "titan"])
@pytest.mark.parametrize("words", ["-1", "-2", "selective -2", "every -1", "\N{MINUS SIGN}1"])
def test_recomputing_a_number_of_blocks_below_0_is_refused(tmp_path: Path, row: dict[str, str], words: str) -> None:
    assert reason(tmp_path, row | {"activation_checkpointing": words}).startswith("activation_checkpointing: ")


LARGER = {"n_layers": "32", "d_model": "4096", "n_heads": "32"}
TIMED = {"tokens_per_s": "20000", "tokens_per_s_per_gpu": "2500", "micro_batch": "1", "grad_accum": "1", "global_batch_seqs": "8"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "mpt-7b"}, "d_model: 2048 contradicts model = mpt-7b, which has 4096"),
        ({"model": "MPT 7B"}, "d_model: 2048 contradicts model = MPT 7B, which has 4096"),
        ({"model": "mosaicml/mpt-30b-instruct"}, "d_model: 2048 contradicts model = mosaicml/mpt-30b-instruct, which has 7168"),
        (LARGER | TIMED, "d_model: 4096 contradicts model = mpt-1b, which has 2048"),
        (LARGER | TIMED | {"model": "mpt-7b", "n_layers": "30"}, "n_layers: 30 contradicts model = mpt-7b, which has 32"),
    ],
)
def test_an_mpt_of_other_sizes_than_its_name_has_is_refused(tmp_path: Path, change: dict[str, str], words: str) -> None:
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
        ("triton", "8", "n_heads: heads of 256 are wider than 128, the most that triton attention has"),
        ("flash", "4", "n_heads: heads of 512 are wider than 256, the most that flash2 attention has"),
        ("flash", "1", "n_heads: heads of 2048 are wider than 256, the most that flash2 attention has"),
    ],
)
def test_heads_wider_than_its_attention_has_are_refused(tmp_path: Path, kernels: str, heads: str, words: str) -> None:
    assert reason(tmp_path, FOUNDRY | {"attn_impl": kernels, "n_heads": heads}) == words
    assert step(tmp_path, FOUNDRY | {"attn_impl": "torch", "n_heads": heads}).assumed
    assert step(tmp_path, FOUNDRY | {"attn_impl": "flash", "n_heads": "8"}).assumed
