"""IBM's fms-fsdp table: Llama 2 on 128 A100 with torch's FSDP in its hybrid form, and H100 where
rows have them.

- Its trainer wraps blocks with torch's FullyShardedDataParallel, limiting all-gathers, with the
  original parameters where it compiles.
  Hybrid: shards within a node, replicas across nodes. Mixed precision in bf16, reductions in bf16
  too (its `bfSixteen` policy) unless
  the row says otherwise.
- FlashAttention 2 through scaled_dot_product_attention unless the row says otherwise, AdamW as
  torch has it (foreach), gradients clipped.
"""

from __future__ import annotations

from zsim.calibration.rows.checks import (
    Assumed,
    accumulation,
    compiling,
    is_compiled,
    micro_batch,
    only_data_parallel,
    seconds_of,
    utilisation,
)
from zsim.calibration.rows.records import Record, RowError, Step
from zsim.calibration.tables.scenario_text import (
    ScenarioText,
    checkpointing,
    num_parameters,
    step_of,
)
from zsim.calibration.vocabulary.attention import Attention, asked_of, tables
from zsim.calibration.vocabulary.cluster import NODE, Machine, machine
from zsim.calibration.vocabulary.llama import is_grouped, model_of, sizes_said, table_of
from zsim.calibration.vocabulary.optimizer import implementation_of
from zsim.calibration.vocabulary.precision import two_bytes
from zsim.calibration.vocabulary.resharding import of_fsdp1
from zsim.calibration.vocabulary.sharding import of_fsdp2, one_replica, sharding, unsharded
from zsim.calibration.vocabulary.software import norms, version
from zsim.models.families import preset

COLUMNS = frozenset(("model", "n_gpus", "gpu", "seq_len", "sharding"))
ONE_OF = (frozenset(("micro_batch", "grad_accum")),)
FIELDS = (
    "model",
    "n_gpus",
    "gpu",
    "interconnect",
    "seq_len",
    "micro_batch",
    "grad_accum",
    "sharding",
    "activation_checkpointing",
    "torch_compile",
    "precision",
    "attention",
    "optimizer",
    "vocab_size",
    "reshard_after_forward",
)


def step(record: Record, *, source: str) -> Step:
    """The training step of one row; RowError for one that cannot be mapped."""
    only_data_parallel(record)
    assumed = Assumed()
    precision = two_bytes(record, default="bf16", reduce="bf16", assumed=assumed)
    implementation = implementation_of(record, default="foreach", assumed=assumed)
    assumed.add(f"AdamW, {'fused' if implementation == 'fused' else 'not fused'}, gradients "
                f"clipped")
    place = machine(record, assumed)
    batch = micro_batch(
        record, "micro_batch", total="global_batch_seqs", steps="grad_accum", ranks=place.ranks,
        assumed=assumed,
    )
    length = record.size("seq_len")
    steps = (
        accumulation(record, "grad_accum", total="global_batch_seqs", at_once=batch * place.ranks)
        if _accumulates(record)
        else 1
    )
    attention = asked_of(record, default=Attention(model="sdpa"), part=place.part, assumed=assumed)
    name = model_of(record.text("model"))
    model = table_of(
        name, vocabulary=record.size("vocab_size") if record.text("vocab_size", "") else 0
    )
    model, *or_models = tables(model, attention, grouped=is_grouped(name))
    sizes_said(record, name)
    seconds = seconds_of(
        record, "tokens_per_s_per_gpu", tokens=batch * steps * length, ranks=place.ranks,
        assumed=assumed,
    )
    again = checkpointing(record.text("activation_checkpointing", "none"), assumed)
    _consistent(record, name, length, batch * steps * length / seconds, place, again=bool(again))
    if not _accumulates(record):
        assumed.add("one micro-batch a step")
    text = ScenarioText(
        description=f"fms-fsdp, {record.text('model')} on {place.ranks} GPUs", model=model,
        batch={"micro_batch": batch, "sequence_length": length, "accumulation": steps},
        cluster=place.table, strategy=_strategy(record, place.ranks, assumed),
        precision={"parameters": precision.compute, "reduce": precision.reduce},
        optimizer={"name": "adamw", "implementation": implementation, "clip_norm": 1.0},
        activation_checkpointing=again,
        execution=({"compile": True} if is_compiled(record, assumed) else norms(record, assumed))
        | attention.execution,
    )
    also = {"attention": str(attention), "optimizer": implementation} | version(record)
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


def _accumulates(record: Record) -> bool:
    return bool(record.text("grad_accum", "") or record.text("global_batch_seqs", ""))


def _consistent(
    record: Record, name: str, length: int, rate: float, place: Machine, *, again: bool
) -> None:
    """RowError where its MFU, which counts all parameters and whole attention, or its HFU, with all
    that ran, is of another rate."""
    sizes = preset(name).sizes
    attention = 12 * sizes.num_layers * sizes.hidden_size * length  # type: ignore[union-attr]
    flops = 6 * num_parameters({"preset": name}, length) + attention
    utilisation(record, ("mfu_frac",), flops * rate, model=place.part.model, percent=False)
    if not again:
        utilisation(record, ("hfu_frac",), flops * rate, model=place.part.model, percent=False)


def _strategy(record: Record, num_gpus: int, assumed: Assumed) -> dict[str, object]:
    words = record.text("sharding")
    asked = sharding(words)
    if not asked.form:
        return unsharded(record, num_gpus, assumed)
    if asked.per_parameter:
        return of_fsdp2(record, num_gpus, assumed)
    assumed.add("FullyShardedDataParallel (FSDP1)")
    form = of_fsdp1(record, sharding=words, form=asked.form, assumed=assumed)
    if asked.hybrid and num_gpus > NODE and num_gpus % NODE:
        raise RowError(f"n_gpus: expected whole nodes of {NODE} for {words}, found {num_gpus}")
    replicas = num_gpus // NODE if asked.hybrid and num_gpus > NODE else 1
    if asked.hybrid and replicas == 1:
        one_replica(num_gpus, assumed)
    own = {"sharding": form, "use_orig_params": bool(compiling(record))}
    return {"name": "fsdp1", "dp_replicate": replicas, "dp_shard": num_gpus // replicas, **own}
