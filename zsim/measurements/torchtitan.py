"""torchtitan's published benchmarks: Llama 3.1 under FSDP2, with its memory.

- Parameters and gradients are computed in bf16, reduced and kept in fp32; AdamW, fused; the loss of float32 logits.
- "selective op" keeps attention's outputs and every second product's, as torchtitan's policy does; "full" recomputes blocks.
- More GPUs than `dp_shard` are replicas: HSDP.
"""

from __future__ import annotations

from zsim.measurements.mapping import ScenarioText, cluster_of
from zsim.measurements.table import Record, RowError, Step, same

COLUMNS = frozenset(
    (
        "model",
        "n_gpus",
        "seq_len",
        "local_batch",
        "dp_shard",
        "torch_compile",
        "technique",
        "gpu",
        "tokens_per_s_per_gpu",
    )
)
MODELS = {
    "llama3.1-8b": "llama-3-8b",
    "llama3-8b": "llama-3-8b",
    "llama3.1-70b": "llama-3-70b",
    "llama3-70b": "llama-3-70b",
    "llama3.1-405b": "llama-3-405b",
    "llama2-7b": "llama-2-7b",
    "llama2-13b": "llama-2-13b",
    "llama2-70b": "llama-2-70b",
}


def step(record: Record, *, source: str) -> Step:
    """The training step of one row; RowError for one that cannot be mapped."""
    for axis in ("tp", "pp", "cp"):
        if record.size(axis, 1) > 1:
            raise RowError(f"{axis} = {record.size(axis)}: only data parallelism is simulated")
    num_gpus, shard = record.size("n_gpus"), record.size("dp_shard")
    if num_gpus % shard:
        raise RowError(f"dp_shard: {shard} does not divide n_gpus = {num_gpus}")
    batch, length = record.size("local_batch"), record.size("seq_len")
    if record.text("global_batch", ""):
        same("global_batch", record.positive("global_batch"), batch * num_gpus)
    name = record.text("model").lower()
    if name not in MODELS:
        raise RowError(f"model: expected one of {', '.join(MODELS)}, found {name[:40]!r}")
    replicas = num_gpus // shard
    strategy = (
        {"name": "hsdp", "dp_replicate": replicas, "dp_shard": shard}
        if replicas > 1
        else {"name": "fsdp2", "dp_shard": shard}
    )
    eight_bits = record.text("float8", "none").lower() not in ("none", "false", "no")
    compiled = record.truth("torch_compile", False)
    text = ScenarioText(
        description=f"torchtitan, {record.text('model')} on {num_gpus} GPUs",
        model={"preset": MODELS[name]},
        batch={"micro_batch": batch, "sequence_length": length},
        cluster={"preset": cluster_of(record.text("gpu")), "nodes": -(-num_gpus // 8), "ranks": num_gpus},
        strategy=strategy,
        precision={"parameters": "bf16", "reduce": "fp32"},
        optimizer={"name": "adamw", "implementation": "fused", "clip_norm": 1.0},
        activation_checkpointing=checkpointing(record.text("activation_checkpointing", "none")),
        execution=({"compile": True} if compiled else {}) | ({"float8": True} if eight_bits else {}),
    )
    names = (
        "model",
        "n_gpus",
        "seq_len",
        "local_batch",
        "dp_shard",
        "activation_checkpointing",
        "torch_compile",
        "float8",
        "gpu",
    )
    return Step(
        source=source,
        line=record.line,
        scenario=str(text),
        seconds=batch * length / record.positive("tokens_per_s_per_gpu"),
        tokens=batch * length,
        gpu=record.text("gpu"),
        nodes=-(-num_gpus // 8),
        fields={name: record.text(name, "") for name in names},
        assumed=(
            "fused AdamW with clipping",
            *(("linears in float8, everything else in bf16",) if eight_bits else ()),
        ),
    )


def checkpointing(words: str) -> dict[str, object]:
    """The table of a scenario for the source's words; RowError for others."""
    said = words.lower()
    if said.startswith("selective") and "op" in said:
        return {"mode": "selective", "save": ["linear", "attention"], "save_every": 2}
    if said.startswith("selective"):
        return {"mode": "full", "every": 2}
    if said.startswith("full") or said in ("true", "yes"):
        return {"mode": "full"}
    if said.startswith("none") or said in ("false", "no"):
        return {}
    raise RowError(f"activation_checkpointing: not known: {words[:60]!r}")
