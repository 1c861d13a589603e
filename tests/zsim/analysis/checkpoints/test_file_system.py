"""The table file_system of a cluster's file: it decides times, narrows bands, and is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.folders import ROOT
from zsim.analysis.checkpoints.checkpoint import checkpoint
from zsim.errors import ScenarioError
from zsim.scenario.scenario import Scenario

PRESET = (ROOT / "zsim/presets/clusters/dgx-h100.toml").read_text()
ASSUMED = 'rank_bandwidth = { value = "2 GB/s", provenance = "assumed"'


def scenario(folder: Path, text: str) -> Scenario:
    (folder / "mine.toml").write_text(text)
    return Scenario(
        model={"preset": "llama-2-7b", "num_layers": 2},
        batch={"micro_batch": 1, "sequence_length": 128}, cluster={"file": "mine.toml"},
        strategy={"name": "fsdp2"}, precision={"parameters": "bf16"}, folder=folder,
    )


def test_a_files_own_bandwidth_decides_the_time_and_measured_it_narrows_the_band(
    tmp_path: Path
) -> None:
    measured = 'rank_bandwidth = { value = "1 GB/s", provenance = "measured"'
    rest = 'bandwidth = { value = "40 GB/s", provenance = "assumed"'
    text = PRESET.replace(ASSUMED, measured).replace(rest, rest.replace("assumed", "measured"))
    preset, own = (
        checkpoint(scenario(tmp_path, each)).save.time for each in (PRESET, text)
    )
    assert own.ns == pytest.approx(2 * preset.ns, rel=0.02)
    assert [end / preset.ns for end in preset.band_ns] == pytest.approx([0.5, 2.0], rel=0.02)
    assert [end / own.ns for end in own.band_ns] == pytest.approx([0.8, 1.25], rel=0.02)


@pytest.mark.parametrize(("value", "told"), [
    ("fast", 'file_system.rank_bandwidth.value: expected a number with its unit, found "fast"'),
    ("0 GB/s", 'file_system.rank_bandwidth.value: expected 1e-09 to 1e+18, found "0 GB/s"'),
])
def test_a_bandwidth_that_is_none_is_refused_by_its_key(
    tmp_path: Path, value: str, told: str
) -> None:
    with pytest.raises(ScenarioError) as caught:
        scenario(tmp_path, PRESET.replace(ASSUMED, ASSUMED.replace("2 GB/s", value)))
    assert told in str(caught.value)


def test_a_file_system_needs_both_bandwidths(tmp_path: Path) -> None:
    lines = [line for line in PRESET.splitlines() if not line.startswith("rank_bandwidth")]
    with pytest.raises(ScenarioError, match=r"rank_bandwidth: expected a value, found nothing"):
        scenario(tmp_path, "\n".join(lines))
