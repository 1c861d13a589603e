"""Whole state dicts on gloo ranks: all-gathers, in order, and memory of every rank are those of the
consolidated checkpoint's Program."""

from __future__ import annotations

import pytest

from tests.zreal.checkpoints.test_dcp import TABLES
from zreal.processes.launch import launch
from zsim.analysis.checkpoints.checkpoint import checkpoint
from zsim.ir.ledger_replay import replay
from zsim.scenario.scenario import Scenario

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize(("num_ranks", "cpu_offload"), [(2, False), (3, True), (4, True)])
def test_ranks_gather_what_the_program_says_and_keep_as_much(
    num_ranks: int, cpu_offload: bool
) -> None:
    """Rank 0 keeps what it gathers as it is, on a CPU. Ranks with fewer rows pad them first."""
    ranks = launch(
        "tests.zreal.checkpoints.ranks:consolidated",
        {"tables": TABLES["fsdp2"], "cpu_offload": cpu_offload}, world_size=num_ranks,
    )
    table = {"format": "consolidated", "cpu_offload": cpu_offload}
    cluster = {"preset": "cpu-gloo", "ranks": num_ranks}
    save = checkpoint(Scenario(**TABLES["fsdp2"], cluster=cluster, checkpoint=table)).save
    for index, rank in enumerate(ranks):
        program = save.program.of_rank(index)
        gathers = [op.nbytes for op in program.steady if op.kind == "all_gather"]
        memory = replay(program, timeline=False)["steady"]
        assert rank["gathers"] == gathers
        assert rank["peak"] == memory.peak_bytes - memory.start_bytes
        whole = not cpu_offload or index == 0
        assert rank["kept"] == sum(gathers) * whole
        assert rank["tensors"] == (4 * len(gathers) // 3 if whole else 0)
