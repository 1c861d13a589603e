"""torch's own FSDPMemTracker as a third oracle: its steady peak under fake tensors against the simulator's, to the byte.

It runs two iterations and its peak is cleared after the first, in which it also counts the whole parameters that DTensor makes to
propagate shapes. What it counts beyond the strategy is named by a rule below. The larger part is `-m slow`, with its result in
tests/measured/mem_tracker.json, which `ZSIM_UPDATE_MEASURED=1` writes anew.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.matrix import matrix
from zreal import modules, observer
from zreal.subjects import fsdp2
from zsim.run import RunOptions
from zsim.scenario import Scenario, parse
from zsim.simulator import SimBackend

RECORD = Path(__file__).parents[1] / "measured" / "mem_tracker.json"
TOKEN_NBYTES = 8


def cases() -> list[Scenario]:
    """Draws of the matrix of fully_shard with one micro-batch: the tracker knows one forward and backward per iteration."""
    texts = [text for text in matrix() if 'name = "fsdp2"' in text and "accumulation = 1" in text]
    return [parse(text.encode(), where="matrix.toml") for text in texts if "ranks = 1024" not in text]


@contextmanager
def fake_group(world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def tracked_peak(case: Scenario) -> int:
    """The tracker's steady peak of rank 0. The mesh is made outside: it cannot be under fake tensors."""
    with fake_group(case.world_size):
        mesh, _ = observer.device_mesh(case, device="cpu")
        with FakeTensorMode(allow_non_fake_inputs=True):
            subject = fsdp2.build(
                case, modules.build(case.model, seed=case.seed, checkpointing=case.checkpointing), mesh
            )
            [(x, targets)] = modules.micro_batches(case, rank=0, step=0, dtype=subject.dtype)
            tracker = FSDPMemTracker(subject.module, subject.optimizer)
            with tracker:
                for iteration in range(2):
                    subject.module(x, targets).backward()
                    subject.optimizer.step()
                    subject.optimizer.zero_grad(set_to_none=True)
                    if iteration == 0:
                        tracker.reset_mod_stats()
                        tracker._peak_mem.clear()
                        tracker._peak_mem_snap.clear()
        peak: int = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    return peak


def predicted_peak(case: Scenario) -> int:
    run = SimBackend("cpu").run(case, options=RunOptions(ranks=(0,)))
    return run.ranks[0].phases["steady"].memory.peak_bytes


def viewed_inputs(case: Scenario) -> int:
    """Bytes of the user's batch that the tracker counts and we do not: the targets, of which cross-entropy takes a view."""
    return case.batch.micro_batch * case.batch.sequence_length * TOKEN_NBYTES


def compared(case: Scenario) -> dict[str, Any]:
    """A row of the record."""
    began = time.perf_counter()
    tracked = tracked_peak(case)
    between = time.perf_counter()
    predicted = predicted_peak(case)
    ended = time.perf_counter()
    return {
        "text": case.text,
        "tracked": tracked,
        "predicted": predicted,
        "viewed_inputs": viewed_inputs(case),
        "unexplained": tracked - predicted - viewed_inputs(case),
        "tracker_ms": round((between - began) * 1e3),
        "simulator_ms": round((ended - between) * 1e3),
    }


def test_the_tracker_counts_what_is_predicted() -> None:
    assert compared(cases()[3])["unexplained"] == 0


@pytest.mark.slow
@pytest.mark.xfail(
    reason="open: 6 or 8 B where the peak is in the optimizer's step, and all of what checkpointing recomputes"
)
@pytest.mark.timeout(3600)
def test_the_tracker_counts_what_is_predicted_in_every_draw() -> None:
    rows = [compared(case) for case in cases()]
    if os.environ.get("ZSIM_UPDATE_MEASURED"):
        provenance = {
            "torch": version("torch"),
            "hypothesis": version("hypothesis"),
            "python": platform.python_version(),
        }
        lines = ",\n".join(map(json.dumps, rows))
        RECORD.write_text(f'{{"provenance": {json.dumps(provenance)},\n"rows": [\n{lines}\n]}}\n')
    assert [row["unexplained"] for row in rows] == [0] * len(rows)
