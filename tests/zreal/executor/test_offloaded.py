"""zero1, zero2 and zero3 trained for real with states in host memory.

Order, bytes, and memory of device and host are as simulated; parameters are as one process trains
them.
"""

from __future__ import annotations

from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import zsim
from zreal.executor.drive_shards import DriveShards
from zreal.executor.rank_optimizer import RankOptimizer
from zsim.errors import BackendUnavailableError, ProgramError
from zsim.ir.buffers import buffer_of
from zsim.ir.ops import HostAlloc, Kernel, Op
from zsim.models.training_options import Offload, Optimizer
from zsim.runs.compare.agreement import Agreement
from zsim.strategies.flat_buffer.host_buffers import SWAP

CPU = {"optimizer": "cpu"}
BOTH = {"optimizer": "cpu", "parameters": "cpu"}
DRIVES = {"optimizer": "nvme"}
CHECKED = ("order", "bytes", "memory", "numerics")


def drive_shards(numel: int) -> DriveShards:
    """A rank's shards on drives, with one group of `numel` elements."""
    shards = DriveShards(
        Offload(optimizer="nvme"), "float32", RankOptimizer(Optimizer()), nullcontext
    )
    buffers = HostAlloc(buffer_of(SWAP, "buffers"), "temporaries", 16 * numel, pinned=True)
    shards.make_buffers(Op(0, "alloc", SWAP, "host", host=(buffers,)))
    shards.construct(
        Op(1, "copy", "unit", "compute"), torch.arange(float(numel)), torch.zeros(numel),
        trained=True,
    )
    return shards


def drive_op(operator: str, nbytes: int) -> Op:
    kernel = Kernel(operator, 0, nbytes, "float32", location="drive")
    return Op(0, "copy", "unit", "drive_read", kernels=(kernel,))


def test_a_read_of_other_bytes_than_the_programs_is_an_error() -> None:
    with pytest.raises(ProgramError, match=r"expected 40 B, found 64 B"):
        drive_shards(8).move(drive_op("read", 40))


def test_what_was_written_is_read_again_and_no_file_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shards = drive_shards(8)
    shards.take_gradient("unit", torch.full((8,), 3.0))
    shards.move(drive_op("write", 32))
    shards.take_gradient("unit", torch.zeros(8))  # another gradient in the next buffer
    shards.move(drive_op("read", 64))
    assert shards.gradient("unit").tolist() == [3.0] * 8
    assert shards.optimizer.stepped["unit"].tolist() == list(map(float, range(8)))
    assert list(tmp_path.iterdir()) == []


def test_files_that_have_no_room_are_refused_with_what_is_needed(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "zreal.processes.rank_folder.disk_usage", lambda folder: namedtuple("Usage", "free")(16)
    )
    with pytest.raises(BackendUnavailableError, match=r"expected 32 B more in .*, found 16 B free"):
        drive_shards(8)


def scenario(
    strategy: str, offload: dict[str, object], *, precision: str = "fp32", accumulation: int = 1,
    ranks: int = 2, optimizer: dict[str, object] | None = None, sync: str = "every",
    frozen: tuple[str, ...] = (), **options: int,
) -> zsim.Scenario:
    return zsim.Scenario(
        frozen=frozen,
        model={"preset": "gpt-tiny"},
        batch={"micro_batch": 1, "sequence_length": 16, "accumulation": accumulation},
        cluster={"preset": "cpu-gloo", "ranks": ranks},
        strategy={"name": strategy, "sync": sync, **options},
        precision={"parameters": precision, "reduce": "fp32"},
        optimizer=optimizer or {"implementation": "fused"}, offload=offload,
    )


def verdict(case: zsim.Scenario) -> Agreement:
    """The verdict of `zsim validate`; every check but that of time was made, and none failed."""
    comparison = zsim.validate(case, against="gloo")
    assert comparison.ok, str(comparison)
    kinds = next(check for check in comparison.checks if check.name == "memory by kind")
    assert "offloaded" in kinds.detail
    return comparison.agreement


@pytest.mark.parametrize("case", [
    scenario("zero1", CPU, optimizer={"implementation": "foreach"}),
    scenario("zero1", CPU, ranks=1),
    scenario("zero3", BOTH, precision="bf16", frozen=("blocks.0.*", "*.bias")),
    scenario("zero3", {**DRIVES, "parameters": "cpu", "pipeline_read": True, "buffer_count": 8}),
], ids=lambda case: f"{case.strategy}-{case.world_size}")
def test_offloaded_ranks_do_what_their_program_says_and_train_as_one_process(
    case: zsim.Scenario
) -> None:
    assert set(CHECKED) <= set(verdict(case).checked)
