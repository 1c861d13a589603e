"""`zsim checkpoint --folder` on checkpoints that torch DCP and DeepSpeed wrote on gloo ranks. Some
are whole, some lack a shard or a part of it, and some have other shapes."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.measured import deepspeed_universal as measured
from tests.zreal.checkpoints.test_dcp import TABLES
from tests.zreal.checkpoints.test_universal import needs_deepspeed
from zreal.processes.launch import launch
from zsim.cli.main import main
from zsim.scenario.scenario import Scenario

pytestmark = pytest.mark.gloo
OLD = 2
"""Ranks that save."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    arguments = {"tables": TABLES["fsdp2"], "folder": str(folder), "old": OLD}
    launch("tests.zreal.checkpoints.ranks:saved_and_loaded", arguments, world_size=OLD)
    return folder


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def file_of(tmp_path: Path, *, ranks: int = OLD, num_classes: int = 3) -> str:
    """The scenario's file, for so many ranks."""
    tables = TABLES["fsdp2"] | {"cluster": {"preset": "cpu-gloo", "ranks": ranks}}
    sizes = tables["model"]["sizes"] | {"num_classes": num_classes}
    made = Scenario(**tables | {"model": {"family": "mlp", "sizes": sizes}})
    file = tmp_path / "mine.toml"
    file.write_text(made.to_toml())
    return str(file)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_whole_checkpoint_is_one_of_a_scenario_of_any_ranks(
    checkpoint: Path, tmp_path: Path, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["checkpoint", file_of(tmp_path, ranks=ranks), "--folder", str(checkpoint)]
    assert main(asked) == 0
    nbytes = sum(file.stat().st_size for file in checkpoint.glob("*.distcp"))
    told = f"folder  {checkpoint} has all of it: 2 files, {nbytes:,} B"
    assert told in capsys.readouterr().out
    assert main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"] == {
        "path": str(checkpoint), "num_files": 2, "nbytes": nbytes,
    }


def test_a_shard_that_lacks_is_named_before_torch_names_it_in_a_traceback(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = copied / "__1_0.distcp"
    whole = lacking.read_bytes()
    lacking.unlink()
    assert main(["checkpoint", file_of(tmp_path), "--folder", str(copied)]) == 1
    assert capsys.readouterr().err == (
        f"zsim: {lacking}: expected the file with 30 shards, as of model.blocks.0.fc1.weight, "
        "found no such file; every rank's file is needed to load\n"
    )
    state = {"model": {"blocks.0.fc1.weight": torch.zeros(11, 5)}}
    with pytest.warns(UserWarning, match="single process"), pytest.raises(
        dcp.api.CheckpointException, match=f"No such file .*{lacking.name}"
    ):
        dcp.load(state, checkpoint_id=copied, no_dist=True)
    lacking.write_bytes(whole[:5000])
    assert main(["checkpoint", file_of(tmp_path), "--folder", str(copied)]) == 1
    assert f"of {len(whole):,} B, found 5,000 B; every" in capsys.readouterr().err


def test_other_shapes_are_named_on_both_sides(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = file_of(tmp_path, num_classes=4)
    assert main(["checkpoint", file, "--folder", str(copied)]) == 1
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == (
        f"zsim: {copied}: expected 3 tensors of 4 × 6, as parameters of head.weight, found 0, and "
        "model.head.weight of 3 × 6; a checkpoint is loaded by the model that saved it"
    )
    assert "as parameters of head.bias, found 0, and model.head.bias of 3;" in shown[1]


class Harmful:
    """An object whose pickle would write a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.file),)


def test_metadata_that_lack_or_are_another_file_are_refused_and_run_nothing(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made"
    for data in (b"", b"not a pickle", pickle.dumps(Harmful(made)), pickle.dumps({"a": 1})):
        (copied / ".metadata").write_bytes(data)
        assert main(["checkpoint", file_of(tmp_path), "--folder", str(copied)]) == 1
        assert "found another file; a save that did not end leaves none" in capsys.readouterr().err
    assert not made.exists()
    assert main(["checkpoint", file_of(tmp_path), "--folder", str(tmp_path / "none")]) == 1
    assert "/none/.metadata: expected the metadata that torch" in capsys.readouterr().err


@needs_deepspeed
@pytest.mark.parametrize("strategy", ["deepspeed2", "deepspeed3"])
def test_deepspeeds_own_folders_are_whole_before_and_after_the_conversion(
    tmp_path: Path, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = measured.scenario(measured.GPT, {"name": strategy}, OLD)
    body = f"{measured.RANKS}:saved_rank"
    launch(
        body, {"text": made.to_toml(), "folder": str(tmp_path)}, world_size=OLD, timeout_s=300
    )
    file = tmp_path / "mine.toml"
    own = made.with_(checkpoint=None).with_(checkpoint={"format": "deepspeed"})
    for form, folder in ((own, "saved"), (made, "universal")):
        file.write_text(form.to_toml())
        assert main(["checkpoint", str(file), "--folder", str(tmp_path / folder)]) == 0
        assert f"{tmp_path / folder} has all of it: " in capsys.readouterr().out
    file.write_text(own.with_(cluster={"ranks": OLD + 1}).to_toml())
    assert main(["checkpoint", str(file), "--folder", str(tmp_path / "saved")]) == 1
