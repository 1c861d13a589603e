"""MosaicML llm-foundry's table of training throughput: MPT models under FSDP1 in Composer.

What a row says is taken from it; what it leaves open is decided here and named in `assumed`:

- A model is a gpt of the row's dimensions with tied embeddings; its vocabulary and positions are the row's.
- `mp_mode` DEFAULT is a bf16 all-gather and an fp32 reduction, PURE is bf16 for both.
- Attention kernels are Triton's FlashAttention, causal.
- Rows on A100 ran in 2023 with a torch whose recomputation did not stop early; rows on H100 with one that did.
- The optimizer is Composer's DecoupledAdamW, which is not fused, with gradients clipped by their norm.
- Composer's trainer pauses: 12 ms for each step, 6 ms for each micro-batch, both calibrated (data, loss and metrics on the host).
"""

from __future__ import annotations

from zsim.measurements.mapping import ScenarioText, cluster_of
from zsim.measurements.table import Record, RowError, Step, same

COLUMNS = frozenset(
    (
        "model",
        "d_model",
        "n_heads",
        "n_layers",
        "seq_len",
        "n_gpus",
        "gpu",
        "mp_mode",
        "sharding",
        "micro_batch",
        "grad_accum",
        "tokens_per_s",
    )
)
SHARDINGS = {"FULL_SHARD": "full", "SHARD_GRAD_OP": "grad_op"}
ROCE = {"dgx-a100": "a100-80-roce", "dgx-a100-40": "a100-40-roce"}
"""Its nodes of A100 have 1600 Gbit/s of RoCE."""
STEP_OVERHEAD, MICRO_BATCH_OVERHEAD = "12 ms", "6 ms"


def step(record: Record, *, source: str) -> Step:
    """The training step of one row; RowError for one that cannot be mapped."""
    for axis in ("tp", "pp"):
        if record.size(axis, 1) > 1:
            raise RowError(f"{axis} = {record.size(axis)}: only data parallelism is simulated")
    gpu = record.text("gpu").lower()
    preset = cluster_of(gpu)
    if "roce" in record.text("interconnect", "").lower():
        preset = ROCE.get(preset, preset)
    if record.truth("activation_cpu_offload", False):
        raise RowError("activation_cpu_offload: not simulated")
    num_gpus, per_node = record.size("n_gpus"), record.size("gpus_per_node", 8)
    micro_batch, accumulation, length = (
        record.size("micro_batch"),
        record.size("grad_accum"),
        record.size("seq_len"),
    )
    sequences = micro_batch * accumulation * num_gpus
    if record.text("global_batch_seqs", ""):
        same("global_batch_seqs", record.positive("global_batch_seqs"), sequences)
    rate = record.positive("tokens_per_s")
    if record.text("tokens_per_s_per_gpu", ""):
        same("tokens_per_s_per_gpu", record.positive("tokens_per_s_per_gpu"), rate / num_gpus)
    scenario, assumed = _scenario(record, preset, num_gpus)
    return Step(
        source=source,
        line=record.line,
        scenario=str(scenario),
        seconds=sequences * length / rate,
        tokens=micro_batch * accumulation * length,
        gpu=gpu,
        nodes=-(-num_gpus // per_node),
        fields=_fields(record),
        assumed=assumed,
    )


def _fields(record: Record) -> dict[str, str]:
    names = (
        "model",
        "seq_len",
        "n_gpus",
        "gpu",
        "precision",
        "mp_mode",
        "sharding",
        "activation_checkpointing",
        "micro_batch",
        "grad_accum",
    )
    return {name: record.text(name, "") for name in names}


def _scenario(record: Record, cluster: str, num_gpus: int) -> tuple[ScenarioText, tuple[str, ...]]:
    mode = record.one_of("mp_mode", {"DEFAULT": "fp32", "PURE": "bf16"})
    sharding = record.one_of("sharding", SHARDINGS)
    eight_bits = "fp8" in record.text("precision", "bf16")
    again = record.truth("activation_checkpointing", False)
    early_stop = "a100" not in cluster
    width = record.size("d_model")
    model = {
        "num_layers": record.size("n_layers"),
        "hidden_size": width,
        "num_heads": record.size("n_heads"),
        "vocabulary": record.size("vocab_size", 50368),
        "feed_forward": record.size("expansion_ratio", 4) * width,
        "tied": record.truth("tied_embeddings", True),
        "attention": "sdpa",
    }
    checkpointing = {"mode": "full", "early_stop": early_stop} if again else {}
    execution = {
        "attention_kernels": "triton",
        "step_overhead": STEP_OVERHEAD,
        "micro_batch_overhead": MICRO_BATCH_OVERHEAD,
    }
    text = ScenarioText(
        description=f"llm-foundry, {record.text('model')}, {record.size('seq_len')} tokens, {num_gpus} × {record.text('gpu')}",
        model={"family": "gpt", "sizes": model},
        batch={
            "micro_batch": record.size("micro_batch"),
            "sequence_length": record.size("seq_len"),
            "accumulation": record.size("grad_accum"),
        },
        cluster={"preset": cluster, "nodes": -(-num_gpus // 8), "ranks": num_gpus},
        strategy={"name": "fsdp1", "dp_shard": num_gpus, "sharding": sharding} if num_gpus > 1 else {"name": "ddp", "dp_replicate": 1},
        precision={"parameters": "bf16", "reduce": mode},
        optimizer={"name": "adamw", "implementation": "foreach", "clip_norm": 1.0},
        activation_checkpointing=checkpointing,
        execution=execution | ({"float8": True} if eight_bits else {}),
    )
    assumed = (
        "Triton attention, causal",
        "DecoupledAdamW, not fused, gradients clipped",
        f"pauses of {STEP_OVERHEAD} a step and {MICRO_BATCH_OVERHEAD} a micro-batch",
        *((f"recomputation {'stops early' if early_stop else 'does not stop early'}",) if again else ()),
        *(("linears in float8, everything else in bf16",) if eight_bits else ()),
    )
    return text, assumed
