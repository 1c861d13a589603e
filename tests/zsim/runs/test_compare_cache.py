"""CUDA's caching allocator in a comparison: bytes asked for are exact, reserved ones have a band.

A Run without them says so. The measured Runs are made by hand.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zsim
from tests.support.folders import PARITY
from zsim.analysis.simulated_step import add_caches
from zsim.cli.main import main
from zsim.ir.run import RunRecord
from zsim.runs import saved
from zsim.runs.compare.agreement import Agreement
from zsim.runs.compare.check import Check
from zsim.runs.compare.compare import compare
from zsim.runs.compare.memory.cache import ALLOCATED, RESERVED

NO_STATISTICS = "unsupported: the measured Run has no statistics of CUDA's allocator"


@pytest.fixture(scope="module")
def scenario() -> zsim.Scenario:
    return zsim.load(PARITY / "zero3-mlp-4.toml").with_(
        cluster={"preset": "dgx-h100", "nodes": 1, "ranks": 4}
    )


@pytest.fixture(scope="module")
def predicted(scenario: zsim.Scenario) -> RunRecord:
    record = zsim.simulate(scenario, all_ranks=True).record
    return add_caches(scenario, record, scenario.cluster)


def measured(predicted: RunRecord, *, cache: bool = True, **changes: int) -> RunRecord:
    """The Run that GPUs would give which do what was predicted, but for `changes` in bytes."""
    ranks = []
    for rank in predicted.ranks:
        assert rank.cache is not None
        own = replace(rank.cache, **{
            name: getattr(rank.cache, name) + by for name, by in changes.items()
        })
        ranks.append(replace(rank, cache=own if cache else None))
    return replace(
        predicted, backend="nccl", interpreter="executor", ranks=tuple(ranks),
        provenance={"device": "NVIDIA H100", "fingerprint": predicted.provenance["fingerprint"]},
    )


def checks(predicted: RunRecord, run: RunRecord) -> dict[str, Check]:
    return {check.name: check for check in compare(predicted, run)}


def test_a_prediction_has_the_allocator_of_its_gpus(
    scenario: zsim.Scenario, predicted: RunRecord
) -> None:
    for rank in predicted.ranks:
        cache, steady = rank.cache, rank.phases["steady"].memory
        assert cache is not None
        assert cache.peak_bytes - cache.start_bytes == steady.peak_bytes - steady.start_bytes
        assert steady.peak_bytes <= cache.peak_bytes <= cache.active_bytes <= cache.reserved_bytes
    gloo = zsim.load(PARITY / "zero3-mlp-4.toml")
    on_cpu = zsim.simulate(gloo).record
    assert add_caches(gloo, on_cpu, gloo.cluster) is on_cpu


def test_equal_bytes_agree_and_inputs_of_the_user_cancel(predicted: RunRecord) -> None:
    """Whatever lives at the start of a step, as a larger batch, is in its peak as well."""
    more = dict.fromkeys(("start_bytes", "peak_bytes", "allocated_bytes", "active_bytes"), 4096)
    told = checks(predicted, measured(predicted, **more))
    assert (told[ALLOCATED].status, told[RESERVED].status) == ("ok", "ok")
    assert told[ALLOCATED].detail.startswith("exact    a step takes")
    assert "on all 4 ranks" in told[ALLOCATED].detail


@pytest.mark.parametrize("by", [512, -512])
def test_a_single_block_more_or_less_fails(predicted: RunRecord, by: int) -> None:
    told = checks(predicted, measured(predicted, peak_bytes=by))
    assert (told[ALLOCATED].status, told[RESERVED].status) == ("failed", "ok")
    assert f"{-by:+,} B;" in told[ALLOCATED].detail
    assert not Agreement(tuple(told.values())).ok


@pytest.mark.parametrize(("allocated", "status"), [(0, "ok"), (16_384, "failed")])
def test_blocks_that_other_streams_still_use_are_told_by_what_is_allocated(
    predicted: RunRecord, allocated: int, status: str
) -> None:
    """Freed blocks count as asked for and as active until their event has passed."""
    late = {"peak_bytes": 65_536, "active_bytes": 65_536, "reserved_bytes": 65_536}
    told = checks(predicted, measured(predicted, allocated_bytes=allocated, **late))
    assert told[ALLOCATED].status == status
    assert "65,536 B" in told[ALLOCATED].detail


def test_a_run_whose_freed_blocks_were_still_in_use_is_saved(
    predicted: RunRecord, tmp_path: Path
) -> None:
    """Bytes asked for are then more than those allocated."""
    cache = predicted.ranks[0].cache
    assert cache is not None
    run = measured(predicted, peak_bytes=cache.active_bytes - cache.peak_bytes, allocated_bytes=-8)
    saved.save(run, tmp_path / "run.json")
    assert saved.load(tmp_path / "run.json") == run


@pytest.mark.parametrize(("share", "status"), [(0.02, "ok"), (0.04, "failed"), (-1.0, "failed")])
def test_reserved_bytes_have_the_band_of_the_prediction(
    predicted: RunRecord, share: float, status: str
) -> None:
    """The band reaches from live blocks alone to three percent above the replay."""
    cache = predicted.ranks[0].cache
    assert cache is not None
    told = checks(predicted, measured(predicted, reserved_bytes=int(share * cache.reserved_bytes)))
    assert told[RESERVED].status == status
    assert f"{cache.active_bytes:,} B of them active" in told[RESERVED].detail


def test_a_run_of_gpus_without_statistics_says_that_neither_check_was_made(
    predicted: RunRecord,
) -> None:
    told = checks(predicted, measured(predicted, cache=False))
    for name in (ALLOCATED, RESERVED):
        assert (told[name].status, told[name].detail) == ("unsupported", NO_STATISTICS)
    gloo = replace(measured(predicted, cache=False), backend="gloo", provenance={"device": "cpu"})
    assert not {ALLOCATED, RESERVED} & set(checks(predicted, gloo))


def test_a_prediction_without_reserved_bytes_leaves_the_exact_check(predicted: RunRecord) -> None:
    bare = replace(predicted, ranks=tuple(replace(rank, cache=None) for rank in predicted.ranks))
    told = checks(bare, measured(predicted))
    assert (told[ALLOCATED].status, told[RESERVED].status) == ("ok", "unsupported")
    assert "zsim run --save" in told[RESERVED].detail


def test_saved_runs_keep_the_record_and_those_of_cpus_do_not_mention_it(
    predicted: RunRecord, tmp_path: Path
) -> None:
    for run in (predicted, measured(predicted), measured(predicted, cache=False)):
        saved.save(run, tmp_path / "run.json")
        assert saved.load(tmp_path / "run.json") == run
    assert '"cache"' not in (tmp_path / "run.json").read_text()


@pytest.mark.parametrize(("change", "message"), [
    ({"segments": "two"}, "segments"), ({"pool": 1}, "pool"),
])
def test_a_damaged_record_is_refused(
    predicted: RunRecord, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    table = json.loads(saved.dump(predicted))
    table["run"]["ranks"][0]["cache"] |= change
    (tmp_path / "run.json").write_text(json.dumps(table))
    with pytest.raises(saved.SavedRunError, match=message):
        saved.load(tmp_path / "run.json")


def test_the_command_line_compares_a_saved_prediction_with_a_run_of_gpus(
    scenario: zsim.Scenario, predicted: RunRecord, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, sides = tmp_path / "gpus.toml", [str(tmp_path / f"{side}.json") for side in "ab"]
    file.write_text(scenario.with_(expect=None).to_toml())
    assert main(["run", str(file), "--all-ranks", "--save", sides[0]]) == 0
    loaded = saved.load(Path(sides[0]))
    assert [rank.cache for rank in loaded.ranks] == [rank.cache for rank in predicted.ranks]
    for by, code in ((0, 0), (1, 1)):
        saved.save(measured(loaded, peak_bytes=by), Path(sides[1]))
        assert main(["compare", *sides]) == code
        assert "allocated memory, CUDA" in capsys.readouterr().out


def test_what_earlier_runs_left_in_the_process_may_be_reserved_besides(
    predicted: RunRecord,
) -> None:
    left = 64 * 2**20
    names = ("start_bytes", "peak_bytes", "allocated_bytes", "active_bytes", "reserved_bytes")
    check = checks(predicted, measured(predicted, **dict.fromkeys(names, left)))[RESERVED]
    assert check.status == "ok"
    assert f"{left:,} B of earlier runs in the process" in check.detail
    alone = checks(predicted, measured(predicted, reserved_bytes=left))[RESERVED]
    assert (alone.status, "earlier runs" in alone.detail) == ("failed", False)
