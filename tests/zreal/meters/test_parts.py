"""Forward, backward, optimizer and zero_grad of real steps: the observer's and the executor's
against the ledger's, to the byte."""

from __future__ import annotations

import pytest

from tests.support.installed_torch import TORCH
from zreal.meters.measured_step import lower_peak
from zsim.ir.run import MemoryRecord, PartRecord, PhaseRecord
from zsim.runs.backend import RunOptions
from zsim.runs.compare.compare import compare
from zsim.runs.compare.memory.by_part import NAME
from zsim.runs.registry import find
from zsim.runs.simulator import SimBackend
from zsim.scenario.scenario import Scenario, parse

STRATEGIES = {
    "ddp": 'name = "ddp"', "views": 'name = "ddp", gradient_as_bucket_view = true, sync = "last"',
    "zero_redundancy": 'name = "zero_redundancy"', "zero1": 'name = "zero1", form = "all_reduce"',
    "zero2": 'name = "zero2", sync = "last"', "zero3": 'name = "zero3", lookahead = 2',
    "fsdp2": 'name = "fsdp2", forward_prefetch = 1, backward_prefetch = 2',
    "hsdp": 'name = "hsdp", dp_replicate = 2, dp_shard = 2, all_reduce = "last"',
}


def scenario(strategy: str) -> Scenario:
    text = f"""
model = {{ preset = "gpt-tiny", num_layers = 2 }}
batch = {{ micro_batch = 2, sequence_length = 8, accumulation = 2 }}
cluster = {{ preset = "cpu-gloo", ranks = 4 }}
strategy = {{ {STRATEGIES[strategy]} }}
precision = {{ parameters = "bf16", reduce = "fp32" }}
optimizer = {{ name = "adamw", clip_norm = 1.0 }}
"""
    return parse(text.encode(), where="parts.toml")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_part_of_real_steps_starts_and_peaks_as_predicted(strategy: str) -> None:
    case = scenario(strategy)
    measured = find("fake").run(case, options=RunOptions(ranks=(3,)))
    predicted = SimBackend("cpu", torch=TORCH).run(case, options=RunOptions(ranks=(3,)))
    check = next(check for check in compare(predicted, measured) if check.name == NAME)
    assert check.detail == (
        "exact    24 of 24 starts and peaks of forward, backward, optimizer and zero_grad"
    )


def phase(peak: int, *parts: PartRecord) -> PhaseRecord:
    return PhaseRecord(
        collectives=(),
        memory=MemoryRecord(start_bytes=0, peak_bytes=peak, end_bytes=0, parts=parts),
    )


def test_of_several_steps_each_part_is_the_lowest() -> None:
    first = phase(9, PartRecord("forward", 0, 1, 9), PartRecord("backward", 0, 5, 7))
    second = phase(8, PartRecord("forward", 0, 2, 6), PartRecord("backward", 0, 3, 8))
    assert lower_peak(first, second) == phase(
        8, PartRecord("forward", 0, 1, 6), PartRecord("backward", 0, 3, 7)
    )
    assert lower_peak(None, first) is first
