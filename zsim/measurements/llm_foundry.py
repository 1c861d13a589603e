"""MosaicML llm-foundry's table of training throughput: MPT models under FSDP1 in Composer.

What a row says is taken from it; what it leaves open is decided here and named in `assumed`:

- A model is a gpt of the row's dimensions with tied embeddings; its vocabulary and positions are the row's.
- `mp_mode` DEFAULT is a bf16 all-gather and an fp32 reduction, PURE is bf16 for both, FULL fp32 for both with autocast over them.
- Attention kernels are Triton's FlashAttention, causal, unless `attn_impl` names others.
- Rows on A100 ran in 2023 with a torch whose recomputation did not stop early; rows on H100 with one that did.
- The optimizer is Composer's DecoupledAdamW, which is not fused, with gradients clipped by their norm.
- Composer's trainer pauses: 12 ms for each step, 6 ms for each micro-batch, both calibrated (data, loss and metrics on the host).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from zsim.measurements.checks import Assumed, accumulation, dtypes, only_data_parallel, said
from zsim.measurements.machines import NODE, Machine, machine
from zsim.measurements.mapping import ScenarioText, num_parameters, sizes, step_of
from zsim.measurements.table import Record, RowError, Step

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
FIELDS = (
    "model",
    "seq_len",
    "n_gpus",
    "gpu",
    "interconnect",
    "precision",
    "mp_mode",
    "sharding",
    "activation_checkpointing",
    "micro_batch",
    "grad_accum",
    "attn_impl",
    "learned_pos_emb",
)
SHARDINGS = {"FULL_SHARD": "full", "SHARD_GRAD_OP": "grad_op", "HYBRID_SHARD": "full", "_HYBRID_SHARD_ZERO2": "grad_op"}
STEP_OVERHEAD, MICRO_BATCH_OVERHEAD = "12 ms", "6 ms"
SMALL_CHANGE = 0.05
"""How much wider a band is for what changes a step a little and no preset or option is of."""


def step(record: Record, *, source: str) -> Step:
    """The training step of one row; RowError for one that cannot be mapped."""
    only_data_parallel(record)
    if record.truth("activation_cpu_offload", False):
        raise RowError("activation_cpu_offload: not simulated")
    assumed = Assumed()
    if not record.truth("n_params_formula_ok", True):
        assumed.add("parameters by the sizes, of which the source says that they do not add up", widens=SMALL_CHANGE)
    place = machine(record, assumed)
    micro_batch, length = record.size("micro_batch"), record.size("seq_len")
    steps = accumulation(record, "grad_accum", total="global_batch_seqs", at_once=micro_batch * place.ranks)
    sequences = micro_batch * steps * place.ranks
    rate = record.positive("tokens_per_s")
    text = _scenario(record, place, steps, assumed)
    _consistent(record, text.model, sequences=sequences, rate=rate, ranks=place.ranks)
    seconds = sequences * length / rate
    model = sizes(record, "d_model", "n_heads", "n_layers", "vocab_size")
    return step_of(record, text, source=source, machine=place, seconds=seconds, assumed=assumed, names=FIELDS, also=model)


def _consistent(record: Record, model: Mapping[str, object], *, sequences: int, rate: float, ranks: int) -> None:
    """RowError where the row's other figures do not follow from its sizes and its rate; those of the source are rounded to whole ones."""
    length, width, layers = record.size("seq_len"), record.size("d_model"), record.size("n_layers")
    parameters = num_parameters(model, length)
    if not record.truth("learned_pos_emb", True):
        parameters -= length * width
    said(record, "n_params", parameters)
    said(record, "tokens_per_s_per_gpu", rate / ranks)
    said(record, "seqs_per_s", rate / length, rounding=1)
    said(record, "global_batch_tokens", sequences * length)
    said(record, "step_time_s_derived", sequences * length / rate)
    flops = (6 * parameters + 12 * layers * width * length) * rate / ranks
    said(record, "model_tflops_per_gpu", flops / 1e12, within=0.05, rounding=1)
    if record.text("peak_tflops_used", ""):
        peak = record.positive("peak_tflops_used") * 1e12
        for name in ("mfu_pct", "mfu_pct_recomputed"):
            said(record, name, 100 * flops / peak, within=0.1, rounding=0.1)
        again = 4 / 3 if record.truth("activation_checkpointing", False) else 1
        said(record, "hfu_pct", 100 * again * flops / peak, within=0.1, rounding=0.1)


def _scenario(record: Record, place: Machine, steps: int, assumed: Assumed) -> ScenarioText:
    kernels, attention = _attention(record, assumed)
    assumed.add("DecoupledAdamW, not fused, gradients clipped")
    assumed.add(f"pauses of {STEP_OVERHEAD} a step and {MICRO_BATCH_OVERHEAD} a micro-batch")
    precision, eight_bits = _precision(record, place, assumed)
    return ScenarioText(
        description=f"llm-foundry, {record.text('model')}, {record.size('seq_len')} tokens, {place.ranks} × {record.text('gpu')}",
        model={"family": "gpt", "sizes": _sizes(record, attention, assumed)},
        batch={"micro_batch": record.size("micro_batch"), "sequence_length": record.size("seq_len"), "accumulation": steps},
        cluster=place.table,
        strategy=_strategy(record, place.ranks),
        precision=precision,
        optimizer={"name": "adamw", "implementation": "foreach", "clip_norm": 1.0},
        activation_checkpointing=_checkpointing(record, place, assumed),
        execution={
            **({"attention_kernels": kernels} if kernels else {}),
            "step_overhead": STEP_OVERHEAD,
            "micro_batch_overhead": MICRO_BATCH_OVERHEAD,
            **({"float8": True} if eight_bits else {}),
        },
    )


def _attention(record: Record, assumed: Assumed) -> tuple[str, str]:
    """The kernels of a scenario's execution, and its model's attention."""
    words = record.text("attn_impl", "triton").lower()
    if "triton" in words:
        assumed.add("Triton attention, causal")
        return "triton", "sdpa"
    if re.search(r"flash[\s_-]*(attn|attention)?[\s_-]*v?3|fa3", words):
        raise RowError(f"attn_impl: expected FlashAttention 2, which llm-foundry's rows have, found {words[:40]!r}")
    if words.startswith("flash"):
        assumed.add("FlashAttention 2, causal")
        return "flash2", "sdpa"
    if words.startswith("torch"):
        assumed.add("explicit attention, its softmax in the model's dtype", widens=SMALL_CHANGE)
        return "", "explicit"
    raise RowError(f"attn_impl: expected triton, flash or torch, found {words[:40]!r}")


def _sizes(record: Record, attention: str, assumed: Assumed) -> dict[str, object]:
    width = record.size("d_model")
    if not record.truth("learned_pos_emb", True):
        assumed.add("learned positions, of which the row's model has none", widens=SMALL_CHANGE)
    times = record.positive("expansion_ratio") if record.text("expansion_ratio", "") else 4
    return {
        "num_layers": record.size("n_layers"),
        "hidden_size": width,
        "num_heads": record.size("n_heads"),
        "vocabulary": record.size("vocab_size", 50368),
        "feed_forward": round(times * width),
        "tied": record.truth("tied_embeddings", True),
        "attention": attention,
    }


def _precision(record: Record, place: Machine, assumed: Assumed) -> tuple[dict[str, str], bool]:
    """The scenario's table by Composer's `mp_mode`, and whether linears multiply in 8 bits."""
    words = record.text("precision", "bf16")
    found = dtypes(words)
    compute, eight_bits = found.compute, found.eight_bits
    if compute not in ("bf16", "fp16", "fp8"):
        raise RowError(f"precision: expected bf16, fp16 or fp8, for Composer runs others in TF32, found {words[:40]!r}")
    if eight_bits and not place.part.float8:
        raise RowError(f"precision: {place.part.words} has no products of 8 bits")
    if eight_bits:
        assumed.add("linears in float8, everything else in bf16")
    if compute == "fp16":
        assumed.add("without its scaler of gradients", widens=SMALL_CHANGE)
    narrow = "bf16" if compute == "fp8" else compute
    mode = record.text("mp_mode").upper()
    tables = {
        "DEFAULT": {"parameters": narrow, "reduce": "fp32"},
        "PURE": {"parameters": narrow, "reduce": narrow},
        "FULL": {"parameters": "fp32", "reduce": "fp32", "autocast": narrow},
    }
    if mode not in tables:
        raise RowError(f"mp_mode: expected one of {', '.join(tables)}, found {mode[:40]!r}")
    return tables[mode], eight_bits


def _checkpointing(record: Record, place: Machine, assumed: Assumed) -> dict[str, object]:
    if not record.truth("activation_checkpointing", False):
        return {}
    early_stop = place.part.model != "A100"
    assumed.add(f"recomputation {'stops early' if early_stop else 'does not stop early'}")
    return {"mode": "full", "early_stop": early_stop}


def _strategy(record: Record, ranks: int) -> dict[str, object]:
    word = record.text("sharding").upper()
    if word not in SHARDINGS:
        raise RowError(f"sharding: expected one of {', '.join(SHARDINGS)}, found {word[:40]!r}")
    if ranks == 1:
        return {"name": "ddp", "dp_replicate": 1}
    if "HYBRID" in word and ranks > NODE:
        if ranks % NODE:
            raise RowError(f"n_gpus: expected whole nodes of {NODE} for {word}, found {ranks}")
        return {"name": "fsdp1", "dp_replicate": ranks // NODE, "dp_shard": NODE, "sharding": SHARDINGS[word]}
    return {"name": "fsdp1", "dp_shard": ranks, "sharding": SHARDINGS[word]}
