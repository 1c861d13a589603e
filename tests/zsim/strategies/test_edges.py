"""Waits of each op of a step, under options beyond the defaults, as text: one line per op that
waits.

To write the golden file anew: ZSIM_UPDATE_GOLDEN=1 pytest tests/zsim/strategies/test_edges.py
"""

from __future__ import annotations

import os

import pytest

from tests.support.folders import GOLDEN
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse

EDGES = GOLDEN / "edges"
CLIP = 'optimizer = { name = "adamw", clip_norm = 1.0 }'
TWICE = 'batch = { micro_batch = 2, accumulation = 2, forwards = 2 }'
TWO_RUNS = (
    'model = { preset = "mlp-tiny", num_layers = 2, uses = 2 }\nbatch = { micro_batch = 2, '
    'accumulation = 2 }'
)
"""The first run of a group in the last backward reduces what earlier micro-batches have left. Its
second run reduces what this micro-batch has made."""
CASES = {
    "ddp-clip": ('name = "ddp"', CLIP),
    "ddp-unused": (
        'name = "ddp", find_unused_parameters = true',
        'model = { preset = "mlp-tiny", num_layers = 2, unused = ["blocks.0"] }',
    ),
    "ddp-accumulate": ('name = "ddp", sync = "last", bucket_cap_mb = 0.01', TWICE),
    "zero1-clip": ('name = "zero1"', CLIP), "zero2-clip": ('name = "zero2"', CLIP),
    "zero2-accumulate": ('name = "zero2", sync = "every"', TWICE),
    "zero3-clip": ('name = "zero3"', CLIP),
    "zero3-accumulate": ('name = "zero3", sync = "last"', TWICE),
    "fsdp2-clip": ('name = "fsdp2"', CLIP),
    "fsdp2-accumulate": ('name = "fsdp2", sync = "every"', TWICE),
    "fsdp2-reduced-twice": ('name = "fsdp2", sync = "last"', TWO_RUNS),
    "fsdp2-reshard-to-2": ('name = "fsdp2", reshard_after_forward = 2', ""),
    "fsdp2-offload": ('name = "fsdp2", offload = true', ""),
    "fsdp2-prefetch": ('name = "fsdp2", forward_prefetch = 2, backward_prefetch = 2', ""),
    "fsdp2-checkpointing": ('name = "fsdp2"', 'activation_checkpointing = { mode = "full" }'),
    "fsdp2-nested": ('name = "fsdp2"', 'wrapping = { every = 1, nested = ["fc2"] }'),
    "hsdp-all-reduce-last": (
        'name = "hsdp", dp_replicate = 2, dp_shard = 2, all_reduce = "last"', TWICE
    ),
    "hsdp-reduced-twice": ('name = "hsdp", dp_replicate = 2, dp_shard = 2, sync = "last"', TWICE),
    "fsdp1-post": (
        'name = "fsdp1", dp_replicate = 1, backward_prefetch = "post", forward_prefetch = true', ""
    ),
    "fsdp1-hybrid": ('name = "fsdp1", dp_replicate = 2, dp_shard = 2', CLIP),
    "zero_redundancy-clip": ('name = "zero_redundancy"', CLIP),
}
DEFAULTS = ('model = { preset = "mlp-tiny", num_layers = 2 }', "batch = { micro_batch = 2 }")


def scenario(strategy: str, more: str) -> Scenario:
    """Four ranks; `more` is in place of the defaults of its tables."""
    keys = {line.split(" ")[0] for line in more.splitlines()}
    tables = [table for table in DEFAULTS if table.split(" ")[0] not in keys]
    text = "\n".join([
        *tables, more, 'cluster = { preset = "dgx-h100", ranks = 4 }',
        f"strategy = {{ {strategy} }}",
    ])
    return parse(text.encode(), where="edges.toml")


@pytest.mark.parametrize("name", CASES)
def test_ops_wait_for_what_they_need(name: str) -> None:
    ops = plan(scenario(*CASES[name]), device="cuda").ranks[0].steady
    label = {op.index: f"{op.kind} {op.unit} ({op.index})" for op in ops}
    lines = [f"{label[op.index]} on {op.stream} waits for "
             f"{', '.join(label[wait] for wait in op.waits)}\n" for op in ops if op.waits]
    file = EDGES / f"{name}.txt"
    if os.environ.get("ZSIM_UPDATE_GOLDEN"):
        file.write_text("".join(lines))

    assert "".join(lines) == file.read_text()
