"""vTrain's iteration times of GPT-like models under Megatron-DeepSpeed on A100, 120 rows.

Its times are linear in layers and in micro-batches to a hundredth of a millisecond. Sums of
profiled kernels are so and runs are not: products are as fast as they are alone. Scores are scaled,
masked and softmaxed in one kernel, and products add to the gradients of earlier micro-batches
themselves. The loss is of a float32 copy of the logits, by single calls. All are Megatron's
defaults. Nothing is calibrated on this table: the host is the preset's, whose figure is the middle
of two others, and no trainer pauses.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.published.convert import Row, published

VOCABULARY = 51_200
WIDENS = 0.05
"""Share by which the band is wider where the reduction's dtype is not stated."""
ASSUMED = (
    "reductions in fp16, for the row does not say",
    "a loss of float32 logits by single calls, and a fused softmax, as Megatron's",
    "products as fast as alone, which accumulate gradients themselves", "an A100 SXM of 80 GB",
    f"a vocabulary of {VOCABULARY:,}, fp16, explicit attention",
    "ddp with a fused Adam, for the ZeRO stage is not stated",
    "recomputation does not stop early, as in the torch of its date",
)


def rows() -> Iterator[Row]:
    """One row for each that was published."""
    for row in published("vtrain_megatron_ds_a100.csv"):
        yield {
            "model.family": "gpt", "model.sizes.num_layers": row["n_layers"],
            "model.sizes.hidden_size": row["d_model"], "model.sizes.num_heads": row["n_heads"],
            "model.sizes.vocabulary": VOCABULARY,
            "model.sizes.feed_forward": 4 * int(row["d_model"]),
            "model.sizes.attention": "explicit", "model.sizes.loss_dtype": "float32",
            "batch.micro_batch": row["micro_batch"],
            "batch.sequence_length": row["seq_len"], "batch.accumulation": row["n_microbatches"],
            "cluster.preset": "dgx-a100", "cluster.ranks": row["n_gpus"], "strategy.name": "ddp",
            "strategy.dp_replicate": row["n_gpus"], "strategy.sync": "last",
            "precision.parameters": "fp16", "precision.reduce": "fp16", "optimizer.name": "adamw",
            "optimizer.implementation": "fused", "activation_checkpointing.mode": "full",
            "activation_checkpointing.early_stop": False, "execution.loss": "composite",
            "execution.accumulation": "fused", "execution.softmax": "fused",
            "execution.products": "alone",
            "measured.step_time": f"{row['iter_time_ms']} ms", "widens": WIDENS,
            "assumed": "; ".join(ASSUMED), "source": row["source"],
        }
