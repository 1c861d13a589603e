"""nanotron's ultrascale playbook: Llama 1B under DDP on 8 to 256 H100 of a shared cluster.

Two of seven rows failed and have no time. Gradients are reduced in fp32 once a step, and the loss
is computed by single calls. Others use the network between nodes, and the row has the bandwidth
that is left in the median. Lost bandwidth, and not lost time, was chosen after two other forms,
with these five steps in view. Peaks are not converted: the framework holds buffers that no strategy
here has (README.md).
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.published.convert import SHARED, Row, bandwidth_left, published, seconds

NIC_GB_S = 12.0
"""A NIC of p5, of which a node has 32."""


def rows() -> Iterator[Row]:
    """One row for each run that was not out of memory."""
    for row in published("ultrascale_playbook_sweep.csv"):
        if row["status"] != "ok":
            continue
        nodes, assumed = int(row["nodes"]), ["FlashAttention 2, fused AdamW with clipping"]
        assumed.append("gradients reduced in fp32, once a step")
        left = bandwidth_left(nodes)
        if nodes > 1:
            assumed.append(f"others use the network too: {100 * left:.0f} % of its bandwidth is "
                           f"left, the median")
        steps = int(row["grad_accum"])
        tokens = int(row["micro_batch"]) * int(row["seq_len"]) * steps
        yield {
            "model.family": "llama", "model.sizes.num_layers": row["n_layers"],
            "model.sizes.hidden_size": row["d_model"], "model.sizes.num_heads": row["n_heads"],
            "model.sizes.num_kv_heads": row["n_kv_heads"], "model.sizes.feed_forward": row["d_ff"],
            "model.sizes.vocabulary": row["vocab_size"], "model.sizes.tied": True,
            "model.sizes.loss_dtype": "float32", "batch.micro_batch": row["micro_batch"],
            "batch.sequence_length": row["seq_len"], "batch.accumulation": steps,
            "cluster.preset": "p5", "cluster.nodes": nodes,
            "cluster.nic_bandwidth": f"{NIC_GB_S * left:.6g} GB/s" if nodes > 1 else "",
            "strategy.name": "ddp", "strategy.dp_replicate": row["n_gpus"], "strategy.sync": "last",
            "strategy.gradient_as_bucket_view": True, "precision.parameters": "bf16",
            "precision.reduce": "fp32", "optimizer.name": "adamw",
            "optimizer.implementation": "fused", "optimizer.clip_norm": 1.0,
            "execution.loss": "composite", "execution.accumulation": "fp32",
            "measured.step_time": seconds(tokens / float(row["tokens_per_s_per_gpu"])),
            "assumed": "; ".join(assumed), "source": row["source"],
            **(SHARED if nodes > 1 else dict.fromkeys(SHARED, "")),
        }
