"""A plain module on one rank: what its Program has, what it lacks of DDP's, what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

import zsim
from zsim.ir.ops import COLLECTIVES
from zsim.ir.program import PHASES
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse
from zsim.strategies import single
from zsim.testing import check_laws
from zsim.testing.laws.equivalences import ddp_of_one_rank_adds_buckets_alone
from zsim.testing.strategies import scenarios

GPT_2 = """
model = {{ preset = "gpt-2-124m" }}
batch = {{ micro_batch = 2, sequence_length = 1024, accumulation = {accumulation} }}
cluster = {{ preset = "dgx-a100", ranks = {ranks} }}
strategy = {{ name = "{name}" }}
precision = {{ autocast = "bf16" }}
"""


def scenario(name: str = "single", *, ranks: int = 1, accumulation: int = 1) -> Scenario:
    text = GPT_2.format(name=name, ranks=ranks, accumulation=accumulation)
    return parse(text.encode(), where="gpt2.toml")


@settings(max_examples=25)
@given(scenarios(strategies=("single",)))
def test_drawn_scenarios_obey_all_laws(case: Scenario) -> None:
    assert case.world_size == 1
    check_laws(zsim.simulate(case))


def test_its_step_is_forward_backward_optimizer_and_zero_grad() -> None:
    rank = plan(scenario(accumulation=2), device="cuda").of_rank(0)
    kinds = [part.name for part in rank.steady_parts]
    assert kinds == ["forward", "backward", "forward", "backward", "optimizer", "zero_grad"]
    ops = [op for phase in PHASES for op in rank.phase(phase)]
    assert {op.kind for op in ops} == {"alloc", "forward", "backward", "optimizer", "free"}
    assert not {op.kind for op in ops} & set(COLLECTIVES)
    assert not any("bucket" in event.buffer for op in ops for event in op.memory)


def test_ddp_on_one_rank_holds_a_copy_of_all_gradients_more_and_is_slower() -> None:
    plain, wrapped = (zsim.simulate(scenario(name)) for name in ("single", "ddp"))
    more = wrapped.peak_memory - plain.peak_memory
    assert more == 4 * plain.scenario.model.num_parameters
    assert 0 < wrapped.step_time - plain.step_time < wrapped.step_time // 20


def test_the_law_sees_a_plain_module_that_frees_a_gradient_early(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    clean, forward_backward = scenario(accumulation=2), single.forward_backward
    assert list(ddp_of_one_rank_adds_buckets_alone(zsim.simulate(clean))) == []

    def forgets(step: single.ReplicatedStep) -> None:
        forward_backward(step)
        step.zero_grad()

    monkeypatch.setattr(single, "forward_backward", forgets)
    wrong = zsim.simulate(clean.with_(seed=1))
    breach, *_ = ddp_of_one_rank_adds_buckets_alone(wrong)
    assert breach.startswith("rank 0: Free(buffer='ln_f.weight.gradient') in a plain module's")


def test_more_ranks_than_one_are_refused_with_what_joins_them() -> None:
    with pytest.raises(zsim.ScenarioError, match="a plain module on one; use ddp or fsdp2, or "):
        scenario(ranks=8)


@pytest.mark.parametrize("key", ['sync = "last"', "dp_shard = 2", "bucket_cap_mb = 25"])
def test_it_has_no_options(key: str) -> None:
    text = GPT_2.format(name=f'single", {key[:-1]}', ranks=1, accumulation=1)
    text = text.replace(f'{key[:-1]}"', key)
    with pytest.raises(zsim.ScenarioError, match=r"strategy\.\w+: an option of"):
        parse(text.encode(), where="gpt2.toml")
