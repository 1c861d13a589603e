"""The `checkpoint` table of a scenario, and the Checkpoint that it becomes."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from zsim.io.units import parse_period
from zsim.models.saving import Checkpoint, CheckpointFormat
from zsim.scenario.keys.table import Table
from zsim.strategies import STRATEGIES

MOST_STEPS = 10**9
BY_DEFAULT = Checkpoint()
MOST_DAYS = 3650
MOST_WORKERS = 256


def _period(value: str) -> str:
    if not 0 < parse_period(value) <= parse_period(f"{MOST_DAYS} d"):
        raise ValueError(f"expected more than 0 ns and at most {MOST_DAYS} d")
    return value


Period = Annotated[str, AfterValidator(_period)]
Workers = Annotated[int, Field(ge=1, le=MOST_WORKERS)]


class CheckpointTable(Table):
    """Checkpoints of the training, as `zsim checkpoint` tells them; no figure of a step depends on
    them."""

    format: CheckpointFormat | None = Field(
        default=None,
        description="torch DCP's, a file of each rank (sharded); whole tensors in rank 0's file "
                    "(consolidated); DeepSpeed's, or its universal one; without it, the "
                    "strategy's own.",
    )
    asynchronous: bool = Field(
        default=BY_DEFAULT.asynchronous,
        description="A sharded one is copied to host memory while training waits, and written "
                    "beside it.",
    )
    cpu_offload: bool = Field(
        default=BY_DEFAULT.cpu_offload,
        description="Whole tensors of a consolidated one go to rank 0's host memory; false: every "
                    "device keeps them until they are written.",
    )
    gather_16bit_weights: bool = Field(
        default=BY_DEFAULT.gather_16bit_weights,
        description="DeepSpeed's save_16bit_model writes whole weights too, which deepspeed3 "
                    "gathers into rank 0's host memory, to one file.",
    )
    extract_workers: Workers = Field(
        default=BY_DEFAULT.extract_workers,
        description="Processes of ds_to_universal that each hold the file of a rank.",
    )
    merge_workers: Workers = Field(
        default=BY_DEFAULT.merge_workers,
        description="Processes of ds_to_universal that then put a parameter together each.",
    )
    every: Annotated[int, Field(ge=1, le=MOST_STEPS)] | Period | None = Field(
        default=None, description='Steps, or time of training as "30 min", between two of them.'
    )
    mean_time_between_failures: Period | None = Field(
        default=None, description='Mean time between failures of the whole job, as "8 h".'
    )


def checkpoint_of(table: CheckpointTable, strategy: str) -> Checkpoint:
    """The Checkpoint of a table that is held to its schema, in the strategy's own format where it
    names none."""
    every, failures = table.every, table.mean_time_between_failures
    return Checkpoint(
        format=table.format or STRATEGIES[strategy].checkpoint_format,
        asynchronous=table.asynchronous, cpu_offload=table.cpu_offload,
        gather_16bit_weights=table.gather_16bit_weights,
        extract_workers=table.extract_workers, merge_workers=table.merge_workers,
        every_steps=every if isinstance(every, int) else None,
        every_ns=parse_period(every) if isinstance(every, str) else None,
        mean_time_between_failures_ns=None if failures is None else parse_period(failures),
    )
