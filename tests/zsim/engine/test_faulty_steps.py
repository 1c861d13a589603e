"""Steps with faults on Programs made by hand, whose times can be seen at a glance."""

from dataclasses import dataclass, replace
from itertools import pairwise
from math import isclose, log

import pytest

from tests.support.programs.hand_made import TWO, Plain, compute, gather, program
from zsim.engine.faults.draws import draw_ns, expected_largest
from zsim.engine.faults.fault import (
    FailingRank,
    Fault,
    Jitter,
    LateStart,
    ReorderedCollective,
    SkippedCollective,
    SlowRank,
)
from zsim.engine.faults.faulty_program import faulty_program
from zsim.engine.simulate_step import simulate_step
from zsim.engine.timeline import NEVER, Timeline
from zsim.errors import DeadlockError, ScenarioError
from zsim.ir.mesh import Mesh
from zsim.ir.program import Program

FOUR = Mesh(dp_shard=4)


def step(mesh: Mesh = FOUR, first_bytes: int = 10) -> Program:
    """Compute of 100 ns, a gather of 10, compute of 50, a gather of 20, compute of 30: 210 ns."""
    return program(
        compute(0, "a", 100), gather(1, "b", first_bytes, 0), compute(2, "b", 50, 1),
        gather(3, "c", 20, 2), compute(4, "c", 30, 3), mesh=mesh,
    )


def simulated(
    *faults: Fault, base: Program | None = None, costs: Plain | None = None, all_ranks: bool = False
) -> Timeline:
    faulty = faulty_program(base or step(), faults)
    return simulate_step(faulty, costs=costs or Plain(), faults=faults, all_ranks=all_ranks)


def test_a_step_without_faults_is_the_step_itself() -> None:
    base = step()
    assert faulty_program(base, ()) is base
    assert simulated().step_time_ns == 210
    assert simulated().representatives == (0, 0, 0, 0)


def test_a_slow_rank_holds_up_all_and_arrives_last_at_each_collective() -> None:
    timeline = simulated(SlowRank(rank=2, factor=1.5))
    assert timeline.step_time_ns == 150 + 10 + 75 + 20 + 45
    assert timeline.representatives == (0, 0, 2, 0)
    assert [timeline.ranks[rank].arrived for rank in (0, 2)] == [{1: 100, 3: 210}, {1: 150, 3: 235}]


def test_a_late_rank_is_late_once_and_begins_its_ops_later() -> None:
    timeline = simulated(LateStart(rank=3, by_ns=40))
    assert timeline.step_time_ns == 250
    assert timeline.ranks[3].issued[0] == 40
    assert timeline.ranks[0].arrived == {1: 100, 3: 200}


def test_faults_of_one_rank_add_up() -> None:
    timeline = simulated(LateStart(rank=1, by_ns=40), SlowRank(rank=1, factor=2))
    assert timeline.step_time_ns == 210 + 40 + 180


def test_a_failing_rank_is_awaited_forever_and_the_others_are_told() -> None:
    with pytest.raises(DeadlockError) as caught:
        simulated(FailingRank(rank=1, at="forward b"), all_ranks=True)
    head, titles, *rows = str(caught.value).splitlines()
    assert head.endswith("found a deadlock of ranks 0, 2, 3:")
    assert titles.split() == ["rank", "waits", "in", "for", "first", "difference"]
    assert [[part.strip() for part in row.split("  ") if part] for row in rows] == [
        [rank, "op 3 (all_gather c), #1 of dp_shard", "rank 1",
         "op 3 (all_gather c over dp_shard, 20 B); on rank 1 nothing more"]
        for rank in "023"
    ]


@pytest.mark.parametrize("rank", range(4))
def test_a_skipped_collective_is_blamed_on_the_rank_that_skips_it(rank: int) -> None:
    with pytest.raises(DeadlockError) as caught:
        simulated(SkippedCollective(rank=rank, at="all_gather b"))
    assert caught.value.where == f"rank {rank}, op 3 (all_gather c)"
    assert "expected the all_gather of 10 B" in str(caught.value)


def test_a_skipped_collective_like_its_next_is_missed_at_the_end_alone() -> None:
    skipped = SkippedCollective(rank=2, at="all_gather b")
    with pytest.raises(DeadlockError, match=r"#1 of dp_shard +rank 2") as caught:
        simulated(skipped, base=step(first_bytes=20), all_ranks=True)
    assert "found a deadlock of ranks 0, 1, 3" in str(caught.value)


@pytest.mark.parametrize("rank", range(4))
def test_reordered_collectives_are_blamed_on_their_rank(rank: int) -> None:
    with pytest.raises(DeadlockError) as caught:
        simulated(ReorderedCollective(rank=rank, at="all_gather b"))
    assert caught.value.where == f"rank {rank}, op 1 (all_gather c)"


def test_broadcasts_in_each_others_place_end_the_step_where_their_roots_differ() -> None:
    """Ranks of gloo wait for one another then, two of them and three."""
    (kind,) = step().ranks
    steady = tuple(
        replace(op, kind="broadcast", nbytes=40, root=op.index // 2)
        if op.kind == "all_gather" else op for op in kind.steady
    )
    base = replace(step(), ranks=(replace(kind, steady=steady),))
    with pytest.raises(DeadlockError) as caught:
        simulated(ReorderedCollective(rank=3, at="broadcast b"), base=base)
    error = caught.value
    assert error.where == "rank 3, op 1 (broadcast c)"
    assert error.expected == "the broadcast of 40 B from 0 that rank 0 issues at op 1 over dp_shard"
    assert error.found == "broadcast of 40 B from 1"


def test_ops_keep_their_numbers_waits_and_memory() -> None:
    base = step()
    skipped = faulty_program(base, [SkippedCollective(rank=0, at="all_gather b")]).of_rank(0)
    assert [op.index for op in skipped.steady] == [0, 1, 2, 3, 4]
    assert [op.waits for op in skipped.steady] == [op.waits for op in base.of_rank(0).steady]
    assert [op.kind for op in skipped.steady][1] == "alloc"


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (FailingRank(rank=0, at="forward d"), "expected the kind and unit of an op in rank 0's "
         "steady step, found forward d, did you mean forward"),
        (SkippedCollective(rank=0, at="forward b"), "of a collective of several ranks"),
        (SkippedCollective(rank=0, at="all_gather x"), "did you mean all_gather"),
        (SkippedCollective(rank=0, at="?"), "; `zsim show --program` lists its ops"),
        (ReorderedCollective(rank=0, at="all_gather c"), "a collective that another one follows"),
    ],
)
def test_ops_that_are_not_there_are_refused_by_key(fault: Fault, told: str) -> None:
    with pytest.raises(ScenarioError, match=r"^faults\[1\]\.at: expected ") as caught:
        faulty_program(step(), [SlowRank(rank=1, factor=2), fault])
    assert told in str(caught.value)


def test_a_collective_of_one_rank_is_none_that_others_could_miss() -> None:
    alone = step(mesh=Mesh(dp_replicate=2, dp_shard=1))
    with pytest.raises(ScenarioError, match="; it has none"):
        faulty_program(alone, [SkippedCollective(rank=0, at="all_gather b")])


@dataclass(frozen=True, kw_only=True)
class Lost(Plain):
    """Collectives of 20 B never end."""

    def collective_ns(self, kind: str, nbytes: int, ranks: tuple[int, ...]) -> int:
        return NEVER if nbytes == 20 else nbytes

    def lost_links(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        """Two links."""
        return "a cable", "another"


def test_a_collective_over_a_lost_link_is_named_with_when_it_began() -> None:
    with pytest.raises(DeadlockError) as caught:
        simulated(costs=Lost())
    assert str(caught.value).startswith(
        "a cable and another: expected a network that carries the all_gather of c, 20 B over "
        "dp_shard, found a lost link: ranks 0, 1, 2, 3 wait in it forever, from 160 ns into the "
        "step on; "
    )


def test_draws_depend_on_seed_rank_and_op_alone_and_have_their_mean() -> None:
    for distribution in ("exponential", "uniform"):
        jitter = Jitter(mean_ns=1_000_000, distribution=distribution, seed=3)
        drawn = [draw_ns(jitter, rank=rank, op=op) for rank in range(100) for op in range(100)]
        assert len(set(drawn)) > 9_900
        assert isclose(sum(drawn) / len(drawn), 1_000_000, rel_tol=0.03)  # three sigma of 10,000
    assert draw_ns(Jitter(mean_ns=1000, seed=1), rank=0, op=0) == 4713
    assert max(draw_ns(Jitter(mean_ns=1000, distribution="uniform"), rank=r, op=0)
               for r in range(999)) <= 2000


def test_the_largest_draw_grows_as_the_logarithm_or_to_the_end_of_its_interval() -> None:
    sizes = [expected_largest("exponential", 2**n) for n in range(1, 12)]
    assert sizes[0] == 1.5
    growth = [later - earlier for earlier, later in pairwise(sizes)]
    assert isclose(growth[-1], log(2), rel_tol=1e-3)
    assert expected_largest("uniform", 3) == 1.5


def test_jitter_of_steps_lengthens_a_step_by_the_largest_draw() -> None:
    jitter = Jitter(mean_ns=1000, seed=5)
    drawn = [draw_ns(jitter, rank=rank, op=-1) for rank in range(4)]
    timeline = simulated(jitter)
    assert timeline.step_time_ns == 210 + max(drawn)
    assert timeline.representatives == (0, 1, 2, 3)


def test_jitter_of_ops_lengthens_each_stretch_between_collectives_by_the_largest() -> None:
    jitter = Jitter(mean_ns=1000, each="op", seed=5)
    delays = [[draw_ns(jitter, rank=rank, op=op) for rank in (0, 1)] for op in (0, 2, 4)]
    timeline = simulated(jitter, base=step(mesh=TWO))
    assert timeline.step_time_ns == 210 + sum(map(max, delays))
