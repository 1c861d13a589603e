"""torch DCP on gloo ranks: what n ranks save, m ranks load to the bit. Files and peaks are as
predicted."""

from __future__ import annotations

import tempfile
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from zreal.processes.launch import launch
from zsim.analysis.checkpoints.files.dcp_plan import written
from zsim.analysis.checkpoints.files.file_reads import file_reads
from zsim.analysis.checkpoints.state import StateTensor, TrainingState, state_of
from zsim.scenario.scenario import Scenario

pytestmark = pytest.mark.gloo
RANKS = 4
TABLES: dict[str, dict[str, Any]] = {
    strategy: {
        "model": {
            "family": "mlp", "sizes": {"dims": [5, 13, 6], "hidden": 11, "num_classes": 3}
        },
        "batch": {"micro_batch": 1}, "strategy": {"name": strategy},
    }
    for strategy in ("fsdp2", "ddp")
}
"""A model of few rows, mostly a prime number of them, and fewer than ranks in its head."""
SAVED = [("ddp", 3), *(("fsdp2", old) for old in range(1, RANKS + 1))]
PAIRS = [(*saved, new) for saved in SAVED for new in range(1, RANKS + 1)]


@cache
def measured(strategy: str, old: int) -> list[dict[str, Any]]:
    """The checkpoint that `old` ranks save, with its loads by 1 to 4 ranks, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"tables": TABLES[strategy], "folder": f"{folder}/saved", "old": old}
        body = "tests.zreal.checkpoints.ranks:saved_and_loaded"
        return launch(body, arguments, world_size=RANKS)


def state(strategy: str, num_ranks: int) -> TrainingState:
    cluster = {"preset": "cpu-gloo", "ranks": num_ranks}
    return state_of(Scenario(**TABLES[strategy], cluster=cluster))


@pytest.mark.parametrize(("strategy", "old", "new"), PAIRS)
def test_m_ranks_load_what_n_ranks_saved_to_the_bit(strategy: str, old: int, new: int) -> None:
    """While they load they have one stored tensor in memory, and the one before it."""
    ranks = measured(strategy, old)
    saved, loads = ranks[0]["saved"], [rank["loads"][str(new)] for rank in ranks[:new]]
    counters = [digest for name, digest in saved.items() if name.endswith(".step")]
    assert len({*saved.values()}) == len(saved) - len(counters) + 1 > 30
    assert [load["loaded"] for load in loads] == [saved] * new
    before, after = state(strategy, old), state(strategy, new)
    files = written([before.tensors(rank) for rank in range(old)])
    peaks = [
        max(map(sum, pairwise([0, *(read.nbytes for read in made)])), default=0)
        for made in file_reads(before, files, after)
    ]
    assert [load["load_peak"] for load in loads] == peaks


@pytest.mark.parametrize(("strategy", "old"), SAVED)
def test_files_have_the_predicted_tensors_and_bytes(strategy: str, old: int) -> None:
    """Shards that are padded in memory are copied, without the padding, and torch keeps the copies.
    """
    own, ranks = state(strategy, old), measured(strategy, old)
    plan = written([own.tensors(rank) for rank in range(old)])
    assert [(len(file), sum(tensor.nbytes for tensor in file)) for file in plan] == [
        (file["tensors"], file["nbytes"]) for file in ranks[0]["files"]
    ]
    copied = [
        sum(tensor.nbytes for tensor in file if is_padded(tensor, own)) for file in plan
    ]
    assert [rank["save_peak"] for rank in ranks[:old]] == copied


def is_padded(tensor: StateTensor, own: TrainingState) -> bool:
    """True for a parameter's shard that has fewer elements than its storage."""
    part, index, _ = tensor.key
    return part == "parameters" and tensor.nbytes < 4 * own.entries[index].shard_numel(
        own.num_shards
    )
