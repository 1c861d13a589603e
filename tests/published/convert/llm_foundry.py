"""MosaicML llm-foundry: MPT under FSDP1 in Composer, 40 rows.

A model is a gpt of the row's sizes with tied embeddings. `mp_mode` DEFAULT reduces gradients in
fp32, PURE in bf16. The optimizer is Composer's DecoupledAdamW, which is not fused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from tests.published.convert import Row, published, seconds

CLUSTERS = {"a100_40gb": "a100-40-roce", "a100_80gb": "a100-80-roce", "h100_80gb": "dgx-h100"}
REDUCE = {"DEFAULT": "fp32", "PURE": "bf16"}
STEP_OVERHEAD, MICRO_BATCH_OVERHEAD = "18 ms", "6 ms"
"""Pauses of Composer's host for data, loss and metrics: calibrated on these rows."""
ASSUMED = (
    "causal attention", "DecoupledAdamW, not fused, gradients clipped",
    f"the host pauses {STEP_OVERHEAD} a step and {MICRO_BATCH_OVERHEAD} a micro-batch",
)
STOPPED = "2023-10"
"""Month of torch 2.1, the first in which recomputation stops early."""


def early_stop(row: Mapping[str, str]) -> tuple[str, str]:
    """The readings of `early_stop`, by the torch that ran, and the reason.

    The date by which a table stood says only that its torch is no newer. A table of January 2024
    may repeat runs of July 2023. Its attention names the sweep's software. Rows with and without
    recomputation agree only so: those left out are off by 1.1 % in the median. With an A100 that
    stops early it is 5.7 %, and with an H100 that does not 2.1 %.
    """
    if row["measured_by"] < STOPPED:
        return "false", f"the table is older than torch 2.1 of {STOPPED}"
    if "2023-07" in row["attn_impl"]:
        return "false", f"its software is of July 2023, and torch 2.1 of {STOPPED}"
    if "at that commit" in row["attn_impl"]:
        return "true", f"its software is of {row['measured_by']}, and torch 2.1 of {STOPPED}"
    return "false | true", "no column tells which torch ran"


def attention_kernels(row: Mapping[str, str]) -> tuple[str, str]:
    """The readings of `attention_kernels`, and the reason. FlashAttention 1 has Triton's rates.

    Rows of H100 name both. The script of their sweep has Triton as its default at first and flash
    later, with FlashAttention 2.4.2 for products in 8 bits. With FlashAttention 2 as an H100
    measured here has it (tests/measured/gpu_h100.json), their steps would be 12 % shorter than they
    are. So they are read as Triton's: what they ran may be another, at its rates.
    """
    name = row["attn_impl"].lower()
    if "flash" in name and "triton" in name:
        return "triton", (
            "attention at Triton's rates, one of the sweep's two defaults; with FlashAttention 2 "
            "as measured the step would be 12 % shorter"
        )
    if "triton" in name:
        return "triton", "Triton attention, the sweep's default"
    if "flash" in name and not re.search(r"flash\D{0,12}2|v2", name):
        return "triton | flash2", "FlashAttention of no version, 1 or 2"
    return "flash2", f"attention is {name}"


def rows() -> Iterator[Row]:
    """One row for each that was published."""
    for row in published("mpt_llm_foundry.csv"):
        ranks, gpu = int(row["n_gpus"]), row["gpu"]
        tokens = int(row["micro_batch"]) * int(row["grad_accum"]) * int(row["seq_len"]) * ranks
        kernels, kernels_why = attention_kernels(row)
        stops, stops_why = early_stop(row)
        assumed = [kernels_why, *ASSUMED]
        if recomputes := row["activation_checkpointing"] == "True":
            assumed.append(f"recomputation that stops early is {stops}: {stops_why}")
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
            "activation_checkpointing.early_stop": stops if recomputes else "",
            "execution.attention_kernels": kernels, "execution.float8": is_float8 or "",
            "execution.step_overhead": STEP_OVERHEAD,
            "execution.micro_batch_overhead": MICRO_BATCH_OVERHEAD,
            "measured.step_time": seconds(tokens / float(row["tokens_per_s"])),
            "assumed": "; ".join(assumed), "source": row["source"],
        }
