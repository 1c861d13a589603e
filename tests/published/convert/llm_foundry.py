"""MosaicML llm-foundry: MPT under FSDP1 in Composer, 40 rows.

A model is a gpt of the row's sizes with tied embeddings. `mp_mode` DEFAULT reduces gradients in
fp32, PURE in bf16. The optimizer is Composer's DecoupledAdamW, which is not fused.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.published.convert import Row, published, seconds

CLUSTERS = {"a100_40gb": "a100-40-roce", "a100_80gb": "a100-80-roce", "h100_80gb": "dgx-h100"}
REDUCE = {"DEFAULT": "fp32", "PURE": "bf16"}
STEP_OVERHEAD, MICRO_BATCH_OVERHEAD = "18 ms", "6 ms"
"""Pauses of Composer's host for data, loss and metrics: calibrated on these rows."""
ASSUMED = (
    "Triton attention, causal, the sweep's default", "DecoupledAdamW, not fused, gradients clipped",
    f"the host pauses {STEP_OVERHEAD} a step and {MICRO_BATCH_OVERHEAD} a micro-batch",
)
STOPS_EARLY = {"a100_40gb": False, "a100_80gb": False, "h100_80gb": True}
"""Recomputation stops early since torch 2.1 of October 2023: the A100 rows are of July 2023, the
H100 rows of January 2024."""


def rows() -> Iterator[Row]:
    """One row for each that was published."""
    for row in published("mpt_llm_foundry.csv"):
        ranks, gpu = int(row["n_gpus"]), row["gpu"]
        tokens = int(row["micro_batch"]) * int(row["grad_accum"]) * int(row["seq_len"]) * ranks
        assumed = list(ASSUMED)
        if recomputes := row["activation_checkpointing"] == "True":
            early = "stops early" if STOPS_EARLY[gpu] else "does not stop early"
            assumed.append(f"recomputation {early}, by the date of the measurement")
        if is_float8 := row["precision"] == "amp_fp8":
            assumed.append("linears in float8, everything else in bf16")
        yield {
            "model.family": "gpt", "model.sizes.num_layers": row["n_layers"],
            "model.sizes.hidden_size": row["d_model"], "model.sizes.num_heads": row["n_heads"],
            "model.sizes.vocabulary": row["vocab_size"],
            "model.sizes.feed_forward": int(row["expansion_ratio"]) * int(row["d_model"]),
            "model.sizes.tied": True, "model.sizes.attention": "sdpa",
            "batch.micro_batch": row["micro_batch"], "batch.sequence_length": row["seq_len"],
            "batch.accumulation": row["grad_accum"], "cluster.preset": CLUSTERS[gpu],
            "cluster.nodes": ranks // 8, "strategy.name": "fsdp1", "strategy.dp_shard": ranks,
            "strategy.sharding": {"FULL_SHARD": "full"}[row["sharding"]],
            "precision.parameters": "bf16", "precision.reduce": REDUCE[row["mp_mode"]],
            "optimizer.name": "adamw", "optimizer.implementation": "foreach",
            "optimizer.clip_norm": 1.0,
            "activation_checkpointing.mode": "full" if recomputes else "",
            "activation_checkpointing.early_stop": STOPS_EARLY[gpu] if recomputes else "",
            "execution.attention_kernels": "triton", "execution.float8": is_float8 or "",
            "execution.step_overhead": STEP_OVERHEAD,
            "execution.micro_batch_overhead": MICRO_BATCH_OVERHEAD,
            "measured.step_time": seconds(tokens / float(row["tokens_per_s"])),
            "assumed": "; ".join(assumed), "source": row["source"],
        }
