"""Tables of measurements that tests write: a step of MPT-1B on 8 A100, and an all-gather."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

STEP = {
    "model.family": "gpt", "model.sizes.num_layers": "24", "model.sizes.hidden_size": "2048",
    "model.sizes.num_heads": "16", "model.sizes.vocabulary": "50368", "model.sizes.tied": "true",
    "model.sizes.attention": "sdpa", "batch.micro_batch": "8", "batch.sequence_length": "2048",
    "batch.accumulation": "8", "cluster.preset": "a100-40-roce", "cluster.nodes": "1",
    "strategy.name": "fsdp1", "strategy.dp_shard": "8", "strategy.sharding": "full",
    "precision.parameters": "bf16", "precision.reduce": "bf16", "optimizer.name": "adamw",
    "optimizer.clip_norm": "1.0", "execution.attention_kernels": "triton",
    "execution.step_overhead": "18 ms", "execution.micro_batch_overhead": "6 ms",
    "measured.step_time": "6.801 s",
}
GATHER = {
    "collective": "all_gather", "bytes": "1048576", "cluster.preset": "dgx-h100",
    "cluster.nodes": "1", "measured.time": "24.6 us",
}


def table(path: Path, *rows: Mapping[str, str]) -> Path:
    """The table of `rows` at `path`; cells that a row has not are empty."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path
