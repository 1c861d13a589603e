"""The Ultra-Scale Playbook's sweep with nanotron: Llama-like models under data parallelism on a
shared EFA cluster of H100.

- ZeRO 0 is ddp with gradients reduced once per step, ZeRO 1 shards the optimizer, ZeRO 2 the
  gradients too and ZeRO 3 the parameters;
  bf16 with gradients accumulated and kept in fp32 unless the row says otherwise.
- FlashAttention 2, a fused AdamW; a cross-entropy of single calls, which can be cut along the
  vocabulary, and each gradient added to its
  float32 sum in a kernel of its own, as its source has them.
- Others used its network too, EFA of AWS: of its bandwidth as much is left as its collectives had
  in the median, and the band is theirs. So
  it is where a row of H100 names no other one; one that names another has it for itself, unless it
  says that it is shared.
- Its MFU is (6N + 12·L·d·s) · tokens/s over 989.5 TFLOP/s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from zsim.calibration.nccl_tests import network_rates
from zsim.calibration.rows import shared_network
from zsim.calibration.rows.checks import (
    Assumed,
    accumulation,
    micro_batch,
    not_doubted,
    only_data_parallel,
    said,
    seconds_of,
)
from zsim.calibration.rows.records import Record, RowError, Step
from zsim.calibration.tables.scenario_text import (
    ScenarioText,
    checkpointing,
    num_parameters,
    sizes,
    step_of,
)
from zsim.calibration.vocabulary.attention import Attention, asked_of, tables, words_of
from zsim.calibration.vocabulary.cluster import (
    NODE,
    Machine,
    among_others,
    machine,
    network_words,
    outside_node,
)
from zsim.calibration.vocabulary.optimizer import implementation_of
from zsim.calibration.vocabulary.precision import two_bytes
from zsim.calibration.vocabulary.zero_stage import stage_said

COLUMNS = frozenset(("seq_len", "zero_stage", "n_layers", "d_model", "n_heads", "gpu"))
ONE_OF = (frozenset(("n_gpus", "dp")), frozenset(("micro_batch", "grad_accum")),)
FIELDS = (
    "model",
    "n_gpus",
    "gpu",
    "interconnect",
    "seq_len",
    "micro_batch",
    "grad_accum",
    "zero_stage",
    "precision",
    "activation_checkpointing",
)
SIZES = ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab_size", "tied_embeddings")
PEAK = 989.5e12
NAMED = 2.0
"""How many times as large or as small as its name says a model may be."""
CLUSTER, NETWORK_GB_S = "H100", 400.0
"""The GPUs of the source's own cluster, and what the network of one of its nodes carries."""


def step(record: Record, *, source: str) -> Step:
    """The training step of one row; RowError for one that cannot be mapped."""
    if record.text("status", "ok").lower() not in ("ok", "success", "succeeded", "completed"):
        raise RowError(f"status: {record.text('status')[:60]}")
    only_data_parallel(record)
    not_doubted(record, "config_consistent")
    assumed = Assumed()
    implementation = implementation_of(record, default="fused", assumed=assumed)
    assumed.add(f"{'' if words_of(record)[1] else 'FlashAttention 2, '}{implementation} AdamW "
                f"with clipping")
    precision = two_bytes(
        record, default="bf16 + fp32 grad accumulation", reduce="bf16", assumed=assumed
    )
    assumed.add(f"gradients reduced in {precision.reduce}, once per step")
    place = machine(record, assumed)
    if place.nodes > 1:
        place = _network(record, place, assumed)
    said(record, "dp", place.ranks, within=0.0)
    batch = micro_batch(
        record, "micro_batch", total="global_batch_seqs", steps="grad_accum", ranks=place.ranks,
        assumed=assumed,
    )
    length = record.size("seq_len")
    steps = accumulation(
        record, "grad_accum", total="global_batch_seqs", at_once=batch * place.ranks
    )
    attention = asked_of(record, default=Attention(model="sdpa"), part=place.part, assumed=assumed)
    grouped = record.size("n_kv_heads", record.size("n_heads")) != record.size("n_heads")
    model, *or_models = tables(
        {"family": "llama", "sizes": _sizes(record)}, attention, grouped=grouped
    )
    seconds = seconds_of(
        record, "tokens_per_s_per_gpu", tokens=batch * steps * length, ranks=place.ranks,
        assumed=assumed,
    )
    _consistent(record, model, length, batch * steps * length / seconds)
    stage = stage_said(record) or 0
    text = ScenarioText(
        description=f"nanotron, {record.text('model', 'a llama')} on {place.ranks} GPUs",
        model=model, batch={"micro_batch": batch, "sequence_length": length, "accumulation": steps},
        cluster=place.table, strategy=_strategy(stage, place.ranks),
        precision={"parameters": precision.compute, "reduce": precision.reduce},
        optimizer={"name": "adamw", "implementation": implementation, "clip_norm": 1.0},
        execution={
            "loss": "composite", **({"accumulation": "fp32"} if precision.reduce == "fp32" else {})
        }
        | attention.execution,
        activation_checkpointing=checkpointing(
            record.text("activation_checkpointing", "none"), assumed
        ),
    )
    also = sizes(record, *SIZES) | {
        "zero_stage": str(stage),
        "attention": str(attention),
        "optimizer": implementation,
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


def _network(record: Record, place: Machine, assumed: Assumed) -> Machine:
    """`place` with what others leave of its network where the row names the source's own, says that
    it is shared, or nothing of it.

    Of the last the band covers a network without others.
    """
    words = outside_node(network_words(record))
    others = shared_network.is_among_others(words)
    named = record.text("inter_node_gbps_per_node", "")
    rate = (
        record.positive("inter_node_gbps_per_node") / 8
        if named
        else network_rates.node_gb_s(words, per_node=NODE)
    )
    if others is None and (place.part.model != CLUSTER or (rate or NETWORK_GB_S) != NETWORK_GB_S):
        others = False
    if others is False:
        assumed.add("no others on the network, which is not that of the source's own rows")
        return place
    assumed.shared = True
    left = 100 * shared_network.bandwidth_left(place.nodes)
    why = "" if others else ", as on the cluster of the source's own rows, for this one names none"
    assumed.add(f"others use the network too: {left:.0f} % of its bandwidth is left, the "
                f"median{why}")
    found = among_others(place)
    return (
        found
        if others
        else replace(found, otherwise=(*found.otherwise, replace(place, otherwise=())))
    )


def _sizes(record: Record) -> dict[str, object]:
    return {
        "num_layers": record.size("n_layers"),
        "hidden_size": record.size("d_model"),
        "num_heads": record.size("n_heads"),
        "num_kv_heads": record.size("n_kv_heads", record.size("n_heads")),
        "feed_forward": record.size("d_ff"),
        "vocabulary": record.size("vocab_size"),
        "tied": record.truth("tied_embeddings", True),
        "loss_dtype": "float32",
    }


def _consistent(record: Record, model: Mapping[str, object], length: int, rate: float) -> None:
    """RowError where the row's other figures do not follow from its sizes and its rate, or its
    model goes by the name of a much larger or smaller one: the source's own 1B has 1.34e9
    parameters."""
    parameters = num_parameters(model, length)
    said(record, "n_params", parameters)
    named = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)b\b", record.text("model", "").lower())
    if named and not 1 / NAMED <= parameters / (float(named[1]) * 1e9 or 1) <= NAMED:
        raise RowError(f"model: {record.text('model')[:40]} contradicts the row's sizes, which "
                       f"make {parameters:,} parameters")
    flops = 6 * parameters + 12 * record.size("n_layers") * record.size("d_model") * length
    for name in ("mfu_pct", "mfu_pct_recomputed"):
        said(record, name, 100 * flops * rate / PEAK, within=0.1, rounding=0.1)


def _strategy(stage: int, num_gpus: int) -> dict[str, object]:
    if not stage:
        return {
            "name": "ddp", "dp_replicate": num_gpus, "sync": "last",
            "gradient_as_bucket_view": True,
        }
    return {
        "name": f"zero{stage}", "dp_shard": num_gpus, **({"sync": "last"} if stage == 1 else {})
    }
