"""MosaicML llm-foundry's table of training throughput: MPT models under FSDP1 in Composer.

What a row says is taken from it; what it leaves open is decided here and named in `assumed`:

- A model is a gpt of the row's dimensions with tied embeddings; its vocabulary and positions are
  the row's.
- `mp_mode` DEFAULT is a bf16 all-gather and an fp32 reduction, PURE is bf16 for both, FULL fp32 for
  both with autocast over them.
- Attention kernels are Triton's FlashAttention, causal, unless `attn_impl` names others.
- Whether recomputation stops early, as it does since torch 2.1, goes by what dates the row's
  software (`software.py`).
- A model without sizes is the preset of its name. FULL_SHARD with `reshard_after_forward` = False
  is what FSDP1 calls SHARD_GRAD_OP.
- The optimizer is Composer's DecoupledAdamW, which is not fused, with gradients clipped by their
  norm.
- Composer's trainer pauses: 18 ms for each step, 6 ms for each micro-batch, both calibrated (data,
  loss and metrics on the host).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zsim.calibration.rows.checks import (
    UNREAD,
    UNSAID,
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
from zsim.calibration.vocabulary.attention import Attention, attention_of, tables, words_of
from zsim.calibration.vocabulary.cluster import NODE, Machine, machine
from zsim.calibration.vocabulary.optimizer import implementation_of
from zsim.calibration.vocabulary.precision import dtypes
from zsim.calibration.vocabulary.resharding import of_fsdp1
from zsim.calibration.vocabulary.sharding import of_fsdp2, one_replica, sharding, unsharded
from zsim.calibration.vocabulary.software import VERSIONS, stops_early
from zsim.models.families import aliases, preset, presets

COLUMNS = frozenset(("seq_len", "n_gpus", "sharding", "gpu"))
ONE_OF = (frozenset(("d_model", "mp_mode")), frozenset(("micro_batch", "grad_accum")),)
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
    "reshard_after_forward",
)
SIZES = {
    "d_model": "hidden_size",
    "n_heads": "num_heads",
    "n_layers": "num_layers",
    "vocab_size": "vocabulary",
    "d_ff": "feed_forward",
    "tied_embeddings": "tied",
}
"""The columns of a model's sizes, and what a scenario calls them."""
STEP_OVERHEAD, MICRO_BATCH_OVERHEAD = "18 ms", "6 ms"
SMALL_CHANGE = 0.05
"""How much wider a band is for what changes a step a little and no preset or option is of."""
WIDEST_HEADS = {"triton": 128, "flash2": 256, "flash3": 256}
"""Of what kernels there are (flash_attn_triton.py, _flash_attn_forward; flash-attn's README)."""
MOST_ANOTHER = 0.5
"""By how much parameters that do not add up may differ from those of the sizes; beyond it is
another model."""


def step(record: Record, *, source: str) -> Step:
    """The training step of one row; RowError for one that cannot be mapped."""
    only_data_parallel(record)
    if record.truth("activation_cpu_offload", False):
        raise RowError("activation_cpu_offload: not simulated")
    assumed = Assumed()
    for name in VERSIONS:
        record.text(name, "")  # tells whether recomputation stops early, and nothing else
    place = machine(record, assumed)
    batch = micro_batch(
        record, "micro_batch", total="global_batch_seqs", steps="grad_accum", ranks=place.ranks,
        assumed=assumed,
    )
    length = record.size("seq_len")
    steps = accumulation(
        record, "grad_accum", total="global_batch_seqs", at_once=batch * place.ranks
    )
    sequences = batch * steps * place.ranks
    attention = _attention(record, place, assumed)
    text = _scenario(record, place, batch, steps, attention, assumed)
    model, *or_models = tables(dict(text.model), attention)
    text = replace(text, model=model)
    seconds = seconds_of(
        record, "tokens_per_s", tokens=batch * steps * length, ranks=place.ranks, assumed=assumed
    )
    _consistent(
        record, text.model, sequences=sequences, rate=sequences * length / seconds,
        ranks=place.ranks, assumed=assumed,
    )
    _as_named(record, text.model["sizes"], assumed)
    also = {
        **{f"model.{name}": str(text.model["sizes"][key]) for name, key in SIZES.items()},
        "attn_impl": str(attention), "optimizer": text.optimizer["implementation"],
        "torch_compile": str(bool(text.execution.get("compile"))),
        "activation_checkpointing.early_stop": str(
            text.activation_checkpointing.get("early_stop", "")
        ),
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


def _counted(record: Record, parameters: int, assumed: Assumed) -> float:
    """The parameters that the source's own figures count: those of the sizes, RowError for others,
    unless it says that they do not add up.

    Then the sizes are predicted, and the band is wider by what the model may be larger or smaller.
    """
    if record.truth("n_params_formula_ok", True):
        said(record, "n_params", parameters)
        return parameters
    said(record, "n_params", parameters, within=MOST_ANOTHER)
    count = record.positive("n_params") if record.text("n_params", "") else parameters
    words = "parameters by the sizes, of which the source says that they do not add up"
    assumed.add(words, widens=max(SMALL_CHANGE, abs(count / parameters - 1)))
    return count


def _consistent(
    record: Record, model: Mapping[str, Any], *, sequences: int, rate: float, ranks: int,
    assumed: Assumed,
) -> None:
    """RowError where the row's other figures do not follow from its sizes and its rate; those of
    the source are rounded to whole ones."""
    sizes = model["sizes"]
    length, width, layers = record.size("seq_len"), sizes["hidden_size"], sizes["num_layers"]
    parameters = num_parameters(model, length)
    if not record.truth("learned_pos_emb", True):
        parameters -= length * width
    counted = _counted(record, parameters, assumed)
    said(record, "seqs_per_s", rate / length, rounding=1)
    said(record, "global_batch_tokens", sequences * length)
    flops = (6 * counted + 12 * layers * width * length) * rate / ranks
    said(record, "model_tflops_per_gpu", flops / 1e12, within=0.05, rounding=1)
    if record.text("peak_tflops_used", ""):
        peak = record.positive("peak_tflops_used") * 1e12
        for name in ("mfu_pct", "mfu_pct_recomputed"):
            said(record, name, 100 * flops / peak, within=0.1, rounding=0.1)
        again = 4 / 3 if _is_checkpointed(record) else 1
        said(record, "hfu_pct", 100 * again * flops / peak, within=0.1, rounding=0.1)


def _scenario(
    record: Record, place: Machine, batch: int, steps: int, attention: Attention, assumed: Assumed
) -> ScenarioText:
    implementation = implementation_of(record, default="foreach", assumed=assumed)
    assumed.add(f"DecoupledAdamW, {'fused' if implementation == 'fused' else 'not fused'}, "
                f"gradients clipped")
    assumed.add(f"pauses of {STEP_OVERHEAD} a step and {MICRO_BATCH_OVERHEAD} a micro-batch")
    precision, eight_bits = _precision(record, place, assumed)
    return ScenarioText(
        description=f"llm-foundry, {record.text('model', 'an MPT')}, {record.size('seq_len')} "
        f"tokens, {place.ranks} × {record.text('gpu')}",
        model={"family": "gpt", "sizes": _sizes(record, attention, assumed)},
        batch={
            "micro_batch": batch, "sequence_length": record.size("seq_len"), "accumulation": steps
        },
        cluster=place.table, strategy=_strategy(record, place.ranks, assumed), precision=precision,
        optimizer={"name": "adamw", "implementation": implementation, "clip_norm": 1.0},
        activation_checkpointing=_checkpointing(record, place, assumed),
        execution={
            **_compiled(record, assumed), **attention.execution, "step_overhead": STEP_OVERHEAD,
            "micro_batch_overhead": MICRO_BATCH_OVERHEAD,
            **({"float8": True} if eight_bits else {}),
        },
    )


def _attention(record: Record, place: Machine, assumed: Assumed) -> Attention:
    """What the row says, and Triton's, which is usual, where it says nothing."""
    name, words = words_of(record)
    if not words:
        assumed.add("Triton attention, causal")
        return Attention(model="sdpa", kernels="triton")
    found = attention_of(name, words, part=place.part, assumed=assumed, explicit="torch")
    if found.is_torch_s:
        assumed.add(
            "scaled_dot_product_attention as its FlashAttention 2, causal", widens=SMALL_CHANGE
        )
    elif found.model == "explicit":
        assumed.add("explicit attention, its softmax in the model's dtype", widens=SMALL_CHANGE)
    elif found.kernels:
        assumed.add(
            f"{'Triton attention' if found.kernels == 'triton' else f'FlashAttention {found.kernels[-1]}'}, causal"  # noqa: E501
        )
    return found


def _compiled(record: Record, assumed: Assumed) -> dict[str, bool]:
    """Composer runs eagerly unless the row says that it compiles, of which the source has no row.
    """
    if not compiling(record):
        return {}
    assumed.add("compiled, as none of the source's own rows is", widens=UNREAD)
    return {"compile": True}


def _sizes(record: Record, attention: Attention, assumed: Assumed) -> dict[str, object]:
    width, heads = _size(record, "d_model", assumed), _size(record, "n_heads", assumed)
    widest = WIDEST_HEADS.get(attention.kernels, width)
    if width > heads * widest:
        raise RowError(f"n_heads: heads of {width / heads:g} are wider than {widest}, the most "
                       f"that {attention.kernels} attention has")
    of_all_heads(record, heads, assumed)
    if not record.truth("learned_pos_emb", True):
        assumed.add("learned positions, of which the row's model has none", widens=SMALL_CHANGE)
    times = record.positive("expansion_ratio") if record.text("expansion_ratio", "") else 4
    return {
        "num_layers": _size(record, "n_layers", assumed), "hidden_size": width, "num_heads": heads,
        "vocabulary": record.size("vocab_size", 50368),
        "feed_forward": feed_forward(
            record, round(times * width), is_said=bool(record.text("expansion_ratio", ""))
        ),
        "tied": record.truth("tied_embeddings", True), "attention": "sdpa",
    }


def _size(record: Record, name: str, assumed: Assumed) -> int:
    """The row's own, or that of the preset of its model; RowError where there is neither."""
    known = aliases.mpt(record.text("model", ""))
    if record.text(name, "") or known not in presets():
        return record.size(name)
    assumed.add(f"sizes of the preset {known} where the row has none")
    return int(getattr(preset(known).sizes, SIZES[name]))


def _as_named(record: Record, sizes: Mapping[str, Any], assumed: Assumed) -> None:
    """RowError where the model goes by the name of an MPT that is wider or deeper, as are its
    feed-forward layers; MPT 30B has been trained with other heads too."""
    words = record.text("model", "")
    known = aliases.mpt(words)
    if known not in presets():
        if words:
            assumed.add(
                f"model = {words[:40]!r} is not known: a gpt of the row's sizes", widens=UNREAD
            )
        return
    for name in ("d_model", "n_layers", "n_heads"):
        found, usual = sizes[SIZES[name]], getattr(preset(known).sizes, SIZES[name])
        if found != usual and name != "n_heads":
            raise RowError(f"{name}: {found} contradicts model = {words[:40]}, which has {usual}")
        if found != usual:
            assumed.add(f"{found} heads, where {known} has {usual}", widens=SMALL_CHANGE)
    ratio, usual = sizes["feed_forward"] / sizes["hidden_size"], _expansion(known)
    if round(ratio, 3) != usual:
        raise RowError(f"expansion_ratio: {ratio:g} contradicts model = {words[:40]}, which has "
                       f"{usual:g}")


def _expansion(known: str) -> float:
    """How many times wider than its model the feed-forward layer of a preset is: 4 where it does
    not say."""
    sizes: Any = preset(known).sizes
    return float(sizes.feed_forward / sizes.hidden_size) if sizes.feed_forward else 4.0


def _precision(record: Record, place: Machine, assumed: Assumed) -> tuple[dict[str, str], bool]:
    """The scenario's table by Composer's `mp_mode`, and whether linears multiply in 8 bits."""
    words = record.text("precision", "bf16")
    found = dtypes(words)
    compute, eight_bits = found.compute, found.eight_bits
    if compute not in ("bf16", "fp16", "fp8"):
        raise RowError(f"precision: expected bf16, fp16 or fp8, for Composer runs others in TF32, "
                       f"found {words[:40]!r}")
    if eight_bits and not place.part.float8:
        raise RowError(f"precision: {place.part.words} has no products of 8 bits")
    if eight_bits:
        assumed.add("linears in float8, everything else in bf16")
    if compute == "fp16":
        assumed.add("without its scaler of gradients", widens=SMALL_CHANGE)
    narrow = "bf16" if compute == "fp8" else compute
    mode = record.text("mp_mode", "").upper()
    if not mode:
        mode = "DEFAULT"
        assumed.add("mp_mode DEFAULT, which is Composer's own", widens=UNSAID)
    tables = {
        "DEFAULT": {"parameters": narrow, "reduce": "fp32"},
        "PURE": {"parameters": narrow, "reduce": narrow},
        "FULL": {"parameters": "fp32", "reduce": "fp32", "autocast": narrow},
    }
    if mode not in tables:
        raise RowError(f"mp_mode: expected one of {', '.join(tables)}, found {mode[:40]!r}")
    return tables[mode], eight_bits


def _checkpointing(record: Record, place: Machine, assumed: Assumed) -> dict[str, object]:
    if not _is_checkpointed(record):
        return {}
    return {"mode": "full", "early_stop": stops_early(record, place.part.model, assumed)}


def _is_checkpointed(record: Record) -> bool:
    """Whether every block is recomputed; RowError for some of them, of which llm-foundry has its
    own kinds."""
    words = record.text("activation_checkpointing", "False")
    found = checkpointing(words, Assumed())
    if found and found != {"mode": "full"}:
        raise RowError(f"activation_checkpointing: expected full or none, found {words[:40]!r}")
    return bool(found)


def _strategy(record: Record, ranks: int, assumed: Assumed) -> dict[str, object]:
    words = record.text("sharding")
    asked = sharding(words)
    if not asked.form:
        return unsharded(record, ranks, assumed)
    if asked.per_parameter and ranks > 1:
        return of_fsdp2(record, ranks, assumed)
    form = of_fsdp1(record, sharding=words, form=asked.form, assumed=assumed)
    if ranks == 1:
        return {"name": "ddp", "dp_replicate": 1}
    if asked.hybrid and ranks > NODE:
        if ranks % NODE:
            raise RowError(f"n_gpus: expected whole nodes of {NODE} for {words}, found {ranks}")
        return {"name": "fsdp1", "dp_replicate": ranks // NODE, "dp_shard": NODE, "sharding": form}
    if asked.hybrid:
        one_replica(ranks, assumed)
    return {"name": "fsdp1", "dp_shard": ranks, "sharding": form}
