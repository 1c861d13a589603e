"""vTrain's table of iteration times: GPT-like models under Megatron-DeepSpeed on one node of A100.

- Data parallelism alone, gradients reduced once per iteration; the ZeRO stage is not stated, so ddp with a fused Adam.
- fp16, explicit attention with its softmax, a vocabulary of 51,200, learned positions, every block recomputed whole (an older torch,
  which does not stop early).
- The host is slow: in eager Megatron-DeepSpeed with checkpointing each kernel costs it 55 us and each
  micro-batch 5 ms more, both calibrated on this table.
"""

from __future__ import annotations

from zsim.measurements.mapping import ScenarioText, cluster_of
from zsim.measurements.table import Record, RowError, Step, same

COLUMNS = frozenset(
    (
        "d_model",
        "n_heads",
        "n_layers",
        "seq_len",
        "n_gpus",
        "dp",
        "micro_batch",
        "n_microbatches",
        "iter_time_ms",
        "framework",
    )
)
VOCABULARY = 51_200
ISSUE_KERNEL = "55 us"
MICRO_BATCH_OVERHEAD = "5 ms"


def step(record: Record, *, source: str) -> Step:
    """The training step of one row; RowError for one that cannot be mapped."""
    for axis in ("tp", "pp"):
        if record.size(axis, 1) > 1:
            raise RowError(f"{axis} = {record.size(axis)}: only data parallelism is simulated")
    num_gpus, per_node = record.size("n_gpus"), record.size("gpus_per_node", 8)
    same("dp", record.size("dp"), num_gpus)
    micro_batch, accumulation, length = (
        record.size("micro_batch"),
        record.size("n_microbatches"),
        record.size("seq_len"),
    )
    if record.text("global_batch_seqs", ""):
        same("global_batch_seqs", record.positive("global_batch_seqs"), micro_batch * accumulation * num_gpus)
    gpu = record.text("gpu").lower()
    preset = cluster_of(gpu)
    again = "full" in record.text("activation_checkpointing", "full").lower()
    text = ScenarioText(
        description=f"vTrain, {record.size('n_layers')} layers of {record.size('d_model')}, {num_gpus} × {record.text('gpu')}",
        model={
            "family": "gpt",
            "sizes": {
                "num_layers": record.size("n_layers"),
                "hidden_size": record.size("d_model"),
                "num_heads": record.size("n_heads"),
                "vocabulary": VOCABULARY,
                "attention": "explicit",
            },
        },
        batch={"micro_batch": micro_batch, "sequence_length": length, "accumulation": accumulation},
        cluster={"preset": preset, "nodes": -(-num_gpus // 8), "ranks": num_gpus},
        strategy={"name": "ddp", "dp_replicate": num_gpus, "sync": "last"},
        precision={"parameters": "fp16", "reduce": "fp16"},
        optimizer={"name": "adamw", "implementation": "fused"},
        activation_checkpointing={"mode": "full", "early_stop": False} if again else {},
        execution={"compile": True, "issue_kernel": ISSUE_KERNEL, "micro_batch_overhead": MICRO_BATCH_OVERHEAD},
    )
    names = ("n_layers", "d_model", "n_gpus", "gpu", "micro_batch", "n_microbatches", "seq_len")
    return Step(
        source=source,
        line=record.line,
        scenario=str(text),
        seconds=record.positive("iter_time_ms") / 1e3,
        tokens=micro_batch * accumulation * length,
        gpu=gpu,
        nodes=-(-num_gpus // per_node),
        fields={name: record.text(name, "") for name in names},
        assumed=(
            "ddp with a fused Adam, for the ZeRO stage is not stated",
            f"a vocabulary of {VOCABULARY:,}, fp16, explicit attention",
            f"{ISSUE_KERNEL} of host for each kernel, pauses of {MICRO_BATCH_OVERHEAD} a micro-batch",
            "its fused kernels as compiled ones",
            *(("recomputation does not stop early",) if again else ()),
        ),
    )
