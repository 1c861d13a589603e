"""Published peaks of reserved memory, row by row, and what each error is made of. No constant was
fitted to them."""

from __future__ import annotations

import pytest

from tests.published.predictions import GIB, answers, besides, errors, rows, table
from tests.support.folders import PUBLISHED
from zsim.memory.holdings import holdings, live_at_peak
from zsim.scenario.plan import plan

ROWS = rows()
README = PUBLISHED / "README.md"
LAYERS, TOKENS, VOCABULARY, WIDTH, WIDE = 32, 2 * 8192, 128256, 4096, 14336


def test_the_error_table_of_the_readme_is_what_the_simulator_says_today() -> None:
    """`python -m tests.published.predictions` prints it."""
    assert table(ROWS.values()) in README.read_text(encoding="utf-8")


@pytest.mark.parametrize("row", ["t1", "t4"])
def test_torchtitan_in_eager_mode_is_within_four_percent(row: str) -> None:
    """The source does not say whether those runs had expandable segments. With them 3 to 4 % less
    is reserved than measured, without them up to 1 % more. The band was drawn when the predictions
    were known; nothing was changed to meet it."""
    assert -4 <= errors(ROWS[row])[0] <= errors(ROWS[row])[1] <= 1


@pytest.mark.parametrize("row", ["t2", "t3", "t5", "t6"])
def test_torchtitan_compiled_takes_less_than_the_eager_run_that_is_simulated(row: str) -> None:
    """torch.compile and float8 are not modelled: this only holds the eager prediction to stay
    above, by at most a tenth. Why compiling saves 5 GiB is not explained: by count a fused loss
    alone would take 15.7 GiB from the eager peak."""
    assert 0 <= errors(ROWS[row])[0] <= errors(ROWS[row])[1] <= 10


@pytest.mark.parametrize("row", ["n2", "n3", "n5"])
def test_nanotron_with_one_sequence_is_within_two_percent(row: str) -> None:
    """20 bytes a parameter, and activations. The published GB are read as 1024³ bytes, as in
    nanotron's log, and gradients are its float32 ones. Without either of the two the error would
    be 7 % larger, without both about as small."""
    assert -2 <= errors(ROWS[row])[0] <= errors(ROWS[row])[1] <= 0.5


@pytest.mark.parametrize("row", ["n1", "n4"])
def test_nanotron_with_two_sequences_lacks_two_gibibytes(row: str) -> None:
    """Residue, unexplained: as much as one bf16 copy of the logits, which one sequence would not
    need."""
    assert -6 <= errors(ROWS[row])[0] <= errors(ROWS[row])[1] <= -3
    lacking = ROWS[row].peak * GIB - answers(ROWS[row])[0].reserved_bytes - besides(ROWS[row])
    assert lacking / GIB == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize(("few", "many"), [("n2", "n3"), ("n1", "n4")])
def test_memory_of_replicas_does_not_depend_on_how_many_they_are(few: str, many: str) -> None:
    """Eight GPUs and 64 were measured alike, and are predicted alike."""
    assert ROWS[few].peak == ROWS[many].peak
    of_few, of_many = (
        [(verdict.allocated_bytes, verdict.reserved_bytes) for verdict in answers(ROWS[number])]
        for number in (few, many)
    )
    assert of_few == of_many


def test_every_block_of_torchtitan_keeps_seven_tensors_and_a_random_state() -> None:
    """Every second product is kept: q, v, gate and down. So are attention's output and float32
    statistics, and the block's own output, as the next block's input. Of the last one's
    output the head keeps a float32 copy instead. On CUDA attention keeps its random state besides,
    two tensors of 16 and 8 B."""
    kept = (WIDTH, WIDTH // 4, WIDE, WIDTH, WIDTH, WIDTH)
    all_seven = TOKENS * (2 * sum(kept) + 4 * 32) + 16 + 8
    verdict, program = answers(ROWS["t1"])[0], plan(ROWS["t1"].traced(), device="cuda")
    blocks = {
        holding.unit: holding for holding in holdings(program.of_rank(verdict.rank), verdict.phase)
        if holding.kind == "activations"
    }
    held = [
        (blocks[f"layers.{index}"].count, blocks[f"layers.{index}"].nbytes)
        for index in range(LAYERS)
    ]
    assert held == [(9, all_seven)] * (LAYERS - 1) + [(8, all_seven - 2 * TOKENS * WIDTH)]


def test_the_peak_of_torchtitan_is_its_losss_backward_with_three_wide_logits() -> None:
    program = plan(ROWS["t1"].traced(), device="cuda")
    large = [
        alloc.nbytes
        for alloc, _ in live_at_peak(program.ranks[0], "steady")
        if alloc.nbytes > 2 * GIB
    ]
    assert large == [4 * TOKENS * VOCABULARY] * 3
    assert (answers(ROWS["t1"])[0].peak_at, answers(ROWS["t1"])[0].phase) == (
        "backward root", "steady",
    )


def test_what_sharding_over_128_instead_of_8_saves_is_exactly_the_states() -> None:
    """float32 parameters and two moments, of which each rank holds an eighth or a 128th."""
    eight, many = answers(ROWS["t1"])[0], answers(ROWS["t4"])[0]
    states = 12 * 8_030_261_248
    assert eight.allocated_bytes - many.allocated_bytes == states // 8 - states // 128


@pytest.mark.parametrize("row", ["t1", "t4"])
def test_a_scenario_says_torchtitan_s_own_model_to_the_byte(row: str) -> None:
    """Norms of single calls, a float32 loss and every second product kept. In these forms the
    preset keeps what the traced module keeps."""
    alone, traced = answers(ROWS[row], is_traced=False)[0], answers(ROWS[row])[0]
    assert alone.allocated_bytes == traced.allocated_bytes
    assert alone.by_kind == traced.by_kind


def test_a_scenario_is_within_half_a_gibibyte_of_nanotron_s_own_model() -> None:
    """The loss keeps its softmax alone in both. Copies of merged products have no family here."""
    for row in ("n1", "n2"):
        alone, traced = answers(ROWS[row], is_traced=False)[0], answers(ROWS[row])[0]
        assert abs(alone.allocated_bytes - traced.allocated_bytes) < GIB / 2
        assert alone.by_kind["gradients"] == traced.by_kind["gradients"]


def test_nanotron_holds_float32_gradients_besides() -> None:
    """4 B a parameter always, instead of our 2 B between micro-batches and none between steps."""
    numel = ROWS["n1"].scenario().model.num_parameters
    assert numel == 1_342_244_864
    assert {name: besides(ROWS[name]) for name in ("t1", "n1", "n5")} == {
        "t1": 0, "n1": 2 * numel, "n5": 4 * numel
    }
