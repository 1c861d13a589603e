"""hsdp: fsdp2 on a 2-D mesh. Parameters are sharded over dp_shard and copied over dp_replicate, where gradients are all-reduced."""

from __future__ import annotations

from zsim.strategies import fsdp2

Options = fsdp2.Options
plan = fsdp2.plan
