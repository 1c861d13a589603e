"""Real ranks of gloo, which torch's flight recorder records too: one never comes."""

from __future__ import annotations

import functools
import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from zreal.processes.launch import launch
from zreal.processes.rendezvous import rendezvous
from zsim.analysis.flight_recorder.dump_file import read
from zsim.analysis.flight_recorder.explain import explain


def rank_that_dumps(arguments, *, rank, world_size, port, progress, keep):
    """Three collectives, of which the last rank leaves out the last, and a dump without a wait."""
    store = rendezvous(rank=rank, world_size=world_size, port=port)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    tensor = torch.ones(8)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    dump = functools.partial(
        _distributed_c10d._dump_fr_trace_json, includeCollectives=True, onlyActive=False
    )
    while not all(entry["retired"] for entry in json.loads(dump())["entries"]):
        pass  # torch retires a work after it has woken the caller
    if rank != world_size - 1:
        dist.all_reduce(tensor, async_op=True)
    Path(arguments["folder"], f"rank_{rank}.json").write_bytes(dump())


@pytest.mark.gloo
def test_a_rank_that_never_came_is_named_from_real_dumps(tmp_path):
    launch(
        "tests.zreal.test_real_dumps:rank_that_dumps", {"folder": str(tmp_path)},
        world_size=3, timeout_s=60,
    )
    dumps = [read(path) for path in sorted(tmp_path.glob("*.json"))]
    (finding,) = explain(dumps).findings
    assert (finding.kind, finding.seq, finding.ranks) == ("missing", 3, (2,))
    assert "rank 2 never entered all_reduce, in which ranks 0, 1 wait" in finding.text
