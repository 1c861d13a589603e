"""IBM's fms-fsdp table: Llama 2 on 128 A100 with torch's FSDP in its hybrid form, and H100 where rows have them.

- Hybrid: shards within a node, replicas across nodes. Mixed precision in bf16, reductions in bf16 too (its `bfSixteen` policy).
- FlashAttention 2 through scaled_dot_product_attention, AdamW as torch has it (foreach), gradients clipped.
"""

from __future__ import annotations

from zsim.measurements.mapping import ScenarioText, cluster_of
from zsim.measurements.table import Record, RowError, Step
from zsim.measurements.torchtitan import MODELS, checkpointing

COLUMNS = frozenset(
    (
        "model",
        "n_gpus",
        "gpu",
        "seq_len",
        "micro_batch",
        "grad_accum",
        "sharding",
        "mfu_frac",
        "tokens_per_s_per_gpu",
    )
)


def step(record: Record, *, source: str) -> Step:
    """The training step of one row; RowError for one that cannot be mapped."""
    name, gpu = record.text("model").lower(), record.text("gpu").lower()
    if name not in MODELS:
        raise RowError(f"model: expected one of {', '.join(MODELS)}, found {name[:40]!r}")
    preset = cluster_of(gpu)
    num_gpus = record.size("n_gpus")
    cluster = (
        "p4de"
        if "400 gbps" in record.text("interconnect", "").lower() and preset == "dgx-a100"
        else preset
    )
    sharding = record.text("sharding").upper()
    batch, accumulation, length = (
        record.size("micro_batch"),
        record.size("grad_accum", 1),
        record.size("seq_len"),
    )
    text = ScenarioText(
        description=f"fms-fsdp, {record.text('model')} on {num_gpus} GPUs",
        model={"preset": MODELS[name]},
        batch={"micro_batch": batch, "sequence_length": length, "accumulation": accumulation},
        cluster={"preset": cluster, "nodes": -(-num_gpus // 8), "ranks": num_gpus},
        strategy=_strategy(sharding, num_gpus),
        precision={"parameters": "bf16", "reduce": "bf16"},
        optimizer={"name": "adamw", "implementation": "foreach", "clip_norm": 1.0},
        activation_checkpointing=checkpointing(record.text("activation_checkpointing", "none")),
        execution={"compile": True} if record.truth("torch_compile", False) else {},
    )
    names = (
        "model",
        "n_gpus",
        "gpu",
        "seq_len",
        "micro_batch",
        "grad_accum",
        "sharding",
        "activation_checkpointing",
        "torch_compile",
    )
    return Step(
        source=source,
        line=record.line,
        scenario=str(text),
        seconds=batch * accumulation * length / record.positive("tokens_per_s_per_gpu"),
        tokens=batch * accumulation * length,
        gpu=gpu,
        nodes=-(-num_gpus // 8),
        fields={name: record.text(name, "") for name in names},
        assumed=("bf16 reductions", "AdamW, not fused, gradients clipped"),
    )


def _strategy(sharding: str, num_gpus: int) -> dict[str, object]:
    if sharding == "HSDP" and num_gpus > 8:
        return {"name": "hsdp", "dp_replicate": num_gpus // 8, "dp_shard": 8}
    if sharding in ("FSDP", "HSDP", "FULL_SHARD"):
        return {"name": "fsdp2", "dp_shard": num_gpus}
    raise RowError(f"sharding: expected FSDP or HSDP, found {sharding[:40]!r}")
