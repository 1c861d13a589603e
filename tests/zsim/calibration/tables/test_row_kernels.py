"""Words of attention and of optimizers: which kernels ran, which did not, and what is refused or
remarked on."""

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
)
from tests.zsim.calibration.tables.test_row_checks import read, step
from tests.zsim.calibration.tables.test_row_sources import published
from zsim.calibration import accuracy
from zsim.calibration.accuracy import Predicted
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario

H100 = {"gpu": "H100-80GB", "tokens_per_s_per_gpu": "9000", "mfu_frac": ""}
ON_H100 = FMS | H100
MATH = (
    "SDPA math", "SDPA without flash", "no flash attention", "SDPA, non-flash",
    "SDPA math (flash disabled)", "SDPA, flash=False",
)
ATTENTIONS = {
    ("sdpa", "flash2"): (
        *(
            "SDPA flash v2", "flash", "FA2", "flash-attn 2.5.8", "SDPA",
            "scaled_dot_product_attention", "flash_attention_2",
        ),
        *(
            "SDPA (flash, efficient, math)", "SDPA (no math)", "sliding window flash",
            "FlexAttention", "flash, not math",
        ),
        *("FlashAttention-2 (Dao-AILab)", "flash attention", "FlashAttention v2.8 (CUTLASS)", "FA"),
    ),
    ("sdpa", "flash3"): (
        *("flash_attention_3", "flash v3", "FA3", "FlashAttention-3"),
        *("SDPA cuDNN", "cuDNN", "cudnn flash attention", "TransformerEngine fused"),
    ),
    ("sdpa", "triton"): ("triton", "flash/triton", "flash v1", "FlashAttention 1"),
    ("math", "flash2"): (
        *MATH, "SDPA without FA or mem_efficient",
        *(
            "SDPA math, no flash or mem_efficient", "no flash/mem_efficient",
            "SDPA without flash and without efficient",
        ),
    ),
    ("efficient", "flash2"): (
        "xformers", "SDPA mem_efficient", "memory-efficient attention", "mem_efficient (flash off)",
        "cutlass",
    ),
    ("explicit", "flash2"): ("eager", "explicit", "naive attention, not flash"),
}
CELLS = [(key, words) for key, cells in ATTENTIONS.items() for words in cells]


def kernel(found: Scenario) -> str:
    return next(
        one.implementation for one in found.model.blocks[0].operators if one.kind == "attention"
    )


@pytest.mark.parametrize(("expected", "words"), CELLS)
def test_what_people_write_of_attention(
    tmp_path: Path, expected: tuple[str, str], words: str
) -> None:
    found = read(step(tmp_path, ON_H100 | {"attention": words}))
    assert (kernel(found), found.execution.attention_kernels) == expected
    assert plan(found, device="cuda").of_rank(0).steady


ANY = {
    "FOUNDRY": FOUNDRY | {"gpu": "h100_80gb"},
    "MEGATRON": MEGATRON,
    "NANOTRON": NANOTRON,
    "TITAN": TITAN | {"activation_checkpointing": "full"},
}


@pytest.mark.parametrize("source", ANY)
@pytest.mark.parametrize(
    ("column", "words", "expected"),
    [("attention", "SDPA math", "math"), ("attn_impl", "FA2", "sdpa")],
)
def test_all_sources_read_the_same_words(
    tmp_path: Path, source: str, column: str, words: str, expected: str
) -> None:
    made = step(tmp_path, ANY[source] | {column: words})
    assert kernel(read(made)) == expected
    assert not any(one.startswith(f"{column} = ") for one in made.assumed)
    assert plan(read(made), device="cuda").of_rank(0).steady


NAMED = {
    "cuDNN": "cuDNN's attention as FlashAttention 3",
    "flash v1": "FlashAttention 1 as Triton's, the nearest that is known",
    "xformers": "xformers attention, memory as torch's memory-efficient one and time as "
                "FlashAttention 2",
    "mem_efficient": "efficient attention, memory as torch's memory-efficient one and time as "
                     "FlashAttention 2",
    "FlexAttention": "FlexAttention as FlashAttention 2",
    "sliding window flash": "attention = 'sliding window flash' as attention over whole "
                            "sequences, causal",
    "flash with tiger": "attention = 'flash with tiger', of which tiger changes nothing: it is "
                        "not known",
}


@pytest.mark.parametrize("words", NAMED)
def test_kernels_that_are_timed_as_others_are_named_and_widen_the_band(
    tmp_path: Path, words: str
) -> None:
    plain, made = step(tmp_path, ON_H100), step(tmp_path, ON_H100 | {"attention": words})
    assert NAMED[words] in made.assumed
    assert made.widened > plain.widened


def test_cudnn_on_an_older_gpu_is_flash_attention_2(tmp_path: Path) -> None:
    assert read(step(tmp_path, FMS | {"attention": "cuDNN"})).execution.attention_kernels == (
        "flash2"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *(
            (f"{kind} flash", f"attention: {kind} attention splits sequences over GPUs")
            for kind in ("ring", "ulysses", "context parallel")
        ),
        (
            "ring attention flash",
            "attention: ring attention splits sequences over GPUs, and only "
            "data parallelism is simulated",
        ),
        ("paged", "attention: expected SDPA flash, math, efficient"),
        ("flash v4", "attention: expected FlashAttention 1 to 3"),
        ("flash or math", "attention: expected one kernel, found flash and math"),
    ],
)
def test_attention_that_nothing_here_has_is_why_a_row_is_skipped(
    tmp_path: Path, words: str, said: str
) -> None:
    assert reason(tmp_path, ON_H100 | {"attention": words}).startswith(said)


def predicted(tmp_path: Path, row: dict[str, str]) -> Predicted:
    found = accuracy.predict(step(tmp_path, row))
    assert isinstance(found, Predicted), found
    return found


def test_sdpa_without_flash_is_slower_and_its_band_covers_both_kernels_that_are_left(
    tmp_path: Path
) -> None:
    """Its math kernel is what people mean; torch itself takes the memory-efficient one unless that
    is disabled too."""
    flash, math, either, efficient = (
        predicted(tmp_path, FMS | {"attention": words})
        for words in ("flash", "math", "SDPA without flash", "mem_efficient")
    )
    assert flash.predicted <= efficient.predicted < math.predicted == either.predicted
    assert (
        either.predicted * either.band[0]
        < efficient.predicted * efficient.band[0]
        < math.predicted * math.band[0]
    )
    assert either.predicted * either.band[1] == pytest.approx(
        math.predicted * math.band[1], rel=0.01
    )


def test_grouped_heads_without_flash_have_no_memory_efficient_kernel(tmp_path: Path) -> None:
    row = ON_H100 | {
        "model": "llama3-8b", "attention": "SDPA without flash", "n_gpus": "8",
        "tokens_per_s_per_gpu": "5000",
    }
    assert not step(tmp_path, row).otherwise
    assert (
        len(step(tmp_path, FMS | {"n_gpus": "8", "attention": "SDPA without flash"}).otherwise) == 1
    )


OPTIMIZERS = {
    "fused": (
        "AdamW fused", "fused AdamW", "torch.optim.AdamW(fused=True)", "adamw_torch_fused",
        "FusedAdam", "AdamW, fused: true",
    ),
    "foreach": (
        *(
            "AdamW", "AdamW (foreach)", "AdamW fused=False", "AdamW, not fused",
            "AdamW foreach=True", "non-fused AdamW",
        ),
        "AdamW unfused",
    ),
    "for-loop": ("AdamW (for-loop)", "AdamW foreach=False", "AdamW, single-tensor"),
}


@pytest.mark.parametrize(
    ("expected", "words"), [(key, words) for key, cells in OPTIMIZERS.items() for words in cells]
)
def test_what_people_write_of_adamw(tmp_path: Path, expected: str, words: str) -> None:
    made = step(tmp_path, FMS | {"optimizer": words})
    assert read(made).optimizer.implementation == expected
    assert made.widened == step(tmp_path, FMS).widened
    assert (
        f"AdamW, {'fused' if expected == 'fused' else 'not fused'}, gradients clipped"
        in made.assumed
    )


@pytest.mark.parametrize(
    ("row", "usual"),
    [(FOUNDRY, "foreach"), (MEGATRON, "fused"), (NANOTRON, "fused"), (TITAN, "fused")],
    ids=list(ANY),
)
def test_all_sources_read_the_same_words_of_optimizers(
    tmp_path: Path, row: dict[str, str], usual: str
) -> None:
    for words, expected in (
        ("AdamW", usual), ("AdamW fused=True", "fused"), ("AdamW (fused=False)", "foreach")
    ):
        made = step(tmp_path, row | {"optimizer": words})
        assert read(made).optimizer.implementation == expected
        assert not any("optimizer =" in one for one in made.assumed)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("AdamW 8-bit", "states of 8 bits"), ("bnb AdamW8bit", "states of 8 bits"),
        ("AdamW bf16 states", "states of 16 bits"), ("AdamW + EMA", "an average of parameters"),
    ],
)
def test_what_makes_adamw_another_step_is_named_and_widens_the_band(
    tmp_path: Path, words: str, what: str
) -> None:
    made = step(tmp_path, FMS | {"optimizer": words})
    assert f"optimizer = {words!r} as AdamW with states of 32 bits, without {what}" in made.assumed
    assert made.widened > step(tmp_path, FMS).widened


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "AdamW, CPU offload",
            "optimizer: expected states on the GPU, for offload is not "
            "mapped, found 'AdamW, CPU offload'",
        ),
        ("paged AdamW 8bit", "optimizer: expected states on the GPU"),
        ("Muon", "optimizer: expected AdamW"), ("Muon + AdamW", "optimizer: expected AdamW alone"),
        ("AdamW fused, foreach", "optimizer: expected one implementation"),
    ],
)
def test_optimizers_that_nothing_here_has_are_why_a_row_is_skipped(
    tmp_path: Path, words: str, said: str
) -> None:
    assert reason(tmp_path, FMS | {"optimizer": words}).startswith(said)




def test_gpts_have_the_sizes_that_their_rows_say(tmp_path: Path) -> None:
    wide = {
        words: read(step(tmp_path, MEGATRON | {"d_ff": words})).model.num_parameters
        for words in ("", "8192", "5632")
    }
    assert wide[""] == wide["8192"] == wide["5632"] + 12 * (2 * 2048 + 1) * (8192 - 5632)
    vocabulary = {
        words: read(step(tmp_path, MEGATRON | {"vocab_size": words})).model.num_parameters
        for words in ("", "51200", "32000")
    }
    assert vocabulary[""] == vocabulary["51200"] == vocabulary["32000"] + (51200 - 32000) * 2048
    own = without_model(FOUNDRY) | {"d_ff": "6144"}
    assert (
        read(step(tmp_path, FOUNDRY)).model.num_parameters
        - read(step(tmp_path, own)).model.num_parameters
        == 24 * 4097 * 2048
    )
    assert reason(tmp_path, FOUNDRY | {"d_ff": "6144", "expansion_ratio": "4"}).startswith(
        "d_ff: 6144 contradicts 8192"
    )
    assert reason(tmp_path, FOUNDRY | {"d_ff": "6144"}) == (
        "expansion_ratio: 3 contradicts model = mpt-1b, which has 4"
    )


def without_model(row: dict[str, str]) -> dict[str, str]:
    return row | {"model": ""}


@pytest.mark.parametrize("row", [FOUNDRY, MEGATRON], ids=["foundry", "megatron"])
def test_fewer_heads_of_keys_are_not_those_of_a_gpt(tmp_path: Path, row: dict[str, str]) -> None:
    assert step(tmp_path, row | {"n_kv_heads": "16"}).assumed == step(tmp_path, row).assumed
    made = step(tmp_path, row | {"n_kv_heads": "4"})
    assert "keys and values of 16 heads, where the row has 4" in made.assumed
    assert made.widened > step(tmp_path, row).widened
    assert reason(tmp_path, row | {"n_kv_heads": "5"}) == (
        "n_kv_heads: 5 does not divide n_heads = 16"
    )


def test_torch_compile_is_read_of_sources_that_have_no_such_column(tmp_path: Path) -> None:
    compiled, eager = (
        step(tmp_path, FOUNDRY | {"torch_compile": words}) for words in ("True", "False")
    )
    assert (read(compiled).execution.compile, read(eager).execution.compile) == (True, False)
    assert eager.assumed == step(tmp_path, FOUNDRY).assumed
    fused, same = (
        step(tmp_path, MEGATRON | {"torch_compile": words}) for words in ("True", "False")
    )
    assert read(fused).execution == read(same).execution
    assert fused.widened > same.widened == step(tmp_path, MEGATRON).widened


@pytest.mark.parametrize("source", ["fms-fsdp", "torchtitan"])
def test_sizes_that_are_not_those_of_the_model_s_name_are_refused(
    tmp_path: Path, source: str
) -> None:
    row = published(source)
    same = {"d_model": "4096", "n_layers": "32", "n_heads": "32"}
    assert step(tmp_path, row | same).widened == step(tmp_path, row).widened
    assert reason(tmp_path, row | same | {"n_layers": "16"}) == (
        "n_layers: 16 contradicts 32, which the other fields say"
    )
