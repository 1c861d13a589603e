"""The work budget: what is refused names its factors, and what it counts as kinds of ranks is never
fewer than there are."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.cases.sampling import WHOLE
from zsim import api
from zsim.errors import ScenarioError
from zsim.scenario.checks.work_limits import MANY_TIMES, Work
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse
from zsim.strategies import STRATEGIES
from zsim.testing.strategies.tables import model_tables

STEP = Work(num_ranks=1024, kinds=3, num_units=81, passes=1)


def test_a_large_cluster_of_ranks_that_are_alike_is_little_work():
    assert replace(STEP, num_ranks=16_384, num_units=128, passes=64).problem() == ""


def test_a_refusal_names_the_factors():
    assert replace(STEP, num_units=4096, passes=4800).problem() == (
        "expected param groups × micro-batches of at most 12,000, found 4,096 × 4,800 = "
        "19,660,800; take fewer of one of them"
    )
    assert replace(STEP, kinds=4000, num_units=4000).problem() == (
        "expected kinds of ranks × param groups × micro-batches of at most 750,000, found 4,000 "
        "× 4,000 × 1 = 16,000,000; "
        "take fewer of one of them"
    )


def test_every_rank_by_itself_is_more_work():
    assert STEP.problem(all_ranks=True) == ""
    many = replace(STEP, passes=100)
    assert many.problem() == ""
    assert many.problem(all_ranks=True).startswith("expected ranks × param groups × "
                                                   "micro-batches of at most 750,000")


def test_distinct_ranks_by_columns_may_be_more():
    many = replace(STEP, num_ranks=16_384, num_units=128)
    assert many.problem(all_ranks=True) != ""
    assert many.problem(all_ranks=True, by_columns=True) == ""
    assert replace(many, passes=2).problem(all_ranks=True, by_columns=True).startswith(
        "expected ranks × param groups × micro-batches of at most 2,200,000"
    )


def test_what_is_simulated_many_times_may_be_less():
    assert (
        replace(STEP, passes=100)
        .problem(part=MANY_TIMES)
        .startswith("expected param groups × micro-batches of at most 4,000")
    )
    assert replace(STEP, num_ranks=999_999).problem() == ""
    assert replace(STEP, num_ranks=999_999).problem(part=MANY_TIMES) == (
        "expected at most 333,333 ranks, found 999,999"
    )


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_there_are_no_more_kinds_of_ranks_than_counted(name):
    @WHOLE
    @given(model_tables(), st.integers(1, 60 if STRATEGIES[name].axes else 1))
    def law(tables, num_ranks):
        replicas = {"dp_replicate": 1} if len(STRATEGIES[name].axes) == 2 else {}
        cluster = {"preset": "cpu-gloo", "ranks": num_ranks}
        try:
            scenario = Scenario(**tables, cluster=cluster, strategy={"name": name, **replicas})
            kinds = len(plan(scenario, device="cpu").ranks)
        except ScenarioError:  # what the strategy does not have
            assume(False)
        assert kinds <= scenario.work.kinds

    law()


def test_so_much_lookahead_that_nothing_is_sharded_is_refused():
    text = """
model = { preset = "gpt-tiny" }
batch = { micro_batch = 1, sequence_length = 4 }
cluster = { preset = "cpu-gloo", ranks = 2 }
"""
    parse(f'{text}strategy = {{ name = "zero3", lookahead = 256 }}'.encode(), where="ahead.toml")
    with pytest.raises(ScenarioError, match="strategy.lookahead: expected at most 256, found 257"):
        parse(
            f'{text}strategy = {{ name = "zero3", lookahead = 257 }}'.encode(), where="ahead.toml"
        )


def test_fit_refuses_minutes_of_simulations():
    text = """
model = { preset = "llama-3-8b" }
batch = { micro_batch = 1, sequence_length = 16, accumulation = 300 }
cluster = { preset = "dgx-h100", nodes = 1 }
strategy = { name = "fsdp2" }
"""
    with pytest.raises(ScenarioError, match="many: too much to simulate for each stage"):
        api.fit(parse(text.encode(), where="many.toml"))
