"""DDP with find_unused_parameters: blocks that forward skips, trainable all the same, against
torch on the fake group."""

from __future__ import annotations

import pytest

from tests.support.agreement import inexact
from tests.zreal.agreement.strategies.test_frozen_against_torch import scenario
from tests.zreal.agreement.test_event_order import of_program, of_torch
from zreal import torch_private
from zreal.observer.observer import observe
from zsim.runs.backend import RunOptions
from zsim.runs.registry import find
from zsim.scenario.derived import derived
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario
from zsim.strategies import ddp
from zsim.strategies.replicated.buckets import USED

FINDS = 'name = "ddp", find_unused_parameters = true'
OWNED = 'name = "zero_redundancy", find_unused_parameters = true'
SMALL_BUCKETS = f"{FINDS}, bucket_cap_mb = 0.0001"


@pytest.mark.parametrize(("model", "strategy", "frozen", "unused", "parameters"), [
    ("mlp", FINDS, '["blocks.0.*"]', '["blocks.1", "blocks.2"]', "bf16"),
    ("mlp", f"{SMALL_BUCKETS}, gradient_as_bucket_view = true", "[]", '["blocks.1"]', "bf16"),
    ("gpt sdpa", SMALL_BUCKETS, '["w?e.*", "ln_f.*", "lm_head.*"]', '["blocks.3"]', "bf16"),
    ("mlp", OWNED, "[]", '["blocks.1"]', "bf16"),
])
def test_collectives_and_memory_of_every_phase_are_torchs(
    model: str, strategy: str, frozen: str, unused: str, parameters: str
) -> None:
    case = scenario(model, strategy, frozen, unused=unused, ranks=3, parameters=parameters)
    assert inexact(case) == []


@pytest.mark.parametrize(("model", "strategy"), [("mlp", SMALL_BUCKETS), ("llama sdpa", OWNED)])
def test_allocations_and_frees_come_in_torchs_order(model: str, strategy: str) -> None:
    case = scenario(model, strategy, "[]", unused='["blocks.1"]', ranks=2)
    assert of_program(case) == of_torch(case, steps=2)


def reductions(case: Scenario, phase: str) -> list[tuple[str, int]]:
    ops = plan(case, device="cpu").of_rank(0).phase(phase)  # type: ignore[arg-type]
    return [(op.unit, op.nbytes) for op in ops if op.kind in ("all_reduce", "broadcast")]


def test_buckets_stay_as_they_were_made_and_the_map_of_used_parameters_follows_the_last() -> None:
    case = scenario("mlp", FINDS, "[]", unused='["blocks.1"]')
    numel, count = case.model.num_parameters, len(case.model.parameters)
    assert (
        reductions(case, "first")
        == reductions(case, "steady")
        == [("bucket.0", 4 * numel), (USED, 4 * count)]
    )


def test_a_block_of_which_nothing_is_used_is_reduced_as_zeros_in_its_turn() -> None:
    case = scenario("mlp", SMALL_BUCKETS, "[]", unused='["blocks.1"]')
    units = [unit for unit, _ in reductions(case, "steady")]
    assert units == [f"bucket.{i}" for i in range(len(units) - 1)] + [USED]


def test_torch_raises_in_the_second_forward_where_nobody_looks_for_what_is_unused() -> None:
    case = scenario("mlp", FINDS, "[]", unused='["blocks.1"]')
    waits = derived(case, options=ddp.Options())
    with (
        torch_private.fake_group(rank=0, world_size=2),
        pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior "
                                          "iteration"),
    ):
        observe(waits, rank=0)


def test_torch_steps_no_parameter_that_is_unused() -> None:
    case = scenario("mlp", FINDS, "[]", unused='["blocks.1"]')
    with torch_private.fake_group(rank=0, world_size=2):
        subject = observe(case, rank=0).subject
        assert subject is not None
        names = {
            id(parameter): name for name, parameter in subject.module.module.named_parameters()
        }
        stepped = {
            names[id(parameter)] for parameter, state in subject.optimizer.state.items() if state
        }
    assert stepped == case.model.trained


@pytest.mark.parametrize("parameters", ["fp32", "bf16"])
def test_our_own_executor_holds_what_the_program_says(parameters: str) -> None:
    case = scenario("mlp", SMALL_BUCKETS, "[]", unused='["blocks.1"]', parameters=parameters)
    details = inexact(case, interpreter="executor")
    # in float32 the executor's own loss and its gradient live beside the last bucket: four scalars
    # in backward, below the step's peak; in bf16 the cast of the sum outweighs them
    assert [text.split(" B, ")[2] for text in details] == ["-16"] * (parameters == "fp32")
    assert all("14 of 16 exact; peak of backward 0" in text for text in details)


@pytest.mark.gloo
@pytest.mark.parametrize("strategy", [FINDS, pytest.param(OWNED, marks=pytest.mark.slow)])
def test_training_leaves_what_is_unused_as_it_was_and_trains_the_rest_as_one_process(
    strategy: str
) -> None:
    case = scenario("mlp", strategy, "[]", unused='["blocks.1"]')
    ranks = find("gloo").run(case, options=RunOptions(all_ranks=True)).ranks
    assert max(rank.numerics.largest_relative_difference for rank in ranks if rank.numerics) < 1e-2
