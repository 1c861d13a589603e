"""Exported and imported again a scenario is the same, as far as the tool's config can say it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from tests.support.configs import imported
from zsim import ArgumentError, Scenario, ScenarioError, load, simulate
from zsim.cli.main import main
from zsim.configs.exported import Exported
from zsim.configs.front import export_config, import_config
from zsim.scenario.plan import planned

NAMES = {"deepspeed": "ds.json", "accelerate": "config.yaml", "torchtitan": "train.toml"}
MODEL = {"preset": "llama-tiny"}
SIZES = st.integers(1, 10**6)
OPTIMIZERS = st.fixed_dictionaries({
    "name": st.just("adamw"), "implementation": st.sampled_from(["fused", "foreach"]),
    "learning_rate": st.sampled_from([1e-3, 3e-4]), "weight_decay": st.sampled_from([0.0, 0.1]),
    "clip_norm": st.sampled_from([0.0, 1.0]),
})
DTYPES = st.sampled_from(["fp32", "bf16"])
BATCHES = st.fixed_dictionaries({
    "micro_batch": st.integers(1, 4), "accumulation": st.integers(1, 4),
    "sequence_length": st.just(32),
})


@st.composite
def of_deepspeed(draw: st.DrawFn) -> Scenario:
    """A scenario that a ds_config can say."""
    stage = draw(st.sampled_from([1, 2, 3]))
    strategy = {"name": f"deepspeed{stage}"} | draw(st.fixed_dictionaries({}, optional={
        "reduce_bucket_size": SIZES, "overlap_comm": st.booleans(),
        **({"stage3_max_live_parameters": SIZES, "stage3_prefetch_bucket_size": SIZES,
            "stage3_param_persistence_threshold": SIZES, "sub_group_size": SIZES,
            "zero_hpz_partition_size": st.sampled_from([1, 2])}
           if stage == 3 else {"round_robin_gradients": st.booleans()}),
    }))
    shards_alone = st.fixed_dictionaries(
        {"parameters": st.just("cpu")}, optional={"pin_memory": st.booleans()}
    )
    offload = draw(st.none() | shards_alone | st.fixed_dictionaries(
        {"optimizer": st.just("cpu"), "adam": st.sampled_from(["torch", "deepspeed"])},
        optional={"pin_memory": st.booleans(),
                  **({"parameters": st.just("cpu")} if stage == 3 else {})},
    ))
    try:
        return Scenario(
            model=MODEL, cluster={"preset": "cpu-gloo", "ranks": draw(st.sampled_from([2, 4]))},
            batch=draw(BATCHES), strategy=strategy, optimizer=draw(OPTIMIZERS),
            precision={"parameters": draw(DTYPES), "reduce": draw(DTYPES)},
            **({"offload": offload} if offload else {}),
        )
    except ScenarioError:
        reject()


@st.composite
def of_accelerate(draw: st.DrawFn) -> Scenario:
    """A scenario that accelerate's YAML can say: neither its optimizer nor its batch."""
    name = draw(st.sampled_from(["single", "ddp", "fsdp1", "fsdp2", "hsdp"]))
    whole = name in ("single", "ddp")
    options = {
        "single": {}, "ddp": {},
        "fsdp1": {
            "sharding": st.sampled_from(["full", "grad_op"]),
            "backward_prefetch": st.sampled_from(["pre", "post", "none"]),
            "forward_prefetch": st.booleans(), "use_orig_params": st.booleans(),
        },
        "fsdp2": {"reshard_after_forward": st.sampled_from(["auto", False])},
        "hsdp": {
            "reshard_after_forward": st.sampled_from(["auto", False]), "dp_shard": st.just(2),
            "dp_replicate": st.just(2),
        },
    }[name]
    dtype = draw(DTYPES)
    precision = {"autocast": "bf16" if dtype == "bf16" else "none"} if whole else {
        "parameters": dtype, "reduce": dtype
    }
    checkpoints = {"mode": draw(st.sampled_from(["none", "full"]))} if not whole else {}
    ranks = 1 if name == "single" else 4
    return Scenario(
        model=MODEL, cluster={"preset": "cpu-gloo", "ranks": ranks}, precision=precision,
        batch={"micro_batch": 2, "sequence_length": 32}, activation_checkpointing=checkpoints,
        strategy={"name": name, **draw(st.fixed_dictionaries(options)),
                  **({} if name == "single" else {"sync": "last"})},
        wrapping={"ends": "apart"} if name in ("fsdp2", "hsdp") else {},
    )


@st.composite
def of_torchtitan(draw: st.DrawFn) -> Scenario:
    """A scenario that torchtitan's TOML can say."""
    name = draw(st.sampled_from(["single", "ddp", "fsdp2", "hsdp"]))
    whole = name in ("single", "ddp")
    mesh = {"single": {}, "ddp": {"dp_replicate": 8}, "fsdp2": {"dp_shard": 8},
            "hsdp": {"dp_replicate": 2, "dp_shard": 4}}[name]
    reshards = st.sampled_from(["auto", True, False])
    sharded = {"reshard_after_forward": draw(reshards)} if not whole else {}
    checkpointing = draw(st.sampled_from([
        {"mode": "none"}, {"mode": "full"}, {"mode": "full", "every": 2},
        {"mode": "selective", "save": ["linear", "attention"], "save_every": 2},
    ]))
    precision = {"autocast": "bf16"} if whole else {
        "parameters": draw(DTYPES), "reduce": draw(DTYPES)
    }
    size = {"ranks": 1} if name == "single" else {"nodes": 1}
    return Scenario(
        model={"preset": "llama-3-8b", "loss_dtype": "float32"}, precision=precision,
        cluster={"preset": "dgx-h100", **size}, batch=draw(BATCHES),
        strategy={"name": name, **mesh, **sharded}, optimizer=draw(OPTIMIZERS),
        activation_checkpointing=checkpointing,
        wrapping={} if whole else {"ends": "apart"},
        execution={"compile": draw(st.booleans())},
    )


SAYABLE = {"deepspeed": of_deepspeed(), "accelerate": of_accelerate(),
           "torchtitan": of_torchtitan()}
OPEN = {
    "deepspeed": ("batch.sequence_length",),
    "accelerate": ("batch.sequence_length", "batch.micro_batch"), "torchtitan": (),
}
"""Keys that a kind does not say, which the user answers."""


@pytest.mark.parametrize("kind", SAYABLE)
@settings(max_examples=20)
@given(data=st.data())
def test_a_scenario_exported_and_imported_again_is_the_same(kind, data, tmp_path_factory):
    scenario = data.draw(SAYABLE[kind])
    folder = tmp_path_factory.mktemp("export")
    cluster = scenario.tables["cluster"]
    answers = {"batch__micro_batch": None, "batch__sequence_length": None, "cluster__ranks": None}
    answers |= {
        key.replace(".", "__"): scenario.tables["batch"][key.partition(".")[2]]
        for key in OPEN[kind]
    }
    if kind != "accelerate":
        answers |= {f"cluster__{key}": cluster[key] for key in ("nodes", "ranks") if key in cluster}
    again = imported(
        folder, export_config(scenario, kind).text, kind, name=NAMES[kind],
        model=scenario.tables["model"]["preset"], cluster=cluster["preset"], **answers,
    ).scenario
    assert again == scenario


@pytest.mark.parametrize("options", [
    {"leaf_module": "blocks"},
    {"leaf_module": "none", "stage3_module_granularity_threshold": 5,
     "zero_quantized_gradients": True, "zero_quantized_weights": True},
])
def test_leaf_blocks_are_exported_by_their_names_and_options_of_stage_3_as_they_are(
    options, tmp_path
):
    scenario = load("scenarios/parity/deepspeed3-gpt-2-leaf-blocks.toml").with_(strategy=options)
    text = export_config(scenario, "deepspeed").text
    again = imported(tmp_path, text, "deepspeed", batch__micro_batch=None, cluster__ranks=2,
                     batch__sequence_length=32).scenario
    assert options.items() <= asdict(again.options).items()
    for key in ("options", "model", "batch", "optimizer", "precision", "offload"):
        assert getattr(again, key) == getattr(scenario, key)


def test_a_ds_config_does_not_say_an_order_of_blocks():
    scenario = load("scenarios/parity/deepspeed3-llama-2.toml").with_(strategy={"trace": "breaks"})
    exported = export_config(scenario, "deepspeed")
    assert "trace" not in exported.text
    assert "strategy.trace: the order of blocks is the model's own" in exported.unsaid


FSDP2 = "scenarios/parity/fsdp2-gpt-4.toml"


def test_what_a_kind_does_not_say_is_told():
    scenario = load(FSDP2).with_(precision={"parameters": "bf16", "reduce": "fp32"})
    unsaid = export_config(scenario, "accelerate").unsaid
    assert "batch.micro_batch" in unsaid
    assert "precision.reduce: accelerate reduces in bf16 too" in unsaid
    each = scenario.with_(batch={"accumulation": 2})
    last = each.with_(strategy={"sync": "last"})
    told = "strategy.sync: accelerate reduces after the last micro-batch"
    assert [told in export_config(every, "accelerate").unsaid for every in (scenario, each, last)
            ] == [False, True, False]


def test_no_clipping_is_an_infinite_norm_for_torchtitan_which_scales_gradients_to_any(tmp_path):
    """torchtitan 0.2.2 hands max_norm to clip_grads_with_norm_ at each step: 0 trains nothing."""
    scenario = load("scenarios/published/llama-3-8b-8-h100.toml")
    exported = export_config(scenario, "torchtitan")
    assert "max_norm = inf" in exported.text
    assert "model.loss_dtype: torchtitan casts logits to float32" in exported.unsaid
    assert ("optimizer.clip_norm: torchtitan computes a norm at each step; inf clips none"
            in exported.unsaid)
    clipped = export_config(scenario.with_(
        optimizer={"clip_norm": 1.0}, model={"loss_dtype": "float32"}
    ), "torchtitan")
    assert "max_norm = 1.0" in clipped.text
    assert not any("clip" in text or "loss" in text for text in clipped.unsaid)


@pytest.mark.parametrize("kind", ["accelerate", "torchtitan"])
def test_units_that_a_kind_makes_otherwise_are_told(kind):
    tied, untied = load(FSDP2), load(FSDP2).with_(model={"preset": "llama-tiny"})
    apart = untied.with_(wrapping={"ends": "apart"})
    told = [
        any(text.startswith("wrapping.ends: ") for text in export_config(each, kind).unsaid)
        for each in (tied, untied, apart)
    ]
    assert told == [False, True, False]


@pytest.mark.parametrize(("kind", "able"), [
    ("deepspeed", "ddp, deepspeed1"), ("torchtitan", "ddp, fsdp2, hsdp or single"),
    ("accelerate", "ddp, fsdp1"),
    ("fully_shard", "fsdp2 or hsdp"),
])
def test_a_strategy_that_a_tool_does_not_have_is_refused(kind, able):
    scenario = load(FSDP2).with_(strategy={"name": "zero_redundancy"})
    with pytest.raises(ScenarioError, match=f"strategy.name: expected {able}"):
        export_config(scenario, kind)


@pytest.mark.parametrize(("kind", "told"), [("nowhere", '"nowhere"'), (["deepspeed"], "a list")])
def test_a_kind_that_is_none_is_refused(kind, told):
    with pytest.raises(ArgumentError, match=f"kind: expected accelerate.* found {told}"):
        export_config(load(FSDP2), kind)
    with pytest.raises(ArgumentError, match=f"kind: expected accelerate.* found {told}"):
        import_config("a.json", kind=kind)


def test_zero_stages_become_those_of_deepspeed_and_that_is_told():
    result = export_config(load("scenarios/parity/zero3-mlp-4.toml"), "deepspeed")
    assert json.loads(result.text)["zero_optimization"] == {"stage": 3}
    assert any("zero3 becomes DeepSpeed's stage 3" in text for text in result.unsaid)


def test_the_command_writes_prints_and_names_what_is_left_out(tmp_path, capsys):
    out = str(tmp_path / "config.yaml")
    assert main(["export", "accelerate", FSDP2, "-o", out]) == 0
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("note: not in a config of accelerate: ")
    assert "batch.micro_batch; " in told[0]
    assert main(["export", "torchtitan", FSDP2]) == 0
    assert 'data_parallel_shard_degree = 4' in capsys.readouterr().out
    assert main(["export", "chakra", FSDP2]) == 2
    assert "-o: expected a prefix of 5 files" in capsys.readouterr().err


def test_every_exporter_is_a_choice_of_the_command(capsys):
    assert main(["export", "nowhere", FSDP2]) == 2
    able = "accelerate, chakra, deepspeed, fully_shard or torchtitan"
    assert f"expected {able}" in capsys.readouterr().err


def fields(message: bytes) -> dict[int, list[int | bytes]]:
    """The fields of a protobuf message by number: whole numbers, and bytes of the others."""
    found_fields: dict[int, list[int | bytes]] = {}
    at = 0
    while at < len(message):
        tag, at = varint(message, at)
        value, at = varint(message, at)
        if tag & 7 == 2:
            found_fields.setdefault(tag >> 3, []).append(message[at : at + value])
            at += value
        else:
            assert tag & 7 == 0
            found_fields.setdefault(tag >> 3, []).append(value)
    return found_fields


def varint(data: bytes, at: int) -> tuple[int, int]:
    """A number in base 128 at a position, and the position after it."""
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 0x80:
            return value, at


def nodes(result: Exported, rank: int) -> Iterator[dict[str, object]]:
    """The nodes of one rank's trace, with their attributes by name."""
    data = result.files[f"{rank}.et"]
    assert isinstance(data, bytes)
    at = 0
    while at < len(data):
        size, at = varint(data, at)
        message, at = fields(data[at : at + size]), at + size
        if 3 not in message:  # the metadata
            continue
        attributes = {}
        for attribute in message.get(10, ()):
            inner = fields(attribute)
            name = inner.pop(1)[0].decode()
            attributes[name] = next(iter(inner.values()))[0]
        yield {
            "id": message.get(1, [0])[0], "name": message[2][0].decode(), "type": message[3][0],
            "waits": message.get(5, []), "us": message.get(7, [0])[0], **attributes,
        }


@pytest.mark.parametrize("file", ["fsdp2-gpt-4", "hsdp-gpt-2x2", "deepspeed3-llama-2"])
def test_chakras_files_have_every_collective_after_what_it_waits_for(file):
    scenario = load(f"scenarios/parity/{file}.toml")
    result = export_config(scenario, "chakra")
    groups = json.loads(result.files["groups.json"])
    run = simulate(scenario, all_ranks=True)
    for rank in range(scenario.world_size):
        told = list(nodes(result, rank))
        assert [node["id"] for node in told] == list(range(len(told)))
        assert all(wait < node["id"] for node in told for wait in node["waits"])
        moved = [(n["name"].split()[0], n["comm_size"]) for n in told if n["type"] == 7]
        steady = run.record.ranks[rank].phases["steady"].collectives
        assert sorted(moved) == sorted((record.op, record.nbytes) for record in steady)
        assert all(rank in groups[n["pg_name"].decode()] for n in told if n["type"] == 7)
        program = planned(scenario).program.of_rank(rank)
        flops = sum(kernel.flops for op in program.steady for kernel in op.kernels)
        assert sum(node.get("num_ops", 0) for node in told) == flops
