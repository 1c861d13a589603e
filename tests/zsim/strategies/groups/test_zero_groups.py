"""ZeRO over groups smaller than all ranks: closed forms of traffic and of states, order, replicas.

A group of S ranks shards, and R groups have replicas: the forms are ZeRO's with S for the ranks.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zsim
from tests.support.folders import SCENARIOS
from zsim.analysis.alternatives import changes, moved
from zsim.ir.mesh import Mesh
from zsim.ir.ops import COLLECTIVES, Op
from zsim.ir.order.happens_before import happened
from zsim.memory.fits import assess
from zsim.memory.formulas import model_state_bytes
from zsim.memory.waterfall import formula_text, state_bytes
from zsim.models.training_options import DTYPE_NBYTES
from zsim.runs.figures.step_time import step_time
from zsim.scenario.plan import planned
from zsim.testing.laws.variants import program_of, step_of

UNEVEN = {"preset": "mlp-uneven"}
EVEN = {
    "family": "mlp", "sizes": {"dims": [12, 12], "hidden": 12, "num_classes": 12},
}
"""Each unit has a multiple of 12 elements: a group of 2, 3, 4 or 6 ranks pads nothing."""
FORMS: tuple[dict[str, Any], ...] = (
    {"name": "zero1", "form": "all_reduce"}, {"name": "zero1", "form": "reduce_scatter"},
    {"name": "zero2"}, {"name": "zero3", "lookahead": 0}, {"name": "zero3", "lookahead": 2},
)
CUTS = ("unit", "parameter", "900 B")


def scenario(
    form: dict[str, Any], replicas: int, shards: int, *, accumulation: int = 1, sync: str = "every",
    precision: tuple[str, str] = ("fp32", "fp32"), clip: float = 0.0, **tables: Any,
) -> zsim.Scenario:
    """A small model under `form`, over that many groups of so many ranks."""
    return zsim.Scenario(**{
        "model": UNEVEN, "batch": {"micro_batch": 2, "accumulation": accumulation},
        "cluster": {"preset": "cpu-gloo", "ranks": replicas * shards},
        "strategy": {**form, "dp_replicate": replicas, "dp_shard": shards, "sync": sync},
        "precision": {"parameters": precision[0], "reduce": precision[1]},
        "optimizer": {"name": "adamw", "clip_norm": clip}, **tables,
    })


def steady(case: zsim.Scenario) -> tuple[Op, ...]:
    """The ops of a steady step."""
    return program_of(case).of_rank(0).steady


precisions = st.sampled_from([("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")])
cases = st.builds(
    lambda form, cut, replicas, shards, **more: scenario(
        {**form, "granularity": cut}, replicas, shards, **more
    ),
    st.sampled_from(FORMS), st.sampled_from(CUTS), st.integers(1, 3), st.integers(1, 4),
    accumulation=st.integers(1, 3), sync=st.sampled_from(["every", "last"]),
    precision=precisions, clip=st.sampled_from([0.0, 1.0]),
)


def shards_of(case: zsim.Scenario) -> list[int]:
    """Elements of a rank's shard of each flat buffer, counted from shapes alone."""
    cut, element = case.options.granularity, DTYPE_NBYTES[case.precision.parameters]
    units = [[each.numel for each in unit.parameters] for unit in case.model.units]
    groups = [sum(numels) for numels in units]
    if cut != "unit":
        groups, is_open = [], False
        for numel in (numel for numels in units for numel in numels):
            groups[-1:] = [groups[-1] + numel] if is_open else [*groups[-1:], numel]
            is_open = cut != "parameter" and groups[-1] * element < cut
    return [-(-numel // case.mesh.dp_shard) for numel in groups]


@given(cases)
def test_gradients_leave_a_group_once_a_step_and_parameters_never(case: zsim.Scenario) -> None:
    """Bytes of each collective over each axis are those of the closed forms."""
    mesh, name, own = case.mesh, case.strategy, shards_of(case)
    shard, whole = sum(own), sum(own) * mesh.dp_shard
    kept, reduced = (
        DTYPE_NBYTES[dtype] for dtype in (case.precision.parameters, case.precision.reduce)
    )
    times = case.batch.accumulation if case.sync == "every" else 1
    expected = Counter[tuple[str, str]]()
    if mesh.dp_replicate > 1:
        expected["all_reduce", "dp_replicate"] = shard * reduced
    if mesh.dp_shard > 1:
        form = getattr(case.options, "form", "reduce_scatter")
        expected[form, "dp_shard"] += times * whole * reduced
        gathers = 2 * case.batch.accumulation if name == "zero3" else 1
        expected["all_gather", "dp_shard"] = gathers * whole * kept
        if case.optimizer.clip_norm:
            expected["all_reduce", "dp_shard"] += len(own) * kept
    sent = Counter[tuple[str, str]]()
    for op in steady(case):
        if op.kind in COLLECTIVES:
            sent[op.kind, op.group] += op.nbytes
    assert sent == expected


@given(cases)
def test_a_rank_holds_what_it_does_in_its_group_alone(case: zsim.Scenario) -> None:
    """Beside replicas no byte more is held, and the peak is no higher where anything is sharded.

    It may be lower: shards that are summed in the reduce dtype do not stay beside their sum.
    """
    mesh = case.mesh
    alone = case.with_(
        cluster={"ranks": mesh.dp_shard}, strategy={**case.tables["strategy"], "dp_replicate": 1}
    )
    ours, theirs = step_of(case), step_of(alone)
    assert [each.held for each in ours.memory] == [each.held for each in theirs.memory]
    casts = case.precision.reduce != case.precision.parameters
    if mesh.dp_shard > 1 and not (casts and case.sync == "every" and case.batch.accumulation > 1):
        assert ours.peak == theirs.peak
    elif mesh.dp_shard > 1:
        assert ours.peak <= theirs.peak


@given(
    st.sampled_from(FORMS), st.integers(1, 3), st.sampled_from([1, 2, 3, 4, 6]), precisions
)
def test_states_are_those_of_zeros_table_with_the_ranks_of_a_group(
    form: dict[str, Any], replicas: int, shards: int, precision: tuple[str, str]
) -> None:
    case = scenario(form, replicas, shards, precision=precision, model=EVEN)
    (memory,) = step_of(case).memory
    counters = 4 * len(case.model.units)
    assert sum(memory.held.values()) - counters == model_state_bytes(
        case.model.num_parameters, stage=case.strategy, num_ranks=shards,  # type: ignore[arg-type]
        state=state_bytes(case),
    )
    if form["name"] == "zero3":
        assert formula_text(case).endswith(f"Ψ/{shards}")


@pytest.mark.parametrize("precision", [("fp32", "fp32"), ("bf16", "fp32")])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_an_all_reduce_follows_its_units_reduction_and_holds_up_no_other(
    form: dict[str, Any], precision: tuple[str, str]
) -> None:
    """A stream of its own, as hsdp has it: the next unit is reduced over shards meanwhile."""
    ops = steady(scenario(form, 2, 2, precision=precision))
    order = happened(ops)
    over_replicas = [op for op in ops if op.group == "dp_replicate"]
    before = [
        max(
            (op for op in ops[: each.index] if op.unit == each.unit and op.group == "dp_shard"
             and op.kind != "all_gather"),
            key=lambda op: op.index,
        )
        for each in over_replicas
    ]
    assert len(over_replicas) == 5
    assert all(
        order.before(shards.index, op.index)
        for shards, op in zip(before, over_replicas, strict=True)
    )
    assert {op.stream for op in over_replicas} == {"all_reduce"}
    if form.get("form") != "all_reduce":  # those share a stream
        pairs = zip(over_replicas, before[1:], strict=False)
        assert not any(order.before(op.index, later.index) for op, later in pairs)
    step = next(op for op in ops if op.kind == "optimizer")
    assert all(order.before(op.index, step.index) for op in over_replicas)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_micro_batches_are_summed_in_the_reduce_dtype_before_they_leave_a_group(
    form: dict[str, Any]
) -> None:
    case = scenario(form, 2, 2, accumulation=2, precision=("bf16", "fp32"))
    ops = [op for op in steady(case) if op.unit == "blocks.3"]
    last = next(op.index for op in ops if op.group == "dp_replicate")
    (reduced,) = (op for op in ops if op.index == last)
    assert (reduced.dtype, reduced.micro_batch, reduced.nbytes) == ("float32", 1, 4 * 2839)
    (cast,) = (op for op in ops if last in op.waits and op.kind == "copy")
    assert (cast.stream, cast.kernels[0].nbytes) == ("all_reduce", (4 + 2) * 2839)


@pytest.mark.parametrize(("replicas", "micro_batches"), [(1, set()), (2, {1})])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradients_of_what_has_no_shards_are_copied_to_leave_the_rank_alone(
    form: dict[str, Any], replicas: int, micro_batches: set[int]
) -> None:
    case = scenario(form, replicas, 1, accumulation=2, precision=("bf16", "fp32"))
    assert {op.micro_batch for op in steady(case) if op.kind == "copy"} == micro_batches


def test_without_sizes_it_shards_over_all_ranks_and_with_one_the_rest_are_replicas() -> None:
    sizes: dict[tuple[tuple[str, int], ...], tuple[int, int]] = {
        (): (1, 4), (("dp_shard", 4),): (1, 4), (("dp_shard", 2),): (2, 2),
        (("dp_replicate", 4),): (4, 1), (("dp_replicate", 1),): (1, 4),
    }
    for name in ("zero1", "zero2", "zero3"):
        for axes, shape in sizes.items():
            case = zsim.Scenario(
                model=UNEVEN, batch={"micro_batch": 2}, cluster={"preset": "cpu-gloo", "ranks": 4},
                strategy={"name": name, **dict(axes)},
            )
            assert case.mesh.shape == shape


@pytest.mark.parametrize("axes", [{"dp_shard": 3}, {"dp_replicate": 2, "dp_shard": 4}])
def test_a_mesh_that_is_not_of_all_ranks_is_refused(axes: dict[str, int]) -> None:
    with pytest.raises(zsim.ScenarioError, match=r"cluster: expected 8|expected a divisor of the"):
        zsim.Scenario(
            model=UNEVEN, batch={"micro_batch": 2}, cluster={"preset": "cpu-gloo", "ranks": 4},
            strategy={"name": "zero2", **axes},
        )


def test_shards_in_a_node_cost_memory_and_save_time_where_the_network_is_slow() -> None:
    """The published-size example: what its description says, and what is advised of it."""
    case = zsim.load(SCENARIOS / "published/zero2-llama-2-7b-8x8-a100.toml")
    over_all = dict(changes(case))["dp_shard = 64: shard over all ranks"]
    assert over_all == moved(case, "zero2", mesh=Mesh(dp_shard=64))
    in_nodes, wide = planned(case), planned(over_all)
    more = assess(in_nodes).needed.nbytes - assess(wide).needed.nbytes
    assert 11 * 2**30 < more < 11.5 * 2**30
    assert 0.80 < step_time(in_nodes).ns / step_time(wide).ns < 0.87  # a sixth
    back = dict(changes(over_all))["dp_shard = 8: shard over a node"]
    assert back.mesh == case.mesh


@pytest.mark.parametrize("precision", [("fp32", "fp32"), ("bf16", "fp32")])
@pytest.mark.parametrize("form", FORMS[:2], ids=str)
def test_groups_of_one_reduce_nothing_in_the_first_micro_batch(
    form: dict[str, Any], precision: tuple[str, str]
) -> None:
    for replicas in (1, 2):
        ops = steady(scenario(form, replicas, 1, accumulation=2, precision=precision))
        streams = {op.stream for op in ops if op.micro_batch == 0 or replicas == 1}
        assert streams <= {"compute", "host"}, replicas
