"""`zsim checkpoint`: a table for people, a JSON object for programs, refusals with exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.folders import ROOT
from zsim.cli.main import main

SEVEN_B = str(ROOT / "scenarios/checkpoints/fsdp2-llama-2-7b-8.toml")
SMALL = """
model = { preset = "mlp-uneven" }
batch = { micro_batch = 2 }
cluster = { preset = "cpu-gloo", ranks = 3 }
strategy = { name = "fsdp2" }
"""


def test_a_7b_checkpoint_reads_as_its_page_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The page of checkpoints shows this very output."""
    assert main(["checkpoint", SEVEN_B]) == 0
    shown = capsys.readouterr().out
    page = (ROOT / "zsim/analysis/checkpoints/README.md").read_text()
    assert f"```text\n{shown}```" in page


def test_json_has_files_times_memory_and_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    assert main(["checkpoint", str(file), "--to-ranks", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["scenario"] == "small"
    assert told["format"] == "sharded"
    assert told["bytes"] == sum(each["bytes"] for each in told["files"]) == 12 * 23_604 + 4 * 18
    assert [each["name"] for each in told["files"]] == [
        "__0_0.distcp", "__1_0.distcp", "__2_0.distcp",
    ]
    assert {each["rank"] for each in told["reads"]} == {0, 1}
    assert sum(each["used_bytes"] for each in told["reads"]) == told["bytes"] + 4 * 18
    for phase in ("save", "load"):
        low, high = told[phase]["time_band_ns"]
        assert low < told[phase]["time_ns"] < high
        assert told[phase]["peak_device_bytes"] > 0
    assert told["every_ns"] is told["best_interval_ns"] is told["lost_share"] is None
    assert told["warnings"] == []


def test_a_job_that_fails_as_often_as_it_saves_makes_no_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small.toml"
    file.write_text(f'{SMALL}checkpoint = {{ mean_time_between_failures = "1 ms" }}\n')
    assert main(["checkpoint", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "the job makes no progress: saving and failures take 99." in shown
    assert "(Young)" not in shown
    assert "Young's formula holds for saves up to a hundredth of the time between" in shown


@pytest.mark.parametrize(("more", "arguments", "message"), [
    ('checkpoint = { every = "1 week" }', [], "checkpoint.every: expected a whole number, "),
    ('checkpoint = { format = "deepspeed" }', [], "checkpoint.format: expected "),
    ("", ["--to-ranks", "0"], "--to-ranks: expected 1 to 100,000 ranks, found '0'"),
])
def test_what_cannot_be_is_refused_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, arguments: list[str],
    message: str,
) -> None:
    file = tmp_path / "small.toml"
    file.write_text(f"{SMALL}{more}\n")
    assert main(["checkpoint", str(file), *arguments]) == 2
    assert message in capsys.readouterr().err


DEEPSPEED = """
model = { preset = "mlp-uneven" }
batch = { micro_batch = 2 }
cluster = { preset = "cpu-gloo", ranks = 2 }
strategy = { name = "deepspeed2" }
checkpoint = { format = "deepspeed" }
"""


def test_a_folder_of_deepspeed_has_each_ranks_file_of_the_right_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes as measured: 5 to 7 kB beside those of tensors. `latest` names the folder."""
    file, step = tmp_path / "mine.toml", tmp_path / "saved" / "global_step5"
    file.write_text(DEEPSPEED)
    step.mkdir(parents=True)
    (step.parent / "latest").write_text("global_step5")
    assert main(["checkpoint", str(file), "--json"]) == 0
    files = {each["name"]: each["bytes"] for each in json.loads(capsys.readouterr().out)["files"]}
    for name, nbytes in files.items():
        (step / name).write_bytes(bytes(nbytes + 7000))
    asked = ["checkpoint", str(file), "--folder", str(step.parent)]
    assert main(asked) == 0
    assert f"folder  {step} has all of it: 3 files" in capsys.readouterr().out
    last = step / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    for nbytes in (files[last.name] - 1, files[last.name] + 10**6):
        last.write_bytes(bytes(nbytes))
        assert main(asked) == 1
        assert f"{last}: expected {files[last.name]:,} B of tensors, and at " in (
            shown := capsys.readouterr().err
        )
        assert f"found {nbytes:,} B; a checkpoint is loaded by the model, ranks" in shown
    last.unlink()
    assert main(asked) == 1
    assert (
        "found no such file, but mp_rank_00_model_states.pt and "
        "zero_pp_rank_0_mp_rank_00_optim_states.pt; every rank's file is needed to load, by as "
        "many ranks as saved it" in capsys.readouterr().err
    )


def test_a_folder_of_files_that_no_library_names_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'{SMALL}checkpoint = {{ format = "consolidated" }}\n')
    assert main(["checkpoint", str(file), "--folder", str(tmp_path)]) == 2
    assert "--folder: expected a checkpoint of torch DCP or of DeepSpeed, found consolidated" in (
        capsys.readouterr().err
    )
