"""torchtitan's published benchmarks: Llama 3.1 under FSDP2, with its memory.

- Parameters and gradients are computed in bf16, reduced and kept in fp32 unless the row says otherwise; AdamW, fused; the loss of
  float32 logits.
- "selective op" keeps attention's outputs and every second product's, as torchtitan's policy does; "selective 2" recomputes every
  second block, "full" all of them.
- More GPUs than `dp_shard` are replicas: HSDP. A global batch of several local ones is accumulated.
"""

from __future__ import annotations

import re

from zsim.measurements.checks import Assumed, accumulation, only_data_parallel, said, two_bytes, utilisation
from zsim.measurements.llamas import model_of
from zsim.measurements.machines import NODE, Machine, machine
from zsim.measurements.mapping import ScenarioText, checkpointing, num_parameters, step_of
from zsim.measurements.table import Record, RowError, Step
from zsim.models import preset

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
FIELDS = (
    "model",
    "n_gpus",
    "seq_len",
    "local_batch",
    "activation_checkpointing",
    "torch_compile",
    "precision",
    "float8",
    "technique",
    "gpu",
    "interconnect",
)


ANOTHER_FRAMEWORK = 0.15
"""How much wider the band is for other software: as a step's with published constants alone."""
ANOTHER_RECIPE = 0.05
"""And for scales of rows or blocks, which are more to compute than one of a whole tensor."""


def step(record: Record, *, source: str) -> Step:
    """The training step of one row; RowError for one that cannot be mapped."""
    only_data_parallel(record)
    assumed = Assumed(["fused AdamW with clipping"])
    place = machine(record, assumed)
    strategy = _strategy(record, place, assumed)
    batch, length = record.size("local_batch"), record.size("seq_len")
    steps = accumulation(record, "grad_accum", total="global_batch", at_once=batch * place.ranks) if _accumulates(record) else 1
    name = model_of(record.text("model"))
    rate = record.positive("tokens_per_s_per_gpu")
    said(record, "step_time_s_derived", batch * steps * length / rate)
    _consistent(record, name, length, rate, place)
    if "torchtitan" not in record.text("framework", "torchtitan").lower():
        assumed.add(f"{record.text('framework')[:40]} as torchtitan", widens=ANOTHER_FRAMEWORK)
    if not _accumulates(record):
        assumed.add("one micro-batch a step")
    elif steps > 1 and not record.text("grad_accum", ""):
        assumed.add(f"{steps} micro-batches a step, which the global batch makes")
    precision = two_bytes(record, default="bf16", reduce="fp32", or_one=True)
    text = ScenarioText(
        description=f"torchtitan, {record.text('model')} on {place.ranks} GPUs",
        model={"preset": name},
        batch={"micro_batch": batch, "sequence_length": length} | ({"accumulation": steps} if steps > 1 else {}),
        cluster=place.table,
        strategy=strategy,
        precision={"parameters": precision.compute, "reduce": precision.reduce},
        optimizer={"name": "adamw", "implementation": "fused", "clip_norm": 1.0},
        activation_checkpointing=checkpointing(record.text("activation_checkpointing", "none"), assumed),
        execution=_execution(record, place, assumed, narrow=precision.eight_bits),
    )
    record.text("async_tp", "")  # changes nothing without tensor parallelism
    shards = "all" if strategy.get("dp_shard") == place.ranks else str(strategy.get("dp_shard", 1))
    also = {"dp_shard": shards, "accumulation": str(steps)}
    seconds = batch * steps * length / rate
    return step_of(record, text, source=source, machine=place, seconds=seconds, assumed=assumed, names=FIELDS, also=also)


def _consistent(record: Record, name: str, length: int, rate: float, place: Machine) -> None:
    """RowError where its parameters are others, or its MFU, which counts all of them but the input embedding's, is of another rate."""
    parameters, sizes = num_parameters({"preset": name}, length), preset(name).sizes
    said(record, "n_params", parameters)
    embedding = sizes.vocabulary * sizes.hidden_size  # type: ignore[union-attr]
    flops = 6 * (parameters - embedding) + 12 * sizes.num_layers * sizes.hidden_size * length  # type: ignore[union-attr]
    utilisation(record, ("mfu_pct",), flops * rate, model=place.part.model, percent=True)


def _accumulates(record: Record) -> bool:
    return bool(record.text("global_batch", "") or record.text("grad_accum", ""))


def _strategy(record: Record, place: Machine, assumed: Assumed) -> dict[str, object]:
    """FSDP2, HSDP where it shards over fewer GPUs than there are, or ddp, as `technique` and `dp_shard` say together."""
    words = record.text("technique", "FSDP")
    tokens = set(re.findall(r"[a-z]+\d?", words.lower()))
    if tokens & {"tp", "pp", "cp", "ep", "tensor", "pipeline", "context", "expert", "async"} or re.search(r"\b[234]-?d\b", words.lower()):
        raise RowError(f"technique = {words[:40]}: only data parallelism is simulated")
    if tokens & {"offload", "cpu"}:
        raise RowError(f"technique = {words[:40]}: offload is not mapped")
    ranks = place.ranks
    given = record.text("dp_shard", "").removesuffix(".0")
    if "ddp" in tokens:
        if given not in ("", "1"):
            raise RowError(f"dp_shard: {given[:20]} contradicts technique = {words[:40]}")
        return {"name": "ddp", "dp_replicate": ranks}
    if not tokens & {"fsdp", "fsdp1", "fsdp2", "hsdp"} or "fsdp1" in tokens:
        raise RowError(f"technique: expected FSDP, HSDP or DDP, found {words[:40]!r}")
    if given in ("", "-1"):
        shard = min(NODE, ranks) if "hsdp" in tokens else ranks
        assumed.add(f"shards over {shard} GPUs")
    else:
        shard = record.size("dp_shard")
    if ranks % shard:
        raise RowError(f"dp_shard: {shard} does not divide n_gpus = {ranks}")
    kept: dict[str, object] = {"reshard_after_forward": False} if re.search(r"no[- ]reshard|zero-?2|never|grad_op", words.lower()) else {}
    if shard < ranks and given not in ("", "-1") and "hsdp" not in tokens:
        assumed.add(f"{ranks // shard} replicas of {shard} shards, which dp_shard makes")
    if shard < ranks:
        return {"name": "hsdp", "dp_replicate": ranks // shard, "dp_shard": shard, **kept}
    return {"name": "fsdp2", "dp_shard": shard, **kept}


def _execution(record: Record, place: Machine, assumed: Assumed, *, narrow: bool) -> dict[str, object]:
    """Compiled, and in 8 bits, as `narrow` or float8 says, where the device has such products."""
    recipe = record.text("float8", "none").lower()
    narrow = narrow or recipe not in ("none", "false", "no", "off", "0")
    if narrow and not place.part.float8:
        raise RowError(f"float8: {place.part.words} has no products of 8 bits")
    if narrow:
        assumed.add("linears in float8, everything else in bf16")
    if narrow and re.search(r"row|axis|block|group|mx|nv", recipe):
        assumed.add(f"float8 {recipe[:20]} takes the time of tensorwise", widens=ANOTHER_RECIPE)
    compiled = record.truth("torch_compile", False)
    return {**({"compile": True} if compiled else {}), **({"float8": True} if narrow else {})}
