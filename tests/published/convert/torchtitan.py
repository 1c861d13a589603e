"""pytorch/torchtitan: Llama 3.1 8B under FSDP2 on 8 H100 of 500 W, 3 rows.

Activation checkpointing is torchtitan's selective policy of operators: attention and every second
product are kept. It compiled blocks alone then: its train.py had torch.compile of the loss in a
comment, as it caused errors.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.published.convert import Row, published, seconds

NARROW_GATHERS = 0.04
"""Share by which the band is wider where float8 all-gathers move half of the bytes simulated."""


def rows() -> Iterator[Row]:
    """One row for each that was published."""
    for row in published("torchtitan.csv"):
        assumed = ["fused AdamW with clipping", "cross-entropy of a float32 copy of the logits"]
        is_compiled, is_float8 = row["torch_compile"] == "True", row["float8"] != "none"
        if not is_compiled:
            assumed.append("RMSNorms of single calls, where they are not compiled")
        if is_float8:
            assumed = [
                "parameters gathered in bf16, which float8 all-gathers move half of", *assumed,
                "linears in float8 with a scale for each tensor, torchtitan's default then, "
                "everything else in bf16",
            ]
        tokens = int(row["local_batch"]) * int(row["seq_len"])
        yield {
            "model.preset": "llama-3-8b", "model.loss_dtype": "float32",
            "batch.micro_batch": row["local_batch"], "batch.sequence_length": row["seq_len"],
            "cluster.preset": "grand-teton-h100", "cluster.nodes": int(row["n_gpus"]) // 8,
            "strategy.name": "fsdp2", "strategy.dp_shard": row["dp_shard"],
            "precision.parameters": "bf16", "precision.reduce": "fp32", "optimizer.name": "adamw",
            "optimizer.implementation": "fused", "optimizer.clip_norm": 1.0,
            "activation_checkpointing.mode": "selective",
            "activation_checkpointing.save": '["linear", "attention"]',
            "activation_checkpointing.save_every": 2,
            "execution.norms": "" if is_compiled else "composite",
            "execution.compile": "blocks" if is_compiled else "",
            "execution.float8": "tensorwise" if is_float8 else "",
            "measured.step_time": seconds(tokens / float(row["tokens_per_s_per_gpu"])),
            "widens": NARROW_GATHERS if is_float8 else "", "assumed": "; ".join(assumed),
            "source": row["source"],
        }
