"""hsdp: fsdp2 on a 2-D mesh. Parameters are sharded over dp_shard and copied over dp_replicate,
where gradients are all-reduced."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.strategies import fsdp2


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(fsdp2.Options):
    """Options of fully_shard on two axes, with torch's defaults."""

    all_reduce: fsdp2.AllReduceAfter = "every"
    """Gradients are reduced over replicas after "every" micro-batch that synchronises, or the
    "last", until which ranks keep shards of sums (set_requires_all_reduce)."""

    @property
    def all_reduce_after(self) -> fsdp2.AllReduceAfter:
        """The micro-batches that are reduced over replicas."""
        return self.all_reduce


plan = fsdp2.plan
STRATEGY = replace(
    fsdp2.STRATEGY, options=Options, axes=("dp_replicate", "dp_shard"), asks_replicas=True,
    over_all_ranks="fsdp2", keeps_gathered=(),  # over replicas, to shard less comes first
)
