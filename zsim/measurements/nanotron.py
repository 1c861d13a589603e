"""The Ultra-Scale Playbook's sweep with nanotron: Llama-like models under data parallelism on a shared EFA cluster of H100.

- ZeRO 0 is ddp with gradients reduced once per step, ZeRO 1 shards the optimizer; bf16 with gradients accumulated and kept in fp32.
- FlashAttention 2, a fused AdamW.
"""

from __future__ import annotations

from zsim.measurements.mapping import ScenarioText, cluster_of
from zsim.measurements.table import Record, RowError, Step, same

COLUMNS = frozenset(
    (
        "model",
        "seq_len",
        "nodes",
        "n_gpus",
        "micro_batch",
        "grad_accum",
        "dp",
        "zero_stage",
        "status",
        "tokens_per_s_per_gpu",
    )
)


def step(record: Record, *, source: str) -> Step:
    """The training step of one row; RowError for one that cannot be mapped."""
    if record.text("status", "ok") != "ok":
        raise RowError(f"status: {record.text('status')[:60]}")
    for axis in ("tp", "pp"):
        if record.size(axis, 1) > 1:
            raise RowError(f"{axis} = {record.size(axis)}: only data parallelism is simulated")
    num_gpus, gpu = record.size("n_gpus"), record.text("gpu").lower()
    preset = cluster_of(gpu)
    same("dp", record.size("dp"), num_gpus)
    batch, accumulation, length = (
        record.size("micro_batch"),
        record.size("grad_accum"),
        record.size("seq_len"),
    )
    if record.text("global_batch_seqs", ""):
        same("global_batch_seqs", record.positive("global_batch_seqs"), batch * accumulation * num_gpus)
    cluster = (
        "p5"
        if "efa" in record.text("interconnect", "").lower() and preset == "dgx-h100"
        else preset
    )
    text = ScenarioText(
        description=f"nanotron, {record.text('model')} on {num_gpus} GPUs",
        model={
            "family": "llama",
            "sizes": {
                "num_layers": record.size("n_layers"),
                "hidden_size": record.size("d_model"),
                "num_heads": record.size("n_heads"),
                "num_kv_heads": record.size("n_kv_heads", record.size("n_heads")),
                "feed_forward": record.size("d_ff"),
                "vocabulary": record.size("vocab_size"),
                "tied": record.truth("tied_embeddings", True),
                "loss_dtype": "float32",
            },
        },
        batch={"micro_batch": batch, "sequence_length": length, "accumulation": accumulation},
        cluster={"preset": cluster, "nodes": record.size("nodes"), "ranks": num_gpus},
        strategy=_strategy(record.text("zero_stage", "0"), num_gpus),
        precision={"parameters": "bf16", "reduce": "fp32"},
        optimizer={"name": "adamw", "implementation": "fused", "clip_norm": 1.0},
    )
    names = ("model", "n_gpus", "gpu", "seq_len", "micro_batch", "grad_accum", "zero_stage")
    return Step(
        source=source,
        line=record.line,
        scenario=str(text),
        seconds=batch * accumulation * length / record.positive("tokens_per_s_per_gpu"),
        tokens=batch * accumulation * length,
        gpu=gpu,
        nodes=record.size("nodes"),
        fields={name: record.text(name, "") for name in names},
        assumed=("FlashAttention 2, fused AdamW with clipping", "gradients reduced in fp32, once per step"),
    )


def _strategy(stage: str, num_gpus: int) -> dict[str, object]:
    if stage == "0":
        return {"name": "ddp", "dp_replicate": num_gpus, "sync": "last", "gradient_as_bucket_view": True}
    if stage == "1":
        return {"name": "zero1", "dp_shard": num_gpus, "sync": "last"}
    raise RowError(f"zero_stage: expected 0 or 1, found {stage[:20]!r}")
