"""Universal checkpoints against DeepSpeed itself: as tests/measured/deepspeed_universal.json has
recorded it, and for real where the extra `deepspeed` is installed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.measured import deepspeed_universal as measured
from zreal.processes import launch
from zsim.analysis.checkpoints.checkpoint import checkpoint
from zsim.analysis.checkpoints.files.formats import saved_state
from zsim.analysis.checkpoints.files.universal import shards_parameters
from zsim.ir.host_ledger import replay_host
from zsim.scenario.scenario import Scenario

RECORD = json.loads(measured.FILE.read_text())
ROWS = RECORD["rows"]
NAMES = [
    f"{measured.scenario_of(row).strategy}-{measured.scenario_of(row).world_size}-{number}"
    for number, row in enumerate(ROWS)
]
LOADS = [
    pytest.param(row, int(number), id=f"{name}-{number}")
    for name, row in zip(NAMES, ROWS, strict=True) for number in row["loads"]
]
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed: zsim[real,deepspeed]"
)


def files_under(row: dict[str, Any], folder: str) -> dict[str, list[int]]:
    """The tensors of files in a folder of the record; of files without any none."""
    return {
        name.removeprefix(f"{folder}/"): sizes
        for name, sizes in row["saved"]["files"].items()
        if name.startswith(f"{folder}/") and sizes
    }


def test_the_record_is_of_the_version_that_is_modelled() -> None:
    assert RECORD["deepspeed"].startswith("0.19.")
    assert len(ROWS) == len(measured.CASES)


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_files_have_the_predicted_tensors(row: dict[str, Any]) -> None:
    told = checkpoint(measured.scenario_of(row)).files
    assert {file.name: sorted(file.tensors) for file in told} == {
        name: sizes for name, sizes in files_under(row, "universal").items()
        if not name.startswith("tmp/")
    }


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_a_conversion_moves_and_holds_the_predicted_bytes(row: dict[str, Any]) -> None:
    """DeepSpeed copies the files of models as they are, which torch.load does not see."""
    files, told = row["saved"]["files"], checkpoint(measured.scenario_of(row)).conversion
    assert told is not None
    nbytes = {name: sum(sizes) for name, sizes in files.items()}
    copied = sum(
        nbytes[name] for name in nbytes if name.startswith("saved/") and "model_states" in name
    )
    assert told.moved_bytes("read") == copied + sum(nbytes[name] for name in row["saved"]["reads"])
    assert told.moved_bytes("write") == sum(
        nbytes[name] for name in nbytes if name.startswith("universal/")
    )
    assert told.files_bytes == sum(nbytes.values())
    assert [phase.memory.host_bytes for phase in told.phases] == row["saved"]["peaks"]


@pytest.mark.parametrize(("row", "number"), LOADS)
def test_ranks_read_and_hold_what_is_predicted(row: dict[str, Any], number: int) -> None:
    """A rank of stages 1 and 2 reads a parameter's files as its folder lists them. The order that
    is predicted may hold one more piece of the parameter."""
    saving = measured.scenario_of(row)
    told = checkpoint(saving, to_ranks=number)
    sizes = {file.name: file.nbytes for file in told.files}
    is_last_stage = shards_parameters(saved_state(saving))
    for rank, load in enumerate(row["loads"][str(number)]):
        reads = [told.files[read.file].name for read in told.reads[rank]]
        seen = [name for name in load["reads"] if name in sizes]
        assert reads == seen if is_last_stage else sorted(reads) == sorted(seen)
        ops = told.load.program.of_rank(rank)
        pieces = [read.used for read in told.reads[rank] if read.nbytes]
        spare = 0 if is_last_stage else max(pieces)
        assert 0 <= replay_host(ops)["steady"].peak_bytes - load["peak"] <= spare
        if not is_last_stage:
            gathered = [op.nbytes for op in ops.steady if op.kind == "all_gather"]
            assert gathered == load["gathered"]


@needs_deepspeed
@pytest.mark.gloo
@pytest.mark.parametrize("case", [measured.CASES[2], measured.CASES[4]], ids=["stage 2", "stage 3"])
def test_the_record_is_what_deepspeed_does_here(case: Any) -> None:
    made = measured.measured(measured.scenario(*case[:3]), case[3][:1])
    row = next(row for row in ROWS if row["text"] == made["text"])
    number = str(case[3][0])
    assert made["saved"]["files"] == row["saved"]["files"]
    assert made["saved"]["peaks"] == row["saved"]["peaks"]
    for load, recorded in zip(made["loads"][number], row["loads"][number], strict=True):
        assert sorted(load["reads"]) == sorted(recorded["reads"])


@needs_deepspeed
@pytest.mark.gloo
def test_parameters_dealt_out_in_turn_are_not_those_that_were_saved(tmp_path: Path) -> None:
    """Reason for the refusal: 2 ranks save what 3 load into other parameters."""
    strategy = {"name": "deepspeed2", "round_robin_gradients": True}
    saving = measured.scenario(measured.MLP | measured.BF16, strategy, 2, form="deepspeed")
    weights = [
        launch.launch(
            f"{measured.RANKS}:{function}",
            {"text": saving.with_(cluster={"ranks": number}).to_toml(), "folder": str(tmp_path)},
            world_size=number, timeout_s=300,
        )[0]["weights"]
        for function, number in (("saved_rank", 2), ("loaded_rank", 3))
    ]
    assert weights[0].keys() == weights[1].keys()
    assert sum(weights[0][name] == weights[1][name] for name in weights[0]) == 1


@needs_deepspeed
@pytest.mark.gloo
@pytest.mark.parametrize(("model", "strategy", "ranks"), [
    ("gpt-tiny", {}, 2), ("llama-tiny", {"stage3_param_persistence_threshold": 64}, 2),
    ("mlp-uneven", {"stage3_param_persistence_threshold": 0}, 3),
])
def test_save_16bit_model_gathers_and_writes_what_is_predicted(
    model: str, strategy: dict[str, int], ranks: int, tmp_path: Path
) -> None:
    """gpt-tiny's head is tied: both of its modules gather the weight, and the file has it once."""
    case = Scenario(
        model={"preset": model},
        batch={"micro_batch": 1, "sequence_length": 1 if model.startswith("mlp") else 16},
        cluster={"preset": "cpu-gloo", "ranks": ranks},
        strategy={"name": "deepspeed3", **strategy},
        precision={"parameters": "bf16", "reduce": "bf16"},
        checkpoint={"format": "deepspeed", "gather_16bit_weights": True},
    )
    seen = launch.launch(
        f"{measured.RANKS}:weights_rank", {"text": case.to_toml(), "folder": str(tmp_path)},
        world_size=ranks, timeout_s=300,
    )
    told = checkpoint(case)
    for rank, each in enumerate(seen):
        assert each["is_saved"]
        assert [tuple(moved) for moved in each["moved"]] == [
            (op.kind, op.nbytes) for op in told.save.program.of_rank(rank).steady
            if op.unit == "weights" and op.kind in ("all_gather", "broadcast")
        ]
    sizes, names = seen[0]["sizes"], {p.fqn for p in case.model.named_parameters}
    assert told.files[-1].name == "pytorch_model.bin"
    assert told.files[-1].nbytes == sum(sizes[name] for name in names)
    assert sizes.keys() - names == ({"lm_head.weight"} if model == "gpt-tiny" else set())
