"""Other ways to train a scenario keep what it asks for: options, checkpointing, mesh; several
changes where one is not enough."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zsim.analysis.advice import Way, advice, changed, none_fits, together, way_of
from zsim.analysis.alternatives import changes, dropped, moved
from zsim.analysis.fit.fit import fit, ways
from zsim.analysis.fit.fit_table import SURER, Candidate
from zsim.cli.commands.analysis import show
from zsim.cli.main import main
from zsim.io.units import format_bytes, format_time
from zsim.ir.mesh import Mesh
from zsim.memory.fits import assess
from zsim.models.training_options import ON_DEVICE
from zsim.runs.figures.step_time import step_time
from zsim.scenario.checks import refusals
from zsim.scenario.derived import derived
from zsim.scenario.plan import planned
from zsim.scenario.scenario import Scenario, from_tables, parse

PREFETCHED = (
    'name = "fsdp2", forward_prefetch = 2, backward_prefetch = 1, offload = true, '
    'reshard_after_forward = 4'
)


def as_asked(case: Scenario) -> Way:
    """The scenario without any change, assessed and simulated."""
    return way_of((), planned(case))


def text(
    strategy: str, *, more: str = "", model: str = 'preset = "gpt-2-124m", num_layers = 3',
    batch: str = "micro_batch = 2, sequence_length = 128", cluster: str = 'preset = "dgx-h100"',
) -> str:
    return f"""
model = {{ {model} }}
batch = {{ {batch} }}
cluster = {{ {cluster} }}
strategy = {{ {strategy} }}
precision = {{ parameters = "bf16", reduce = "fp32" }}
{more}
"""


def scenario(strategy: str, **more: object) -> Scenario:
    return parse(text(strategy, **more).encode(), where="case.toml")  # type: ignore[arg-type]


def tried(case: Scenario) -> dict[str, Scenario]:
    return dict(ways(case))


def test_a_change_of_the_allocator_alone_has_the_program_and_the_time_of_what_it_changes() -> None:
    asked = as_asked(scenario('name = "fsdp2"'))
    planned_again = advice(replace(asked, program=None))
    assert advice(asked) == planned_again
    assert [each.added_ns for each in planned_again if "expandable" in each.change] == [0]


def test_a_candidate_keeps_every_option_that_its_strategy_knows_and_says_what_it_does_without() -> (
    None
):
    case = scenario(PREFETCHED)
    candidates = tried(case)
    assert candidates["fsdp2"].options == case.options
    assert dropped(case, candidates["fsdp2"]) == ()
    kept = candidates["fsdp2, reshard_after_forward = false"].options
    assert (
        kept.forward_prefetch, kept.backward_prefetch, kept.offload, kept.reshard_after_forward
    ) == (2, 1, True, False)
    options = candidates["hsdp, shard groups of 4"].options
    assert (
        options.forward_prefetch, options.backward_prefetch, options.offload,
        options.reshard_after_forward,
    ) == (2, 1, True, 4)
    without = ("reshard_after_forward = 4", "forward_prefetch = 2", "backward_prefetch = 1")
    replaced = [candidates[name] for name in ("zero1", "zero2", "zero3")]
    assert {dropped(case, other) for other in replaced} == {without}
    assert dropped(case, candidates["ddp"]) == (*without, "offload = true")


TABLE = 'offload = {{ optimizer = "cpu", parameters = "cpu", adam = "deepspeed"{} }}'


def test_states_in_host_memory_stay_there_by_each_strategys_own_means() -> None:
    by_option, by_table = scenario('name = "fsdp2", offload = true'), scenario(
        'name = "zero3"', more=TABLE.format("")
    )
    for name, states in (("ddp", ()), ("zero1", ("optimizer",)), ("zero2", ("optimizer",)),
                         ("zero3", ("optimizer", "parameters"))):
        assert tuple(tried(by_option)[name].offload.states) == states
        assert tuple(tried(by_table)[name].offload.states) == states
    for name in ("fsdp2", "hsdp, shard groups of 4"):
        moved_there = tried(by_table)[name]
        assert moved_there.options.offload
        assert moved_there.offload == ON_DEVICE
    rows = {each.name: each for each in fit(by_option).candidates}
    assert rows["zero1"].instead == ('offload.optimizer = "cpu"',)
    assert rows["fsdp2"].instead == rows["ddp"].instead == ()
    assert rows["zero1"].memory.host is not None


def test_shards_that_are_in_host_memory_alone_stay_there_under_the_one_strategy_that_has_it() -> (
    None
):
    case = scenario('name = "deepspeed3"', more='offload = { parameters = "cpu" }')
    assert moved(case, "deepspeed3").offload == case.offload
    for name in ("zero3", "fsdp2"):
        other = moved(case, name)
        assert other.offload == ON_DEVICE
        assert 'offload.parameters = "cpu"' in dropped(case, other)


def test_a_strategy_without_the_offloading_asked_for_is_no_refusal_of_a_key_that_nobody_set() -> (
    None
):
    """ddp keeps activations in host memory, fsdp2 its states and not those on drives."""
    for more in ("", ', activations = "saved_tensors"', ", pin_memory = false"):
        fitted = fit(scenario('name = "zero3"', more=TABLE.format(more)))
        assert fitted.refused == ()
        rows = {each.name: each for each in fitted.candidates}
        assert rows["ddp"].dropped == ('offload.optimizer = "cpu"', 'offload.parameters = "cpu"')
        assert rows["fsdp2"].instead == ("offload = true",)
        pins = ("offload.pin_memory = false",) if "pin_memory" in more else ()
        assert rows["fsdp2"].dropped == (*pins, 'offload.adam = "deepspeed"')
        kept = "saved_tensors" if "activations" in more else None
        assert {each.scenario.offload.activations for each in rows.values()} == {kept}


ON_DRIVES = (
    'offload = { optimizer = "nvme", parameters = "nvme", max_in_cpu = 9, parameter_buffer_count = '
    '6, block_size = "2 MiB", queue_depth = 16 }'
)


def test_keys_of_offload_that_a_strategy_refuses_are_left_out_and_said_so() -> None:
    case = scenario('name = "deepspeed3"', more=ON_DRIVES)
    engines = ("offload.max_in_cpu = 9", "offload.parameter_buffer_count = 6")
    for name, without in (
        ("deepspeed3", ()), ("zero3", engines),
        ("zero2", ('offload.parameters = "nvme"', *engines)),
        ("ddp", ('offload.optimizer = "nvme"', 'offload.parameters = "nvme"')),
    ):
        other = moved(case, name)
        assert refusals.problems(other) == ()
        assert dropped(case, other) == without
        assert from_tables(other.tables, where=name).offload == other.offload


def test_a_key_that_would_be_refused_with_its_default_too_stays_as_it_is() -> None:
    case = scenario('name = "deepspeed3"', more=ON_DRIVES.replace(
        "queue_depth", "pipeline_read = true, buffer_count = 5, queue_depth"
    ))
    refused, = refusals.problems(moved(case, "zero3"))
    assert refused.startswith("offload.buffer_count: expected at least 8")
    assert refused.endswith("found 5")


def test_checkpoints_of_one_strategy_refuse_no_other() -> None:
    case = scenario('name = "deepspeed3"', more="checkpoint = { gather_16bit_weights = true }")
    rows = {each.name: each for each in fit(case).candidates}
    weights = ("checkpoint.gather_16bit_weights = true",)
    assert {name.partition(",")[0]: row.dropped for name, row in rows.items()} == {
        "ddp": weights, "zero1": weights, "zero2": weights, "deepspeed3": (), "fsdp2": weights,
        "hsdp": weights, "zero3": weights,
    }
    assert not rows["zero3"].scenario.tables["checkpoint"]
    many = 'checkpoint = { format = "universal", extract_workers = 8, every = 100 }'
    case = scenario('name = "deepspeed3"', more=many)
    other = moved(case, "fsdp2")
    assert dropped(case, other) == (
        'checkpoint.format = "universal"', "checkpoint.extract_workers = 8"
    )
    assert from_tables(other.tables, where="fsdp2").checkpoint == other.checkpoint
    assert other.checkpoint.every_steps == 100


def test_an_option_that_a_smaller_group_cannot_have_is_left_out_and_said_so() -> None:
    case = scenario(PREFETCHED)
    other = tried(case)["hsdp, shard groups of 2"]
    assert (other.options.reshard_after_forward, other.options.offload) == ("auto", True)
    assert dropped(case, other) == ("reshard_after_forward = 4",)


def test_flat_buffers_keep_their_granularity_and_ddp_its_buckets() -> None:
    flat = tried(scenario('name = "zero3", lookahead = 3, granularity = "25 MiB"'))
    assert {flat[name].options.granularity for name in ("zero1", "zero2", "zero3")} == {25 * 2**20}
    assert flat["zero3"].options.lookahead == 3
    buckets = tried(scenario('name = "zero_redundancy", gradient_as_bucket_view = true, '
                             'bucket_cap_mb = 50'))
    assert (
        buckets["ddp"].options.gradient_as_bucket_view, buckets["ddp"].options.bucket_cap_mb
    ) == (True, 50)
    assert buckets["zero_redundancy"].options == buckets["ddp"].options


def test_the_scenarios_own_checkpointing_is_tried_beside_none_and_all() -> None:
    model = 'activation_checkpointing = { mode = "selective", save = ["linear"], save_every = 2 }'
    case = scenario('name = "fsdp2"', more=model, model='preset = "llama-3-8b"')
    names = [name for name in tried(case) if name.startswith("fsdp2") and "false" not in name]
    assert names == ["fsdp2", "fsdp2, checkpointing as asked for (selective; save = linear; "
                              "save_every = 2)", "fsdp2, checkpointing"]
    assert tried(case)[names[1]].checkpointing == case.checkpointing


def test_replicas_of_smaller_groups_are_tried_on_one_node_and_on_many() -> None:
    def meshes(case: Scenario) -> set[tuple[int, int]]:
        return {other.mesh.shape for other in tried(case).values() if other.strategy == "hsdp"}

    assert meshes(scenario('name = "ddp"')) == {(4, 2), (2, 4)}
    assert meshes(scenario('name = "ddp"', cluster='preset = "dgx-h100", nodes = 4')) == {
        (16, 2), (8, 4), (4, 8)
    }
    assert meshes(scenario('name = "ddp"', cluster='preset = "dgx-h100", ranks = 2')) == set()
    own = scenario(
        'name = "hsdp", dp_replicate = 2, dp_shard = 16', cluster='preset = "dgx-h100", nodes = 4'
    )
    assert (2, 16) in meshes(own)


STAGES = ("zero1", "zero2", "zero3")


def test_each_stage_is_tried_over_a_node_and_over_all_ranks_where_there_are_several_nodes() -> None:
    def meshes(case: Scenario) -> dict[str, set[tuple[int, int]]]:
        others = tried(case).values()
        return {
            name: {other.mesh.shape for other in others if other.strategy == name}
            for name in STAGES
        }

    two = 'preset = "dgx-h100", nodes = 2'
    assert meshes(scenario('name = "ddp"')) == {name: {(1, 8)} for name in STAGES}
    assert meshes(scenario('name = "ddp"', cluster=two)) == {
        name: {(2, 8), (1, 16)} for name in STAGES
    }
    whole = tried(scenario('name = "hsdp", dp_replicate = 1, dp_shard = 8'))
    assert not [name for name in whole if name.startswith("zero") and "group" in name]
    own = scenario('name = "zero2", dp_shard = 4', cluster=two)
    assert meshes(own) == {name: {(4, 4), (2, 8), (1, 16)} for name in STAGES}
    assert own in tried(own).values()
    names = [name for name in tried(own) if name.startswith("zero2") and "check" not in name]
    assert names == ["zero2, shard groups of 4", "zero2, a node a shard group", "zero2"]
    by_name = {candidate.name: candidate for candidate in fit(own).candidates}
    needed = [by_name[name].memory.needed.nbytes for name in names]
    assert needed == sorted(needed, reverse=True)
    assert len({by_name[name].step_time_ns for name in names}) == 3


def test_the_owner_of_each_state_has_no_rows_on_meshes_that_it_does_not_have() -> None:
    case = scenario('name = "zero_redundancy"', cluster='preset = "dgx-h100", nodes = 2')
    meshes = {o.mesh.shape for o in tried(case).values() if o.strategy == "zero_redundancy"}
    assert meshes == {(16, 1)}


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp2", "hsdp"])
def test_on_one_rank_the_change_of_strategy_is_a_plain_module(strategy: str) -> None:
    mesh = ", dp_replicate = 1, dp_shard = 1" if strategy == "hsdp" else ""
    case = scenario(f'name = "{strategy}"{mesh}', cluster='preset = "dgx-h100", ranks = 1')
    others = [other.strategy for _, other in changes(case) if other.strategy != strategy]
    assert others == ["single"]


def test_a_plain_module_goes_to_the_host_by_fsdp2() -> None:
    case = scenario('name = "single"', cluster='preset = "dgx-h100", ranks = 1')
    (other,) = (other for _, other in changes(case) if other.strategy != "single")
    assert (other.strategy, other.options.offload, other.world_size) == ("fsdp2", True, 1)
    assert (other.model, other.precision) == (case.model, case.precision)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("name", STAGES)
def test_a_stage_may_shard_over_a_node_or_over_all_and_more_is_sharded_in_the_same_groups(
    name: str, nodes: int
) -> None:
    cluster = f'preset = "dgx-h100", nodes = {nodes}'
    flat = {what: other.mesh.shape for what, other in changes(
        scenario(f'name = "{name}"', cluster=cluster)
    )}
    over_node = "dp_shard = 8: shard over a node"
    assert flat.get(over_node) == (None if nodes == 1 else (2, 8))
    grouped = dict(changes(scenario(f'name = "{name}", dp_shard = 4', cluster=cluster)))
    assert over_node not in grouped
    assert grouped[f"dp_shard = {8 * nodes}: shard over all ranks"].mesh.shape == (1, 8 * nodes)
    more = [other for what, other in grouped.items() if what.startswith("strategy ")]
    assert {other.mesh.shape for other in more} == (set() if name == "zero3" else {(2 * nodes, 4)})


@pytest.mark.parametrize("strategy", ["fsdp2", "hsdp"])
@pytest.mark.parametrize("asked", ["false", "2", "true", '"auto"'])
def test_who_keeps_blocks_gathered_is_shown_what_freeing_them_needs(
    strategy: str, asked: str
) -> None:
    mesh = "dp_replicate = 2, dp_shard = 4" if strategy == "hsdp" else "dp_shard = 8"
    case = scenario(f'name = "{strategy}", {mesh}, reshard_after_forward = {asked}')
    freed = "hsdp, shard groups of 4" if strategy == "hsdp" else "fsdp2"
    row = f"{freed}, reshard_after_forward = true"
    by_name = {candidate.name: candidate for candidate in fit(case).candidates}
    assert (row in by_name) is (asked in ("false", "2"))
    assert by_name[freed].scenario == case
    if row in by_name:
        resharded = scenario(f'name = "{strategy}", {mesh}, reshard_after_forward = true')
        assert by_name[row].scenario == derived(case, options=resharded.options)
        assert by_name[row].memory.allocated_bytes <= by_name[freed].memory.allocated_bytes
        assert by_name[row].dropped == ()


def test_a_move_is_over_all_ranks_unless_a_mesh_is_given() -> None:
    case = scenario('name = "hsdp", dp_replicate = 2, dp_shard = 4, all_reduce = "last"')
    assert moved(case, "fsdp2").mesh == Mesh(dp_shard=8)
    assert dropped(case, moved(case, "fsdp2")) == ('all_reduce = "last"',)
    assert moved(case, "hsdp", mesh=Mesh(dp_replicate=4, dp_shard=2)).options == case.options


def test_where_no_single_change_is_enough_several_are_tried_together() -> None:
    model, batch = (
        'preset = "llama-3-8b", num_layers = 24', "micro_batch = 2, sequence_length = 8192",
    )
    case = scenario('name = "ddp"', model=model, batch=batch)
    effects = advice(as_asked(case))
    alone, joint = (
        [effect for effect in effects if " + " not in effect.change],
        [effect for effect in effects if " + " in effect.change],
    )
    assert {effect.verdict for effect in alone} <= {"OOM", "TIGHT"}
    assert joint
    assert {effect.verdict for effect in joint} == {"FITS"}
    assert "strategy zero1 + activation checkpointing of every block" in {
        effect.change for effect in joint
    }


def test_of_several_ways_that_are_enough_the_fastest_are_told(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = (
        'preset = "llama-3-8b", num_layers = 20', "micro_batch = 2, sequence_length = 8192",
    )
    case = scenario('name = "ddp"', model=model, batch=batch)
    enough = together(changed(way_of((), planned(case))))
    fastest = min(enough, key=lambda way: step_time(planned(way.scenario)).ns)
    assert fastest != min(enough, key=lambda way: way.memory.needed.nbytes)
    monkeypatch.setattr("zsim.analysis.advice.MOST_SHOWN", 1)
    joint = [effect.change for effect in advice(as_asked(case)) if " + " in effect.change]
    assert joint == [fastest.name]


@pytest.mark.slow  # the next ones join changes that surely fit
def test_where_several_changes_may_just_fit_they_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "tight.toml"
    path.write_text(text(
        'name = "ddp"',
        **OF_FSDP1 | {"batch": "micro_batch = 1, sequence_length = 24576", "more": ""},
    ))
    assert main(["show", "--memory", "--json", str(path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    joint = {
        row["change"]: row["verdict"] for row in printed["what_would_help"]
        if " + " in row["change"]
    }
    assert joint == {"activation checkpointing of every block + strategy zero3": "TIGHT"}
    assert {row["verdict"] for row in printed["what_would_help"] if row["change"] not in joint} == {
        "OOM"
    }
    assert printed["nothing_fits"] is None
    assert main(["fit", str(path), "--json"]) == 0
    fitted = json.loads(capsys.readouterr().out)
    verdicts = {row["name"]: row["verdict"] for row in fitted["candidates"]}
    assert {verdicts[name] for name in verdicts if " + " not in name} == {
        "TIGHT", "OOM"
    }  # more is tried where one may just fit, too
    assert verdicts[fitted["recommended"]] == "FITS"


def test_where_a_single_change_is_enough_none_are_joined() -> None:
    assert not any(" + " in effect.change for effect in advice(as_asked(scenario('name = "ddp"'))))


def test_where_no_candidate_fits_more_is_changed_of_each(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "large.toml"
    large, cluster = 'preset = "llama-3-405b", num_layers = 3', 'preset = "dgx-h100", ranks = 2'
    path.write_text(text('name = "fsdp2"', model=large, batch="micro_batch = 1, sequence_length "
                                                              "= 128", cluster=cluster))
    assert main(["fit", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert " + offload = true" in printed["recommended"]
    chosen = next(row for row in printed["candidates"] if row["name"] == printed["recommended"])
    assert (chosen["verdict"], chosen["options"]["offload"]) == ("FITS", True)


def test_fit_says_what_cannot_be_and_why() -> None:
    fitted = fit(scenario('name = "ddp"', more='optimizer = { name = "sgd", implementation = '
                                              '"fused" }'))
    refused = dict(fitted.refused)
    assert "torch 2.13 has no fused SGD" in refused["fsdp2"]
    strategies = {candidate.scenario.strategy for candidate in fitted.candidates}
    assert strategies == {"ddp", "zero1", "zero2", "zero3"}
    assert all(isinstance(candidate, Candidate) for candidate in fitted.candidates)
    assert {candidate.dropped for candidate in fitted.candidates} == {()}


# -- fsdp1, which replicates and shards by itself

FSDP1 = (
    'name = "fsdp1", dp_shard = 4, dp_replicate = 4, sharding = "grad_op", backward_prefetch = '
    '"post"'
)
OF_FSDP1 = {
    "model": 'preset = "llama-3-8b"', "batch": "micro_batch = 1, sequence_length = 4096",
    "cluster": 'preset = "dgx-a100-40", nodes = 2',
    "more": 'activation_checkpointing = { mode = "full" }',
}
OVER_ALL, FREED = (
    "dp_shard = 16: shard over all ranks", 'sharding = "full": blocks freed after forward',
)


def test_fsdp1_is_advised_what_its_own_shardings_save_and_keeps_its_other_options() -> None:
    case = scenario(FSDP1, **OF_FSDP1)
    changed = dict(changes(case))
    assert (changed[OVER_ALL].strategy, changed[OVER_ALL].mesh, changed[OVER_ALL].options) == (
        "fsdp1", Mesh(dp_shard=16), case.options,
    )
    assert (changed[FREED].strategy, changed[FREED].mesh, changed[FREED].options) == (
        "fsdp1", case.mesh, replace(case.options, sharding="full"),
    )
    effects = {effect.change: effect for effect in advice(as_asked(case))}
    assert assess(planned(case)).verdict == "OOM"
    assert effects[OVER_ALL].verdict == "FITS"
    assert (
        effects[OVER_ALL].saved_bytes
        == assess(planned(case)).needed.nbytes - assess(planned(changed[OVER_ALL])).needed.nbytes
        > 0
    )
    assert (
        effects[FREED].saved_bytes
        == assess(planned(case)).needed.nbytes - assess(planned(changed[FREED])).needed.nbytes
        > 0
    )
    # what is changed is not called left out
    assert {effects[name].dropped for name in (OVER_ALL, FREED)} == {()}


def test_what_fsdp1_does_already_is_not_advised() -> None:
    full = {name for name, _ in changes(scenario('name = "fsdp1", dp_shard = 8'))}
    assert not any("shard" in name for name in full)
    kept = {name for name, _ in changes(scenario('name = "fsdp1", dp_shard = 8, sharding = '
                                                 '"grad_op"'))}
    assert kept - full == {FREED}


def test_two_changes_of_fsdp1s_shardings_are_joined_where_one_is_not_enough() -> None:
    case = scenario(FSDP1, **OF_FSDP1 | {"more": "", "batch": "micro_batch = 2, sequence_length "
                                                              "= 4096"})
    (joint,) = (effect for effect in advice(as_asked(case)) if " + " in effect.change)
    assert joint.change == f"{OVER_ALL} + activation checkpointing of every block"
    assert joint.verdict == "FITS"


def test_fit_has_the_rows_of_fsdp1_for_who_trains_with_it_and_among_them_the_scenario_itself() -> (
    None
):
    case = scenario(FSDP1, **OF_FSDP1)
    of_fsdp1 = {name: other for name, other in tried(case).items() if other.strategy == "fsdp1"}
    shapes = {
        (other.mesh.dp_replicate, other.mesh.dp_shard, other.options.sharding)
        for other in of_fsdp1.values()
    }
    assert shapes == {
        (16 // size, size, sharding) for size in (2, 4, 8, 16) for sharding in ("grad_op", "full")
    }
    assert {other.options.backward_prefetch for other in of_fsdp1.values()} == {"post"}
    own = of_fsdp1["fsdp1, shard groups of 4, checkpointing"]
    assert own == case
    (row,) = (candidate for candidate in fit(case).candidates if candidate.scenario == case)
    assert row.memory.needed == assess(planned(case)).needed
    assert row.dropped == ()
    assert not any(
        other.strategy == "fsdp1" for other in tried(scenario('name = "fsdp2"')).values()
    )


def test_groups_of_fsdp1_that_are_larger_than_a_node_are_tried_as_the_scenario_has_them() -> None:
    own = scenario(
        'name = "fsdp1", dp_replicate = 2, dp_shard = 16', cluster='preset = "dgx-h100", nodes = 4'
    )
    assert own in tried(own).values()
    whole = scenario('name = "fsdp1", dp_shard = 8')
    assert [name for name, other in tried(whole).items() if other == whole] == ["fsdp1"]


@pytest.mark.parametrize(("strategy", "least"), [
    (FSDP1.replace("replicate = 4", "replicate = 2"), "activation checkpointing of every block"),
    ('name = "zero3"', None),
])
def test_where_no_change_is_enough_it_is_said(
    strategy: str, least: str | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Also where nothing can be changed at all. Where something fits, nothing is said."""
    batch, cluster = "micro_batch = 1, sequence_length = 65536", 'preset = "dgx-a100-40"'
    more = OF_FSDP1 | {"batch": batch, "cluster": cluster}
    more["more"] = "" if least else (
        more["more"] + '\noptimizer = { name = "adamw", implementation = "fused" }\nallocator = '
                       '{ expandable_segments = true }'
                       '\noffload.activations = "checkpoint_inputs"'
    )
    path = tmp_path / "large.toml"
    path.write_text(text(strategy, **more))
    assert main(["show", "--memory", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    last = shown[shown.index("nothing fits:") :]
    assert main(["show", "--memory", "--json", str(path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["nothing_fits"] == last
    effects = printed["what_would_help"]
    assert bool(effects) is bool(least)
    assert {effect["verdict"] for effect in effects} <= {"OOM"}
    others = (effect["needed_bytes"] for effect in effects)
    needed = min([printed["needed_bytes"]["nbytes"], *others])
    assert last.startswith(f"nothing fits: even {least or 'as it is it'} needs "
                           f"{format_bytes(needed)} of 39.50 GiB (peak in ")
    assert ("of several together" in last) is bool(effects)


def test_where_something_fits_or_may_nobody_is_told_that_nothing_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "fits.toml"
    path.write_text(text(FSDP1, **OF_FSDP1))
    assert main(["show", "--memory", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["nothing_fits"] is None
    assert main(["show", "--memory", str(path)]) == 0
    assert "nothing fits" not in capsys.readouterr().out
    case = scenario(FSDP1, **OF_FSDP1)
    tight = [effect for effect in advice(as_asked(case)) if effect.verdict == "TIGHT"]
    assert tight
    assert none_fits(assess(planned(case)), tight) == ""


def test_of_what_was_not_tried_nothing_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No change of any scenario can be tried in a limit of nothing."""
    monkeypatch.setattr(show, "MANY_TIMES", 10**9)
    path = tmp_path / "large.toml"
    model, batch = 'preset = "llama-3-405b", num_layers = 2', "micro_batch = 1"
    path.write_text(
        text('name = "ddp"', model=model, batch=batch, cluster='preset = "dgx-a100-40"')
    )
    assert main(["show", "--memory", str(path)]) == 0
    streams = capsys.readouterr()
    assert "OOM: needs" in streams.out
    assert "changes are not simulated" in streams.err
    assert "nothing fits" not in streams.out
    assert "each planned and simulated again" not in streams.out


# -- how long a step takes then


def test_every_step_time_has_its_band_that_zsim_run_gives_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, changed = tmp_path / "plain.toml", tmp_path / "changed.toml"
    path.write_text(text('name = "fsdp2"'))
    changed.write_text(text('name = "fsdp2"', more='optimizer = { name = "adamw", implementation '
                                                   '= "fused" }'))
    times = []
    for each in (path, changed):
        assert main(["run", str(each), "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        times.append((printed["step_time_ns"], printed["step_time_band_ns"]))
        low, high = printed["step_time_band_ns"]
        assert low < printed["step_time_ns"] < high
    assert main(["fit", str(path), "--json"]) == 0
    (row,) = (
        each for each in json.loads(capsys.readouterr().out)["candidates"]
        if each["name"] == "fsdp2"
    )
    assert (row["step_time_ns"], row["step_time_band_ns"]) == times[0]
    assert main(["show", "--memory", "--json", str(path)]) == 0
    (effect,) = (
        each for each in json.loads(capsys.readouterr().out)["what_would_help"]
        if each["change"] == "fused optimizer"
    )
    assert (effect["step_time_ns"], effect["step_time_band_ns"]) == times[1]
    assert effect["added_ns"] == times[1][0] - times[0][0]
    low, high = (100 * ns / times[0][0] - 100 for ns in times[0][1])
    assert main(["fit", str(path)]) == 0
    printed_lines = " ".join(capsys.readouterr().out.split())
    assert f"{format_time(times[0][0])} {low:.0f}/{high:+.0f} %" in printed_lines
    assert printed_lines.count(SURER) == 1
    assert main(["show", "--memory", str(path)]) == 0
    printed_lines = " ".join(capsys.readouterr().out.split())
    low, high = (format_time(ns) for ns in times[1][1])
    assert f" a step, {format_time(times[1][0])} ({low} to {high}); then" in printed_lines
    heading = f"changes tried to save memory, each planned and simulated again; {SURER}"
    assert printed_lines.count(heading) == 1


@pytest.mark.parametrize(
    "off", ["matmul_efficiency", "elementwise_efficiency", "memory_efficiency", "fabric"]
)
def test_a_constant_that_is_off_moves_all_candidates_in_one_direction_and_differences_by_less(
    off: str
) -> None:
    case = scenario(
        'name = "fsdp2"', model='preset = "llama-3-8b", num_layers = 4',
        batch="micro_batch = 1, sequence_length = 2048",
    )
    cluster = case.cluster
    if off == "fabric":
        links = replace(
            cluster.links,
            fabric=replace(cluster.links.fabric, bandwidth=cluster.links.fabric.bandwidth * 2 // 3),
        )
        worse = replace(cluster, links=links)
    else:
        worse = replace(
            cluster, device=replace(cluster.device, **{off: getattr(cluster.device, off) * 0.8})
        )
    before, after = (
        {name: step_time(planned(way)).ns for name, way in ways(asked)}
        for asked in (case, derived(case, cluster=worse))
    )
    moved_by = [after[name] - ns for name, ns in before.items()]
    assert len(moved_by) > 8
    # so of any two the difference moves by less than the time that moves more
    assert min(moved_by) > 0


# -- the allocator's settings


def test_expandable_segments_reserve_less_as_the_rest_of_a_fixed_segment_is_not_kept() -> None:
    fixed = scenario('name = "fsdp2"')
    expandable = scenario('name = "fsdp2"', more="allocator = { expandable_segments = true }")
    verdicts = [assess(planned(case)) for case in (fixed, expandable)]
    assert verdicts[0].allocated_bytes == verdicts[1].allocated_bytes
    # the rest of a segment that no block is in
    assert verdicts[0].cached_bytes > verdicts[1].cached_bytes
    # the rest of a block of a fixed one, which is split off less often
    assert verdicts[0].rounding_bytes > verdicts[1].rounding_bytes


def test_the_allocator_is_no_part_of_what_is_trained() -> None:
    expandable = scenario('name = "fsdp2"', more="allocator = { expandable_segments = true }")
    assert expandable.fingerprint == scenario('name = "fsdp2"').fingerprint


def test_expandable_segments_are_told_with_the_reserved_bytes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plain, asked = tmp_path / "plain.toml", tmp_path / "asked.toml"
    small = 'preset = "gpt-2-124m", num_layers = 2'
    plain.write_text(text('name = "fsdp2"', model=small))
    asked.write_text(text('name = "fsdp2"', model=small, more="allocator = { expandable_segments "
                                                              "= true }"))
    shown = []
    for file in (asked, plain):
        assert main(["show", "--memory", "--json", str(file)]) == 0
        table = json.loads(capsys.readouterr().out)
        shown.append(
            (table["reserved_bytes"], table["expandable_segments"], table.get("allocator"))
        )
    assert shown[0][1:] == (True, "expandable_segments:True")
    assert shown[1][1:] == (False, None)
    assert shown[1][0] > shown[0][0]
    assert main(["run", str(asked)]) == 0
    assert "expandable_segments:True" in capsys.readouterr().out


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_change_gives_deepspeed_s_stages_replicas_which_they_do_not_have(stage: int) -> None:
    asked = scenario(f'name = "deepspeed{stage}"', cluster='preset = "dgx-h100", nodes = 2')
    changed_to = [case for _, case in changes(asked) if case.strategy.startswith("deepspeed")]
    assert changed_to
    assert {case.mesh.dp_replicate for case in changed_to} == {1}
