"""vTrain's table of iteration times: GPT-like models under Megatron-DeepSpeed on A100.

- Data parallelism alone, gradients reduced once per iteration; the ZeRO stage is not stated, so ddp
  with a fused Adam, unless a row states
  one, by a column or in its framework's name.
- fp16, explicit attention with its softmax, a vocabulary of 51,200, learned positions, every block
  recomputed whole (an older torch,
  which does not stop early).
- Its times are linear in layers and in micro-batches to a hundredth of a millisecond, as sums of
  profiled kernels are and runs are not: so
  products are as fast as they are alone. Scores are scaled, masked and softmaxed in one kernel,
  other chains are fused.
- Three constants are calibrated on this table: each kernel costs the host 58 us, each micro-batch 2
  ms more, and each token 6.3 us outside
  the layers, in the head, beside its products and a softmax in 16 bits. A cross-entropy by single
  calls in float32 would be a quarter of
  these; what the rest is, is not known.
- Products add to the gradients of earlier micro-batches themselves, Megatron's default. With a
  kernel for each parameter, as torch has it,
  the table is met less well however the host is calibrated, so this is no blind choice.
"""

from __future__ import annotations

from collections.abc import Mapping

from zsim.calibration.rows.checks import (
    COMPILING,
    Assumed,
    accumulation,
    compiling,
    micro_batch,
    only_data_parallel,
    said,
    seconds_of,
)
from zsim.calibration.rows.records import Record, RowError, Step
from zsim.calibration.tables.scenario_text import (
    ScenarioText,
    checkpointing,
    feed_forward,
    num_parameters,
    of_all_heads,
    step_of,
)
from zsim.calibration.vocabulary.attention import Attention, asked_of, tables
from zsim.calibration.vocabulary.cluster import machine
from zsim.calibration.vocabulary.optimizer import implementation_of
from zsim.calibration.vocabulary.precision import two_bytes
from zsim.calibration.vocabulary.zero_stage import stage_said

COLUMNS = frozenset(("d_model", "n_heads", "n_layers", "seq_len", "gpu"))
ONE_OF = (
    frozenset(("n_gpus", "dp")), frozenset(("n_microbatches", "iter_time_ms")),
    frozenset(("micro_batch", "n_microbatches")),
)
FIELDS = (
    "n_layers",
    "d_model",
    "n_heads",
    "n_gpus",
    "gpu",
    "micro_batch",
    "n_microbatches",
    "seq_len",
    "activation_checkpointing",
    "inter_node_gbps_per_node",
)
VOCABULARY = 51_200
ISSUE_KERNEL = "58 us"
MICRO_BATCH_US, TOKEN_US = 2000.0, 6.3
"""Pauses of a micro-batch, and of each token in it."""
OTHER_KERNELS = 0.1
"""How much wider the band is for attention, or a head, whose pauses no row of the table has told.
"""
ANOTHER_STAGE = 0.1
"""How much wider the band is for a stage of ZeRO, of which no row of the table is known to be, so
that its pauses may be others."""
ANOTHER_FRAMEWORK = 0.15
"""How much wider the band is for other software than the table's: as a step's with published
constants alone."""


def step(record: Record, *, source: str) -> Step:
    """The training step of one row; RowError for one that cannot be mapped."""
    only_data_parallel(record)
    assumed = Assumed(
        [
            f"{ISSUE_KERNEL} of host for each kernel, pauses of {MICRO_BATCH_US:g} us a "
            f"micro-batch and {TOKEN_US:g} us a token",
            "its fused kernels as compiled ones, products as fast as alone, gradients "
            "accumulated by the products that make them",
        ]
    )
    precision = two_bytes(record, default="fp16", reduce="fp16", assumed=assumed)
    place = machine(record, assumed)
    attention = asked_of(
        record, default=Attention(model="explicit"), part=place.part, assumed=assumed
    )
    vocabulary = record.size("vocab_size", VOCABULARY)
    kernels = f"{attention.kernels or attention.model} attention"
    assumed.add(f"a vocabulary of {vocabulary:,}, {precision.compute}, {kernels}")
    if attention.model != "explicit" or vocabulary != VOCABULARY:
        assumed.add("pauses as with the table's own attention and vocabulary", widens=OTHER_KERNELS)
    implementation = implementation_of(record, default="fused", assumed=assumed)
    if compiling(record):
        assumed.add("compiled, as its kernels are fused in any case", widens=COMPILING)
    stage = stage_said(record)
    strategy = _strategy(stage, place.ranks, assumed)
    said(record, "dp", place.ranks, within=0.0)
    batch = micro_batch(
        record, "micro_batch", total="global_batch_seqs", steps="n_microbatches", ranks=place.ranks,
        assumed=assumed,
    )
    length = record.size("seq_len")
    steps = accumulation(
        record, "n_microbatches", total="global_batch_seqs", at_once=batch * place.ranks
    )
    again = _checkpointing(record, assumed)
    if not record.text("framework", ""):
        assumed.add("Megatron-DeepSpeed, for the row names no framework", widens=ANOTHER_FRAMEWORK)
    elif "megatron-deepspeed" not in record.text("framework").lower():
        assumed.add(
            f"{record.text('framework')[:40]} as Megatron-DeepSpeed", widens=ANOTHER_FRAMEWORK
        )
    record.text("pipeline_schedule", "")  # says nothing of one stage
    seconds = seconds_of(
        record, "iter_time_ms", tokens=batch * steps * length, ranks=place.ranks, assumed=assumed
    )
    model, *or_models = tables(
        {"family": "gpt", "sizes": _sizes(record, vocabulary, assumed)}, attention
    )
    _consistent(record, model, seconds, batch * steps * length)
    text = ScenarioText(
        description=f"vTrain, {record.size('n_layers')} layers of {record.size('d_model')}, "
                    f"{place.ranks} × {record.text('gpu')}",
        model=model,
        batch={"micro_batch": batch, "sequence_length": length, "accumulation": steps},
        cluster=place.table,
        strategy=strategy,
        precision={"parameters": precision.compute, "reduce": precision.reduce},
        optimizer={"name": "adamw", "implementation": implementation},
        activation_checkpointing=again,
        execution={
            "compile": True,
            "accumulation": "fused",
            **({"softmax": "fused"} if attention.model == "explicit" else {}),
            "products": "alone",
            "issue_kernel": ISSUE_KERNEL,
            "micro_batch_overhead": f"{MICRO_BATCH_US + TOKEN_US * batch * length:.0f} us",
            **attention.execution,
        },
    )
    also = {
        "zero_stage": str(stage or 0),
        "attention": str(attention),
        "optimizer": implementation,
        "precision": f"{precision.compute} {precision.reduce}",
        "vocab_size": str(vocabulary),
        "d_ff": record.text("d_ff", ""),
    }
    return step_of(
        record,
        text,
        source=source,
        machine=place,
        seconds=seconds,
        assumed=assumed,
        names=FIELDS,
        also=also,
        or_models=or_models,
    )


def _strategy(stage: int | None, ranks: int, assumed: Assumed) -> dict[str, object]:
    """ddp, or ZeRO where the row states a stage: its first reduces gradients once per iteration as
    well, of the others each micro-batch."""
    if not stage:
        assumed.add(
            "ddp with a fused Adam"
            + (", for the ZeRO stage is not stated" if stage is None else "")
        )
        return {"name": "ddp", "dp_replicate": ranks, "sync": "last"}
    assumed.add(f"DeepSpeed's ZeRO {stage} as zero{stage} with a fused Adam", widens=ANOTHER_STAGE)
    return {"name": f"zero{stage}", "dp_shard": ranks, **({"sync": "last"} if stage == 1 else {})}


def _checkpointing(record: Record, assumed: Assumed) -> dict[str, object]:
    """Whole blocks, where the row does not say otherwise; Megatron's selective kind, attention
    alone, is refused."""
    said_so = record.text("activation_checkpointing", "")
    if not said_so:
        assumed.add("every block recomputed whole")
    if "selective" in said_so.lower():
        raise RowError(f"activation_checkpointing: expected full or none, found {said_so[:40]!r}")
    found = checkpointing(said_so or "full", assumed)
    if found:
        assumed.add("recomputation does not stop early")
    return found | {"early_stop": False} if found else {}


def _sizes(record: Record, vocabulary: int, assumed: Assumed) -> dict[str, object]:
    of_all_heads(record, record.size("n_heads"), assumed)
    wide = 4 * record.size("d_model")
    return {
        "num_layers": record.size("n_layers"),
        "hidden_size": record.size("d_model"),
        "num_heads": record.size("n_heads"),
        "vocabulary": vocabulary,
        "feed_forward": feed_forward(record, wide, is_said=False),
        "attention": "sdpa",
    }


def _consistent(record: Record, model: Mapping[str, object], seconds: float, tokens: int) -> None:
    """RowError where the row's other figures do not follow from its sizes and its time."""
    layers, width, length = record.size("n_layers"), record.size("d_model"), record.size("seq_len")
    parameters = num_parameters(model, length)
    wide = record.size("d_ff", 4 * width)
    flops = (
        layers * (24 * width**2 + 12 * width * wide + 12 * width * length) + 6 * width * VOCABULARY
    )
    said(record, "n_params_derived", parameters)
    said(record, "params_b_reported", parameters / 1e9, within=0.15)
    said(
        record, "model_tflops_per_gpu_derived_v51200", flops * tokens / seconds / 1e12, within=0.05
    )
