"""IBM's fms-fsdp: Llama 2 7B on 128 A100 under torch's FSDP1 in its hybrid form, 2 rows.

Shards lie within a node, replicas across nodes. Parameters and reductions are in bf16 (the policy
`bfSixteen`), attention is FlashAttention 2 through scaled_dot_product_attention.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.published.convert import Row, published, seconds

WIDENS = 0.05
"""Share by which the band is wider where the reduction's dtype is not stated."""
ASSUMED = (
    "reductions in bf16, as the source has them, for the row does not say",
    "AdamW, not fused, gradients clipped",
    "EFA, as p4de has, for the row does not name its kind of network",
    "FullyShardedDataParallel (FSDP1)", "RMSNorms of single calls, where they are not compiled",
)


def rows() -> Iterator[Row]:
    """One row for each that was published."""
    for row in published("fms_fsdp.csv"):
        nodes = int(row["n_gpus"]) // 8
        tokens = int(row["micro_batch"]) * int(row["seq_len"]) * int(row["grad_accum"])
        yield {
            "model.preset": "llama-2-7b", "batch.micro_batch": row["micro_batch"],
            "batch.sequence_length": row["seq_len"], "batch.accumulation": row["grad_accum"],
            "cluster.preset": "p4de", "cluster.nodes": nodes, "strategy.name": "fsdp1",
            "strategy.dp_replicate": nodes, "strategy.dp_shard": 8, "strategy.sharding": "full",
            "strategy.use_orig_params": row["torch_compile"] == "True",
            "precision.parameters": "bf16", "precision.reduce": "bf16", "optimizer.name": "adamw",
            "optimizer.implementation": "foreach", "optimizer.clip_norm": 1.0,
            "execution.norms": "composite", "execution.attention_kernels": "flash2",
            "measured.step_time": seconds(tokens / float(row["tokens_per_s_per_gpu"])),
            "widens": WIDENS, "assumed": "; ".join(ASSUMED), "source": row["source"],
        }
