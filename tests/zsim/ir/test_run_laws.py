"""Every Program obeys the laws on random scenarios, and each law of Programs and records finds the
defect that it is there for. `zsim.testing.laws` has those of whole Runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.cases.sampling import WHOLE
from tests.support.programs.longest_path import longest_path, unused_waits
from zsim.cluster.cluster_presets import load_cluster
from zsim.engine.costs.op_costs import Costs
from zsim.engine.simulate import simulate
from zsim.errors import DeadlockError, ProgramError
from zsim.ir import sharding
from zsim.ir.laws import program_laws, run_laws
from zsim.ir.laws.validate import validate
from zsim.ir.mesh import Mesh
from zsim.ir.ops import COLLECTIVES, Alloc, Free, Op
from zsim.ir.order.deadlock import deadlock
from zsim.ir.order.graph import Node, graph
from zsim.ir.program import Program, RankProgram, parse
from zsim.ir.run import Numerics, RankRun, RunRecord
from zsim.runs import real_run
from zsim.runs.backend import RunOptions
from zsim.runs.simulator import SimBackend
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario
from zsim.scenario.scenario import parse as parse_scenario
from zsim.testing.strategies import scenarios

STRATEGIES = {
    "ddp": 'name = "ddp", bucket_cap_mb = 0.001',
    "zero1_reduce_scatter": 'name = "zero1", form = "reduce_scatter"',
    "zero1_all_reduce": 'name = "zero1", form = "all_reduce", granularity = "parameter"',
    "zero2": 'name = "zero2"', "zero3": 'name = "zero3", lookahead = 1',
    "zero3_eager": 'name = "zero3", lookahead = 2, granularity = "900 B"',
    "fsdp2": 'name = "fsdp2"', "fsdp2_resharded": 'name = "fsdp2", reshard_after_forward = true',
    "hsdp": 'name = "hsdp", dp_replicate = 2, dp_shard = 2',
    "fsdp1": 'name = "fsdp1", dp_shard = 4',
    "fsdp1_hybrid": 'name = "fsdp1", dp_replicate = 2, dp_shard = 2, sharding = "grad_op", '
                    'forward_prefetch = true',
    "zero_redundancy": 'name = "zero_redundancy"',
    "deepspeed1": 'name = "deepspeed1", reduce_bucket_size = 300',
    "deepspeed2": 'name = "deepspeed2", reduce_bucket_size = 300',
    "deepspeed3": 'name = "deepspeed3", reduce_bucket_size = 300, '
                  'stage3_prefetch_bucket_size = 600, stage3_param_persistence_threshold = 20',
    "deepspeed2_overlapped": 'name = "deepspeed2", reduce_bucket_size = 300, overlap_comm = true',
}


def scenario(strategy: str, *, ranks: int = 4, accumulation: int = 1) -> Scenario:
    text = f"""
model = {{ family = "gpt", sizes = {{ num_layers = 3, hidden_size = 8, num_heads = 2, vocabulary = 12 }} }}
batch = {{ micro_batch = 1, sequence_length = 4, accumulation = {accumulation} }}
cluster = {{ preset = "dgx-h100", ranks = {ranks} }}
strategy = {{ {strategy} }}
precision = {{ parameters = "bf16", reduce = "fp32" }}
"""  # noqa: E501
    return parse_scenario(text.encode(), where="laws.toml")


REDUCES_TWICE = """
model = { family = "gpt", sizes = { num_layers = 2, hidden_size = 8, num_heads = 2, vocabulary = 13, tied = true } }
batch = { micro_batch = 2, sequence_length = 4, accumulation = 2, forwards = 2 }
cluster = { preset = "cpu-gloo", ranks = 2 }
strategy = { name = "hsdp", dp_replicate = 2, dp_shard = 1, sync = "last" }
precision = { parameters = "bf16", reduce = "fp32" }
"""  # noqa: E501
"""A unit packs gradients anew while those of its first reduction in the same backward are still on
their way over replicas."""

KEEPS_PARTS = """
model = { family = "mlp", sizes = { dims = [1, 1], hidden = 1, num_classes = 3 } }
batch = { micro_batch = 2 }
activation_checkpointing = { mode = "full" }
frozen = ["blocks.0.*"]
cluster = { preset = "cpu-gloo", ranks = 4 }
strategy = { name = "fsdp2", dp_shard = 4, reshard_after_forward = 2 }
precision = { parameters = "bf16", reduce = "fp32" }
"""
"""A frozen first block, whose backward never runs, keeps what forward resharded to two ranks until
the next step, as in torch."""


def planned(strategy: str, **more: int) -> Program:
    case = scenario(strategy, **more)
    return plan(case, device=case.cluster.kind)


# -- on random scenarios


@WHOLE
@given(scenarios())
@example(parse_scenario(REDUCES_TWICE.encode(), where="twice.toml"))
@example(parse_scenario(KEEPS_PARTS.encode(), where="parts.toml"))
def test_every_program_is_valid_obeys_the_laws_and_reads_back(case):
    program = plan(case, device=case.cluster.kind)

    assert validate(program) is program
    assert program_laws.breaches(program) == ()
    assert parse(str(program)) == program


def node_costs(costs: Costs):
    def node_ns(node: Node, op: Op) -> int:
        if node[0] == "issue":
            return costs.issue_ns(op)
        return (
            costs.collective_ns(op.kind, op.nbytes, node[2])
            if node[0] == "meet"
            else costs.compute_ns(op.kernels)
        )

    return node_ns


@WHOLE
@given(scenarios())
def test_the_makespan_is_the_longest_path_and_the_path_has_no_gaps(case):
    program, costs = plan(case, device=case.cluster.kind), Costs(cluster=case.cluster)
    whole, node_ns = graph(program, launch_queue=costs.launch_queue), node_costs(costs)

    length, path = longest_path(whole, node_ns)

    assert simulate(program, costs=costs, contention=False).step_time_ns == length
    assert sum(node_ns(node, whole.nodes[node]["op"]) for node in path) == length
    assert all(whole.has_edge(*pair) for pair in zip(path, path[1:], strict=False))


@WHOLE
@given(scenarios())
def test_waits_that_change_nothing_change_nothing(case):
    program, costs = plan(case, device=case.cluster.kind), Costs(cluster=case.cluster)
    lean = replace(program, ranks=tuple(map(without_unused_waits, program.ranks)))

    assert simulate(lean, costs=costs) == simulate(program, costs=costs)


def without_unused_waits(rank: RankProgram) -> RankProgram:
    unused = set(unused_waits(rank))
    ops = (
        replace(op, waits=tuple(w for w in op.waits if (op.index, w) not in unused))
        for op in rank.steady
    )
    return replace(rank, steady=tuple(ops))


@pytest.mark.parametrize(
    "name", [name for name in STRATEGIES if "fsdp1" not in name and "deepspeed3" not in name]
)  # which refuse one rank
def test_one_rank_communicates_nothing(name):
    strategy = STRATEGIES[name].replace(
        "dp_replicate = 2, dp_shard = 2", "dp_replicate = 1, dp_shard = 1"
    )
    program = planned(strategy, ranks=1)
    ops = [
        op for phase in ("construction", "first", "steady")
        for op in program.of_rank(0).phase(phase)
    ]
    assert [op for op in ops if op.kind in COLLECTIVES] == []


# -- seeded defects


def with_steady(program: Program, ops: tuple[Op, ...], number: int = 0) -> Program:
    """`program` with other steady ops for one kind of rank."""
    ranks = list(program.ranks)
    ranks[number] = replace(ranks[number], steady=ops, steady_parts=())
    return replace(program, ranks=tuple(ranks))


def with_op(program: Program, op: Op, number: int = 0) -> Program:
    ops = list(program.ranks[number].steady)
    ops[op.index] = op
    return with_steady(program, tuple(ops), number)


def found_by_laws(program: Program) -> tuple[str, ...]:
    """The laws that a defect breaks, without saying where."""
    return tuple(dict.fromkeys(breach.split(":")[0] for breach in program_laws.breaches(program)))


def paces_only(op: Op, strategy: str) -> bool:
    """Waits that hold back without guarding data: they bound memory in use. Golden Programs and the
    longest path hold them.

    In fsdp2 the compute stream waits for reductions before a free. In zero3 the next gather waits
    for the last compute, even where an earlier one freed its memory.

    In fsdp1 the limiter blocks the host. Its gather streams wait for the compute stream when the
    forward of a later micro-batch begins, though no parameter has changed.

    With DeepSpeed's overlap a bucket is filled after the reduction of the one before, although it
    may have another buffer.

    DeepSpeed's norm comes when the host has read whether any gradient is infinite.

    In zero1, test_strategies holds that ZeRO-1 adds only to gradients whose reduction has ended.
    """
    gathers_ahead = op.kind == "all_gather" and "zero3" in strategy
    adds = op.kind == "backward" and "zero1" in strategy
    fills = op.kind == "copy" and strategy in ("deepspeed2_overlapped", "deepspeed3")
    if "fsdp1" in strategy and (op.kind == "host_wait" or op.stream == "all_gather_copy_in"):
        return True
    norms = op.unit == "gradient_norm" and "deepspeed" in strategy
    return op.kind == "free" or gathers_ahead or adds or fills or norms


def dropped_waits(name: str) -> Iterator[tuple[Op, int]]:
    rank = planned(STRATEGIES[name], accumulation=2).ranks[0]
    unused = set(unused_waits(rank))
    for op in rank.steady:
        if not paces_only(op, name):
            yield from ((op, wait) for wait in op.waits if (op.index, wait) not in unused)


@pytest.mark.quality
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_dropped_wait_breaks_a_law(name):
    program, seeded = planned(STRATEGIES[name], accumulation=2), list(dropped_waits(name))
    assert seeded
    for op, wait in seeded:
        weaker = with_op(
            program, replace(op, waits=tuple(other for other in op.waits if other != wait))
        )
        assert found_by_laws(weaker), (
            f"op {op.index} ({op.kind} {op.unit}) without its wait for {wait}"
        )


@pytest.mark.quality
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_missing_free_breaks_a_law_or_makes_the_program_invalid(name):
    program = planned(STRATEGIES[name], accumulation=2)
    frees = [
        (op, event) for op in program.ranks[0].steady for event in op.memory
        if isinstance(event, Free)
    ]
    assert frees
    # a law asked of 40 of them says as much as of 400
    for op, event in frees[:: len(frees) // 40 + 1]:
        leaking = with_op(
            program, replace(op, memory=tuple(other for other in op.memory if other is not event))
        )
        try:
            assert "a steady step returns what it takes" in found_by_laws(validate(leaking)), event
        except ProgramError as error:
            assert event.buffer in str(error)


@pytest.mark.quality
@pytest.mark.parametrize("name", ["zero_redundancy", "fsdp2"])
def test_two_swapped_collectives_on_one_rank_make_the_program_invalid(name):
    program = planned(STRATEGIES[name], ranks=3)
    assert len(program.ranks) > 1
    ops = list(program.ranks[0].steady)
    first, second = next(
        (a, b) for a in ops for b in ops
        if a.kind == b.kind in COLLECTIVES and a.nbytes > b.nbytes and a.index < b.index
    )
    ops[first.index], ops[second.index] = (
        replace(second, index=first.index), replace(first, index=second.index),
    )
    swapped = with_steady(program, tuple(replace(op, waits=()) for op in ops))

    with pytest.raises(
        ProgramError,
        match=rf"steady, group {first.group}.*expected the same collectives in the same order",
    ):
        validate(swapped)
    case = scenario(STRATEGIES[name], ranks=3)
    with pytest.raises(DeadlockError):
        simulate(swapped, costs=Costs(cluster=case.cluster), all_ranks=True)


@pytest.mark.quality
@pytest.mark.parametrize("change", [{"dtype": "float16"}, {"root": 1}, {"nbytes": 4}])
def test_ranks_that_differ_in_one_property_of_a_collective_make_the_program_invalid(change):
    program = planned(STRATEGIES["fsdp2"], ranks=3)
    assert len(program.ranks) > 1
    op = next(op for op in program.ranks[0].steady if op.kind in COLLECTIVES)
    with pytest.raises(ProgramError, match="expected the same collectives in the same order"):
        validate(with_op(program, replace(op, **change)))


@pytest.mark.quality
@pytest.mark.parametrize(
    ("name", "layout"), [("fsdp2", "Dim0Layout"), ("zero2", "FlatLayout"), ("zero3", "FlatLayout")]
)
def test_a_shard_off_by_one_breaks_a_law(name, layout, monkeypatch):
    assert program_laws.breaches(planned(STRATEGIES[name], ranks=7)) == ()
    broken = getattr(sharding, layout)
    padded = broken.padded_numel
    monkeypatch.setattr(broken, "padded_numel", property(lambda self: padded.fget(self) + 1))
    assert "shards are equal" in found_by_laws(planned(STRATEGIES[name], ranks=7))


@pytest.mark.quality
def test_compute_on_a_sharded_group_breaks_a_law():
    program = planned(STRATEGIES["zero3"])
    ops = program.ranks[0].steady
    free = next(op for op in ops if op.kind == "free" and op.unit == "blocks.1")
    compute = next(op for op in ops if "blocks.1" in op.reads)
    early = with_op(
        with_op(program, replace(free, memory=())),
        replace(compute, memory=(*free.memory, *compute.memory)),
    )
    assert found_by_laws(early) == ()  # freed by the op itself: the op still finds it
    earlier = next(op for op in reversed(ops[: compute.index]) if op.stream == "compute")
    too_early = with_op(
        with_op(program, replace(free, memory=())),
        replace(earlier, memory=(*earlier.memory, *free.memory)),
    )
    assert "compute finds its parameters gathered" in found_by_laws(too_early)


@pytest.mark.quality
def test_a_reshard_that_never_comes_breaks_a_law():
    program = planned(STRATEGIES["zero3"])
    free = [op for op in program.ranks[0].steady if op.kind == "free" and op.unit == "blocks.0"][-1]
    unfreed = next(
        op for op in program.ranks[0].steady
        if Free("blocks.0:unsharded") in op.memory and op.index > 20
    )
    assert free.index >= unfreed.index
    kept = with_op(program, replace(unfreed, memory=()))
    assert "every unshard is resharded" in found_by_laws(kept)


# -- laws of Runs find what they are for


def broken_runs() -> dict[str, RunRecord]:
    run = SimBackend().run(scenario(STRATEGIES["zero3"]), options=RunOptions())
    rank = run.ranks[0]
    steady = rank.phases["steady"]

    def with_rank(other: RankRun, **more: int) -> RunRecord:
        return replace(run, ranks=(other,), **more)

    def with_phase(**more: object) -> RunRecord:
        return with_rank(replace(rank, phases={**rank.phases, "steady": replace(steady, **more)}))

    early = [i for i, span in enumerate(rank.spans) if span.stream == "compute" and span.start_ns][
        1
    ]
    spans = list(rank.spans)
    spans[early] = replace(spans[early], start_ns=0)
    low = replace(steady.memory, peak_bytes=steady.memory.start_bytes - 1, by_kind={})
    unlike = replace(steady.memory, by_kind={"parameters": steady.memory.peak_bytes - 1})
    parts = [
        replace(part, peak_bytes=part.peak_bytes + steady.memory.peak_bytes)
        for part in steady.memory.parts
    ]
    beyond = replace(steady.memory, parts=tuple(parts))
    told = Numerics(
        losses=(1.0,), largest_relative_difference=0.0, largest_gradient_difference=0.0, steps=2
    )
    lone = replace(steady.collectives[0], group_size=5)
    return {
        "one thing at a time": with_rank(replace(rank, spans=tuple(spans))),
        "spans lie in the step": replace(run, step_time_ns=run.step_time_ns - 1),
        "peaks are the highest points": with_phase(memory=low),
        "peaks are the highest points ": with_phase(memory=unlike),
        "parts lie in their phase": with_phase(memory=beyond),
        "sizes are possible": with_phase(memory=replace(steady.memory, held={"gradients": -1})),
        "real ranks stand for themselves": replace(run, interpreter="observer"),
        "numerics tell every step": with_rank(replace(rank, numerics=told)),
        "one rank is silent": replace(run, world_size=1),
        "collectives are whole": with_phase(collectives=(lone, *steady.collectives[1:])),
    }


@pytest.mark.quality
@pytest.mark.parametrize("name", broken_runs())
def test_a_broken_run_breaks_its_law(name):
    assert name.strip() in {
        breach.split(":")[0] for breach in run_laws.run_breaches(broken_runs()[name])
    }


def test_every_law_of_runs_has_a_run_that_breaks_it():
    assert {name.strip() for name in broken_runs()} == set(run_laws.RUN_LAWS)


# -- validation


def op(**more: object) -> Op:
    return Op(**{"index": 0, "kind": "forward", "unit": "a", "stream": "compute", **more})


@pytest.mark.parametrize(("ops", "refusal"), [
    ((op(index=1),), "expected index 0, found 1"),
    ((op(kind="fly"),), "expected a known kind and stream, found fly on compute"),
    ((op(waits=(0,)),), r"expected waits for earlier ops, found waits for \(0,\)"),
    ((op(waits=(-1,)),), "expected waits for earlier ops"),
    ((op(group="dp_shard"),), "expected no group, as it is no collective, found dp_shard"),
    ((op(kind="all_gather", group="dp_replicate", nbytes=4),),
     "expected a group of more than one rank"),
    ((op(kind="all_gather", group="dp_shard:3", nbytes=4),),
     "expected a group of more than one rank"),
    ((op(kind="all_gather", nbytes=4),),
     "expected a group of more than one rank on .*, found none"),
    ((op(kind="all_gather", group="dp_shard"),), "expected bytes to communicate, found 0"),
    ((op(memory=(Free("x"),)),),
     r"steady op 0 \(forward a\): expected a live buffer, found x: it is freed"),
    ((op(memory=(Alloc("x", "inputs", 1), Alloc("x", "inputs", 1))),),
     "expected a buffer that is not live"),
])
def test_a_malformed_program_is_refused_with_its_op(ops, refusal):
    program = planned(STRATEGIES["zero2"], ranks=2)
    with pytest.raises(ProgramError, match=refusal):
        validate(with_steady(program, ops))


def test_an_assignment_that_leaves_a_rank_or_a_program_out_is_refused():
    program = planned(STRATEGIES["zero2"], ranks=2)
    with pytest.raises(ProgramError, match="assignment: expected 2 ranks, found 1"):
        validate(replace(program, assignment=(0,)))
    with pytest.raises(ProgramError, match="assignment: expected each program"):
        validate(replace(program, ranks=program.ranks * 2))


def in_orders(*orders: tuple[str, ...], assignment: tuple[int, ...]) -> Program:
    """A Program whose kinds of rank reduce over these groups, one after another."""

    def reduce(index: int, group: str) -> Op:
        return op(
            index=index, kind="all_reduce", unit=group, stream="all_reduce", group=group, nbytes=8
        )

    kinds = tuple(
        RankProgram(
            construction=(), first=(), steady=tuple(reduce(*pair) for pair in enumerate(order))
        )
        for order in orders
    )
    return Program(mesh=Mesh(dp_replicate=2, dp_shard=2), ranks=kinds, assignment=assignment)


CROSSED = in_orders(
    ("dp_shard", "dp_replicate"), ("dp_replicate", "dp_shard"), assignment=(0, 1, 1, 0)
)
"""Ranks 0 and 3 reduce over their shards first, ranks 1 and 2 over their replicas: everybody waits
for somebody."""


@pytest.mark.quality
def test_a_deadlock_breaks_a_law_which_names_the_ring_of_ops_and_ranks():
    assert validate(CROSSED) is CROSSED  # over each group by itself the order is the same
    shards_first, replicas_first = (
        f"op 1 (all_reduce {later}) comes after op 0 (all_reduce {earlier})"
        for earlier, later in (("dp_shard", "dp_replicate"), ("dp_replicate", "dp_shard"))
    )
    assert program_laws.breaches(CROSSED) == (
        "every op can run: program 0, steady: a deadlock: "
        f"on rank 0 {shards_first}; on rank 2 {replicas_first}; "
        f"on rank 3 {shards_first}; on rank 1 {replicas_first}; "
        "first difference: on rank 0 op 0 (all_reduce dp_shard over dp_shard, 8 B); "
        "on rank 2 op 0 (all_reduce dp_replicate over dp_replicate, 8 B)",
    )
    with pytest.raises(DeadlockError):
        simulate(CROSSED, costs=Costs(cluster=load_cluster("dgx-h100", ranks=4)), all_ranks=True)


def test_orders_that_differ_are_no_deadlock_where_no_ring_closes():
    """Ranks 0 and 1 share a group and reduce over it first; ranks 2 and 3 wait for both."""
    one_after_another = in_orders(
        ("dp_shard", "dp_replicate"), ("dp_replicate", "dp_shard"), assignment=(0, 0, 1, 1)
    )
    assert deadlock(one_after_another, section="steady") == ""


GROUPS = ("dp_shard", "dp_replicate", "world")


@given(
    st.lists(st.permutations(GROUPS), min_size=2, max_size=3, unique_by=tuple),
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
)
def test_the_engine_stops_where_the_graph_has_a_ring_and_nowhere_else(orders, kinds):
    assignment = tuple(kind % len(orders) for kind in kinds)
    used = sorted(set(assignment))
    program = in_orders(
        *(tuple(orders[kind]) for kind in used),
        assignment=tuple(used.index(kind) for kind in assignment),
    )
    costs = Costs(cluster=load_cluster("dgx-h100", ranks=4))
    try:
        simulate(validate(program), costs=costs, all_ranks=True)
        stops = False
    except DeadlockError:
        stops = True
    assert bool(deadlock(program, section="steady")) is stops


@pytest.mark.parametrize("case",
    [scenario(STRATEGIES["zero3"]), parse_scenario(KEEPS_PARTS.encode(), where="parts.toml")],
)
def test_a_real_run_is_not_started_where_the_program_breaks_a_law(case, monkeypatch):
    """`zsim run` asks no law, since laws take as long as planning."""
    monkeypatch.setitem(program_laws.PROGRAM_LAWS, "no steps", lambda step: iter([step.phase]))
    SimBackend(device="cpu").run(case, options=RunOptions())

    class Started(SimBackend):
        name = "real"

        def run(self, scenario, *, options):
            raise AssertionError

    with pytest.raises(ProgramError, match="obeys every law, found no steps: program 0, first"):
        real_run.measure(Started("cpu"), SimBackend("cpu").capabilities(), case, RunOptions())
