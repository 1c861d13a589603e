"""DeepSpeed's stages against the engine itself: as tests/measured/deepspeed.json has recorded it,
and for real where the extra `deepspeed` is installed."""

import json
import sys
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

import zsim
from tests.measured import deepspeed as measured
from tests.support.configs import imported
from tests.support.folders import PARITY, ROOT
from zreal.modules.modules import empty
from zreal.observer.subjects import deepspeed_engine
from zreal.processes import launch
from zsim.analysis.checkpoints.checkpoint import checkpoint
from zsim.errors import BackendUnavailableError
from zsim.models.called_modules import granular
from zsim.runs.backend import RunOptions
from zsim.runs.simulator import SimBackend
from zsim.scenario.scenario import Scenario, load, parse
from zsim.strategies.deepspeed_engine.config_keys import REMOVED

RECORD = json.loads((ROOT / "tests/measured/deepspeed.json").read_text())
PRECISIONS = measured.PRECISIONS
FILES = sorted(PARITY.glob("deepspeed*.toml"))
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed: zsim[real,deepspeed]"
)


def wrong(row: dict[str, Any]) -> list[str]:
    """The phases of a row's first and last rank that are not predicted to the byte."""
    scenario = parse(row["text"].encode(), where="row.toml")
    ranks = SimBackend().run(scenario, options=RunOptions(all_ranks=True)).ranks
    return [
        f"{which}, {phase}: {row['text']}"
        for which, rank in (("first_rank", ranks[0]), ("last_rank", ranks[-1]))
        for phase in ("construction", "first", "steady")
        if measured.figures(rank.phases[phase]) != row[which][phase]
    ] + [
        f"{which}, groups: {row['text']}"
        for which, rank in (("first_rank", ranks[0]), ("last_rank", ranks[-1]))
        if "groups" in row[which] and row[which]["groups"] != {
            each.group: list(scenario.mesh.group(each.group, rank.rank))
            for phase in rank.phases.values() for each in phase.collectives
        }
    ]


def test_the_record_is_of_the_version_that_is_modelled() -> None:
    assert RECORD["deepspeed"].startswith("0.19.")
    grids = [
        *measured.grid(), *measured.sharded_grid(), *measured.adam_grid(),
        *measured.activations_grid(), *measured.quantized_grid(), *measured.narrow_grid(),
        *measured.granularity_grid(), *measured.dropouts_grid(), *measured.broken_grid(),
        *measured.broken_copies_grid(),
    ]
    assert len(RECORD["rows"]) >= 150 + 60 + 20 + 20 + len(grids)


@pytest.mark.parametrize("start", range(0, len(RECORD["rows"]), 20))
def test_recorded_steps_are_predicted_to_the_byte(
    start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # from which rows name models of transformers
    assert [line for row in RECORD["rows"][start : start + 20] for line in wrong(row)] == []


@needs_deepspeed
@pytest.mark.gloo
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_scenario_agrees_with_the_engine_on_gloo_ranks(file) -> None:
    comparison = zsim.validate(load(file), against="gloo", timeout_s=300)

    details = {check.name: check.detail for check in comparison.checks if check.status != "ok"}
    assert {name: text for name, text in details.items() if "unsupported" not in text} == {}
    exact = {check.name for check in comparison.checks if check.detail.startswith("exact")}
    assert {"collective order", "bytes", "memory at rest", "memory of parts"} <= exact


USERS = "tests.zreal.own.own_modules:"


@needs_deepspeed
@pytest.mark.gloo
@pytest.mark.parametrize(("module", "strategy", "more"), [
    ("perceptron", {"name": "deepspeed1"}, {}),
    ("transformer", {"name": "deepspeed2"}, {"precision": PRECISIONS[2]}),
    ("convolutions", {"name": "deepspeed2", "overlap_comm": True}, {"precision": PRECISIONS[1]}),
    ("keeping", {"name": "deepspeed1"}, {"offload": measured.ON_HOST}),
    ("adapted", {"name": "deepspeed2"}, {"precision": PRECISIONS[4]}),  # frozen ones come first
    ("towers", {"name": "deepspeed2", "round_robin_gradients": True}, {}),
])
def test_a_users_module_agrees_with_the_engine_on_gloo_ranks(module, strategy, more) -> None:
    case = Scenario(
        model={"preset": "gpt-tiny"}, batch={"micro_batch": 1, "accumulation": 2},
        cluster={"preset": "cpu-gloo", "ranks": 2},
        strategy=strategy | {"reduce_bucket_size": 2000},
        optimizer={"clip_norm": 0.5}, **more,
    )
    comparison = zsim.validate(case, against="gloo", module=USERS + module, timeout_s=300)

    told = {check.name: check.status for check in comparison.checks}
    assert [name for name, status in told.items() if status not in ("ok", "unsupported")] == []
    exact = {check.name for check in comparison.checks if check.detail.startswith("exact")}
    assert {"collective order", "bytes", "memory at rest", "memory of parts"} <= exact
    assert told["numerics"] == "ok"


@pytest.mark.parametrize(("module", "stage", "said"), [
    ("transformer", 3, "which gathers module by module, found one traced by units"),
    ("scaled", 2, "at least one dimension, found logit_scale without"),
])
def test_a_users_module_that_the_engine_cannot_have_is_refused(module, stage, said) -> None:
    case = Scenario(
        model={"preset": "gpt-tiny"}, batch={"micro_batch": 1},
        cluster={"preset": "cpu-gloo", "ranks": 2}, strategy={"name": f"deepspeed{stage}"},
    )
    with pytest.raises(zsim.ScenarioError, match=said):
        zsim.run(case, module=USERS + module)


@needs_deepspeed
@pytest.mark.gloo
@pytest.mark.parametrize("sub_group_size", [10**9, 5000])
def test_saved_files_of_stage_3_have_the_tensors_that_are_told(
    sub_group_size: int, tmp_path: Path
) -> None:
    case = Scenario(
        model={"preset": "gpt-tiny"}, batch={"micro_batch": 1, "sequence_length": 16},
        cluster={"preset": "cpu-gloo", "ranks": 2}, checkpoint={"format": "deepspeed"},
        strategy={"name": "deepspeed3", "reduce_bucket_size": 20_000,
                  "sub_group_size": sub_group_size},
        precision={"parameters": "bf16", "reduce": "fp32"},
    )
    saved = launch.launch(
        "tests.measured.deepspeed:saved_rank",
        {"text": case.to_toml(), "folder": str(tmp_path)}, world_size=2, timeout_s=300,
    )
    assert saved[0] == {file.name: sorted(file.tensors) for file in checkpoint(case).files}


class Hooks:
    """A pair of hooks on saved tensors, as a checkpoint has them."""

    def pass_on(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def test_a_work_of_gloo_keeps_the_hooks_of_its_thread_until_it_is_dropped() -> None:
    """A checkpoint keeps the input of a block by these hooks, if a gather ahead begins in it.

    gloo's own thread drops the work a moment after it is done: it has ended once the group has.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        hooks = Hooks()
        alive = weakref.ref(hooks)
        with saved_tensors_hooks(hooks.pass_on, hooks.pass_on):
            work = dist.all_gather_into_tensor(torch.empty(4), torch.ones(4), async_op=True)
        del hooks
        work.wait()
    finally:
        dist.destroy_process_group()
    assert alive() is not None
    del work
    assert alive() is None


BF16: dict[str, Any] = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2}
OWN: dict[int, tuple[dict[str, Any], ...]] = {
    1: ({}, BF16), 2: (BF16, {"bf16": {"enabled": True, "check_grad_overflow": False}}),
    3: (
        BF16, {"zero_optimization": {"stage3_model_persistence_threshold": 150}},
        {"zero_optimization": {"prefetch_bucket_size": 500, "max_reuse_distance": 0}},
    ),
}
"""Configs as users have them, which say little, by their stage."""


@needs_deepspeed
@pytest.mark.gloo
@pytest.mark.parametrize("stage", OWN)
def test_an_imported_config_is_what_the_engine_makes_of_it(stage: int, tmp_path: Path) -> None:
    always = {"reduce_bucket_size": 2000, "stage": stage}
    if stage == 3:
        always |= {"stage3_prefetch_bucket_size": 3000, "stage3_param_persistence_threshold": 100}
    configs = [
        {
            "train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True,
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        } | own | {"zero_optimization": always | own.get("zero_optimization", {})}
        for own in OWN[stage]
    ]
    for config in configs:  # DeepSpeed takes the short names where the long ones are not there
        zero = config["zero_optimization"]
        for key in [key for key in zero if f"stage3_{key}" in zero]:
            del zero[f"stage3_{key}"]
    texts = [
        imported(tmp_path, config, batch__sequence_length=16, cluster__ranks=2,
                 batch__micro_batch=None).scenario.to_toml()
        for config in configs
    ]
    first, last = launch.launch(
        "tests.measured.deepspeed:measured_rank", {"texts": texts, "configs": configs},
        world_size=2, timeout_s=300,
    )
    rows = [
        {"text": text, "first_rank": first[index], "last_rank": last[index]}
        for index, text in enumerate(texts)
    ]
    assert [line for row in rows for line in wrong(row)] == []


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.gloo
def test_150_random_draws_are_predicted_to_the_byte() -> None:
    rows = []
    for draw, count in ((measured.draw, 100), (measured.draw_sharded, 50)):
        drawn = [Scenario(**draw(seed)) for seed in range(1000, 1000 + count)]
        rows += measured.rows(drawn, "deepspeed", timeout_s=3000)

    assert [line for row in rows for line in wrong(row)] == []


@needs_deepspeed
@pytest.mark.parametrize("model", [
    *measured.MODELS, {"preset": "gpt-tiny"}, {"preset": "mlp-uneven"},
    *({"huggingface": f"tests/measured/deepspeed_models/{name}.json"} for name in measured.CONFIGS),
])
def test_leaves_by_mean_size_are_those_that_deepspeed_takes(
    model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.utils.z3_leaf_module import z3_leaf_module

    if "huggingface" in model:
        pytest.importorskip("transformers")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(parameter_offload, "print_rank_0", lambda *_, **__: None)
    case = Scenario(
        model=model, batch={"micro_batch": 2} | (
            {} if model.get("family") == "mlp" or "mlp" in model.get("preset", "")
            else {"sequence_length": 8}
        ),
        cluster={"preset": "cpu-gloo", "ranks": 2}, strategy={"name": "deepspeed3"},
    )
    made = empty(case.model, seed=0)
    for parameter in made.parameters():
        parameter.ds_numel = parameter.numel()
    sizes = sum(parameter.numel() for parameter in made.parameters())
    different = set[tuple[str, ...]]()
    for most in {sizes // n for n in range(1, 200)}:
        engine = object.__new__(parameter_offload.DeepSpeedZeRoOffload)
        engine.min_granularity_value, engine.min_granularity_layer = sys.maxsize, None
        engine.granularity_info, engine.z3_leaf_layers = set(), []
        engine._set_z3_leaf_modules_by_threshold(made, most)
        leaves = {name or "root" for name, each in made.named_modules() if z3_leaf_module(each)}
        for each in made.modules():
            each._z3_leaf = False
        assert leaves == set(granular(case.model, most)), most
        different.add(tuple(sorted(leaves)))
    assert len(different) > 1


def scenario(**strategy: object) -> Scenario:
    return Scenario(
        model=measured.MODELS[0], batch={"micro_batch": 2},
        cluster={"preset": "cpu-gloo", "ranks": 2}, strategy={"name": "deepspeed2", **strategy},
    )


@pytest.mark.parametrize(
    ("installed", "told"),
    [(None, "found no DeepSpeed"), ("0.16.9", "found DeepSpeed 0.16.9"),
     ("0.19.7", "expected DeepSpeed 0.19.8 or later of 0.19")],
)
def test_a_missing_or_another_deepspeed_is_refused_with_the_line_that_installs_it(
    installed: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise deepspeed_engine.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(deepspeed_engine, "version", version)
    with pytest.raises(BackendUnavailableError) as error:
        deepspeed_engine.require(scenario())

    assert told in str(error.value)
    assert "pip install --no-build-isolation 'zsim[real,deepspeed]'" in str(error.value)


@needs_deepspeed
@pytest.mark.parametrize("key", sorted(REMOVED))
def test_keys_of_older_versions_are_refused_by_deepspeed_itself(key: str) -> None:
    """The engine refuses `legacy_stage1` where the config takes it."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    if key == "legacy_stage1":
        assert DeepSpeedZeroConfig(legacy_stage1=True)
        return
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        DeepSpeedZeroConfig(**{key: 1})


def test_kernels_of_gpus_are_refused_on_a_cpu() -> None:
    case = Scenario(
        model={"preset": "gpt-tiny"}, batch={"micro_batch": 2, "sequence_length": 8},
        cluster={"preset": "cpu-gloo", "ranks": 2},
        strategy={"name": "deepspeed3", "zero_quantized_weights": True},
    )
    with pytest.raises(BackendUnavailableError, match="expected a GPU"):
        deepspeed_engine.require_kernels(case, device_type="cpu")
    deepspeed_engine.require_kernels(case, device_type="cuda")


def test_a_trace_that_breaks_is_refused_in_real_runs_whose_blocks_keep_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deepspeed_engine, "version", lambda name: "0.19.8")
    case = Scenario(
        model=measured.MODELS[1], batch={"micro_batch": 2, "sequence_length": 4},
        cluster={"preset": "cpu-gloo", "ranks": 2},
        strategy={"name": "deepspeed3", "trace": "breaks"},
    )
    with pytest.raises(BackendUnavailableError, match="strategy.trace: expected blocks that"):
        deepspeed_engine.require(case)


def test_an_adam_that_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Scenario(**measured.adam_grid()[0])
    monkeypatch.setattr(deepspeed_engine, "which", {"g++": "/usr/bin/g++"}.get)
    with pytest.raises(BackendUnavailableError, match="found no ninja"):
        deepspeed_engine.require_kernels(case, device_type="cpu")


def test_offloaded_states_have_deepspeeds_words() -> None:
    case = Scenario(
        model=measured.MODELS[0], batch={"micro_batch": 2}, offload=measured.ALL_ON_HOST,
        cluster={"preset": "cpu-gloo", "ranks": 2}, strategy={"name": "deepspeed3"},
    )
    config = deepspeed_engine.config(case)

    moved = {"device": "cpu", "pin_memory": True}
    assert config["zero_optimization"]["offload_optimizer"] == moved
    assert config["zero_optimization"]["offload_param"] == moved


def test_the_engines_config_says_what_the_scenario_says() -> None:
    config = deepspeed_engine.config(scenario(reduce_bucket_size=77, overlap_comm=True))

    assert config["zero_optimization"] == {
        "stage": 2, "reduce_bucket_size": 77,
        "allgather_bucket_size": 500_000_000,
        "allgather_partitions": True, "overlap_comm": True, "contiguous_gradients": True,
        "round_robin_gradients": False, "reduce_scatter": True,
    }
    assert "offload_optimizer" not in config["zero_optimization"]
    assert (config["gradient_clipping"], config["communication_data_type"]) == (0.0, "fp32")
