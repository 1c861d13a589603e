"""The checkpoints of a training: their format, how often they are written, how often jobs fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CheckpointFormat = Literal["sharded", "consolidated", "deepspeed", "universal"]
OF_DEEPSPEED: tuple[CheckpointFormat, ...] = ("deepspeed", "universal")
"""Formats that DeepSpeed's engine writes, or that are made of its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The `checkpoint` table of a scenario; times in ns.

    It is written `every_steps`, or after `every_ns` of training; without either nobody says when.
    """

    format: CheckpointFormat = "sharded"
    """torch DCP's, a file of each rank; or whole tensors in one file of rank 0; or DeepSpeed's.
    The universal one is made of those by ds_to_universal."""
    asynchronous: bool = False
    """A sharded one is copied to host memory first, and written beside training."""
    cpu_offload: bool = True
    """Whole tensors of a consolidated one go to rank 0's host memory; else all devices keep them.
    """
    gather_16bit_weights: bool = False
    """DeepSpeed's save_16bit_model writes whole weights first, which stage 3 gathers to rank 0."""
    extract_workers: int = 4
    """Processes of ds_to_universal that cut ranks' files into parameters, as it has by default."""
    merge_workers: int = 2
    """Processes of it that put parameters together."""
    every_steps: int | None = None
    every_ns: int | None = None
    mean_time_between_failures_ns: int | None = None
    """Mean time from one failure of the job, on any of its ranks, to the next."""
