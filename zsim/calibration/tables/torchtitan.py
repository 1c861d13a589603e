"""torchtitan's published benchmarks: Llama 3.1 under FSDP2, with its memory.

- Parameters and gradients are computed in bf16, reduced and kept in fp32 unless the row says
  otherwise; AdamW, fused; the loss of
  float32 logits.
- "selective op" keeps attention's outputs and every second product's, as torchtitan's policy does;
  "selective 2" recomputes every
  second block, "full" all of them. "selective" alone, and a row that does not say, is "op", which
  its configurations of Llama have.
- More GPUs than `dp_shard` are replicas: HSDP. A global batch of several local ones is accumulated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from zsim.calibration.rows.checks import (
    UNSAID,
    Assumed,
    accumulation,
    compiling,
    is_compiled,
    micro_batch,
    only_data_parallel,
    said,
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
from zsim.calibration.vocabulary.float8 import gathers_narrow, is_narrow
from zsim.calibration.vocabulary.llama import is_grouped, model_of, sizes_said, table_of
from zsim.calibration.vocabulary.optimizer import implementation_of
from zsim.calibration.vocabulary.precision import two_bytes
from zsim.calibration.vocabulary.resharding import resharding, said_in
from zsim.calibration.vocabulary.sharding import one_replica
from zsim.calibration.vocabulary.software import norms, version
from zsim.models.families import preset

COLUMNS = frozenset(("model", "n_gpus", "seq_len", "gpu"))
ONE_OF = (frozenset(("local_batch", "global_batch")),)
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


OTHER_AXES = {
    "tp", "pp", "cp", "ep", "sp", "tensor", "pipeline", "context", "expert", "sequence", "async",
    "asynctp", "loss", "ulysses",
}
FILLERS = {
    *(
        "1d", "data", "parallel", "parallelism", "dp", "full", "fully", "sharded", "sharding",
        "shard", "hybrid", "replicate", "only",
    ),
    *(
        "with", "and", "in", "using", "torch", "pytorch", "torchtitan", "v1", "v2", "default",
        "compile", "compiled", "float8", "fp8",
    ),
    *(
        "tensorwise", "rowwise", "mixed", "precision", "bf16", "per", "parameter", "parameters",
        "none", "after", "forward",
    ),
}
"""Words of a technique that change nothing by themselves, or that are read one by one."""
ANOTHER_FRAMEWORK = 0.15
"""How much wider the band is for other software: as a step's with published constants alone."""
EAGER_CASTS = 0.15
"""And for casts that no row has been measured with."""
MX = ("B200",)
"""Models with products of blocks that have a scale each."""
ANOTHER_RECIPE = 0.05
"""And for scales of rows or blocks, which are more to compute than one of a whole tensor."""
ROUNDED = 0.02
"""By how much a rate may be outside of the range of the runs that it is of."""
NARROW_GATHERS = 0.04
"""And for parameters that are gathered in 8 bits: links of twice the bandwidth make Llama 3.1 8B on
8 to 256 H100 on InfiniBand faster by 1 % with two sequences on a GPU and by 2 % with one; twice
that, since there are slower networks."""


def step(record: Record, *, source: str) -> Step:
    """The training step of one row; RowError for one that cannot be mapped."""
    only_data_parallel(record)
    assumed = Assumed()
    implementation = implementation_of(record, default="fused", assumed=assumed)
    assumed.add(f"{implementation} AdamW with clipping")
    place = machine(record, assumed)
    asked = technique(record)
    strategy = _strategy(record, place, asked, assumed)
    batch = micro_batch(
        record, "local_batch", total="global_batch", steps="grad_accum", ranks=place.ranks,
        assumed=assumed,
    )
    length = record.size("seq_len")
    steps = (
        accumulation(record, "grad_accum", total="global_batch", at_once=batch * place.ranks)
        if _accumulates(record)
        else 1
    )
    name = model_of(record.text("model"))
    sizes_said(record, name)
    attention = asked_of(record, default=Attention(model="sdpa"), part=place.part, assumed=assumed)
    model, *or_models = tables(_model(record, name), attention, grouped=is_grouped(name))
    seconds = seconds_of(
        record, "tokens_per_s_per_gpu", tokens=batch * steps * length, ranks=place.ranks,
        assumed=assumed,
    )
    _consistent(record, name, length, batch * steps * length / seconds, place)
    if "torchtitan" not in record.text("framework", "torchtitan").lower():
        assumed.add(f"{record.text('framework')[:40]} as torchtitan", widens=ANOTHER_FRAMEWORK)
    if not _accumulates(record):
        assumed.add("one micro-batch a step")
    elif steps > 1 and not record.text("grad_accum", ""):
        assumed.add(f"{steps} micro-batches a step, which the global batch makes")
    precision = two_bytes(record, default="bf16", reduce="fp32", assumed=assumed, or_one=True)
    text = ScenarioText(
        description=f"torchtitan, {record.text('model')} on {place.ranks} GPUs", model=model,
        batch={"micro_batch": batch, "sequence_length": length}
        | ({"accumulation": steps} if steps > 1 else {}), cluster=place.table, strategy=strategy,
        precision={"parameters": precision.compute, "reduce": precision.reduce},
        optimizer={"name": "adamw", "implementation": implementation, "clip_norm": 1.0},
        activation_checkpointing=checkpointing(
            _selective(record.text("activation_checkpointing", ""), assumed), assumed
        ),
        execution=_execution(record, place, assumed, narrow=precision.eight_bits, asked=asked)
        | attention.execution,
    )
    record.text("async_tp", "")  # changes nothing without tensor parallelism
    also = _told_apart(
        text, attention, place, steps, recipe=record.text("float8", "True").lower()
    ) | version(record)
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


def _model(record: Record, name: str) -> dict[str, object]:
    return table_of(
        name, vocabulary=record.size("vocab_size") if record.text("vocab_size", "") else 0
    )


def _told_apart(
    text: ScenarioText, attention: Attention, place: Machine, steps: int, *, recipe: str
) -> dict[str, str]:
    """What is read out of several columns: pairs of rows differ in what ran, however their words
    do."""
    strategy = text.strategy
    shards, kind = (
        strategy.get("dp_shard", place.ranks),
        {"hsdp": "fsdp2"}.get(strategy["name"], strategy["name"]),
    )
    reshards = strategy.get("reshard_after_forward", strategy.get("sharding") != "grad_op")
    always = (
        reshards is True and "reshard_after_forward" in strategy
    )  # the root as well, which FSDP2 by itself keeps
    return {
        "technique": kind,
        "dp_shard": "all" if shards == place.ranks else str(shards),
        "accumulation": str(steps),
        "reshard_after_forward": "always" if always else str(reshards),
        "torch_compile": str(bool(text.execution.get("compile"))),
        "float8": recipe if text.execution.get("float8") else "False",
        "attention": str(attention),
        "optimizer": text.optimizer["implementation"],
        "model.vocab_size": str(text.model.get("sizes", {}).get("vocabulary", "")),
    }


def _consistent(record: Record, name: str, length: int, rate: float, place: Machine) -> None:
    """RowError where its parameters are others, its rate is outside the range that it states, or
    its MFU, which counts all parameters but the input embedding's, is of another rate."""
    ends = [
        float(end.replace(",", ""))
        for end in re.findall(r"\d[\d,]{0,12}(?:\.\d+)?", record.text("tokens_per_s_range", ""))
    ]
    if len(ends) == 2 and not min(ends) * (1 - ROUNDED) <= rate <= max(ends) * (1 + ROUNDED):
        raise RowError(f"tokens_per_s_range: {record.text('tokens_per_s_range')[:40]} contradicts "
                       f"{rate:.0f} tokens a second of each GPU")
    parameters, sizes = num_parameters({"preset": name}, length), preset(name).sizes
    said(record, "n_params", parameters)
    embedding = sizes.vocabulary * sizes.hidden_size  # type: ignore[union-attr]
    flops = 6 * (parameters - embedding) + 12 * sizes.num_layers * sizes.hidden_size * length  # type: ignore[union-attr]
    utilisation(record, ("mfu_pct",), flops * rate, model=place.part.model, percent=True)


def _accumulates(record: Record) -> bool:
    return bool(record.text("global_batch", "") or record.text("grad_accum", ""))


AXES = ("dp_shard", "dp_replicate")
_AXIS = re.compile(
    r"\b(?:data_parallel_|dp[-_ ]?)(shard|replicate)(?:_degree)?\s*[=:]?\s*(-?\d{1,7})\b"
)
"""How many ranks are in a shard group, and how many such groups, as torchtitan's options are
called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """What words of a technique say: the kind of data parallelism ("" where only other things are
    named), over how many ranks each of `AXES` is, whether nodes are replicas, whether parameters
    are freed after forward, and whether compile or float8 is named."""

    kind: str
    degrees: Mapping[str, int]
    hybrid: bool
    reshards: bool | int | None
    compiled: bool
    narrow: bool


def technique(record: Record) -> Technique:
    """The row's technique, every part of which is understood; RowError where one is not, for then
    nobody knows what ran."""
    words = record.text("technique", "")
    said_so, rest = said_in(words)
    degrees = {f"dp_{axis}": int(number) for axis, number in _AXIS.findall(rest)}
    rest = _AXIS.sub(" data parallel ", rest)
    rest = re.sub(r"\bno[-_ ]shard\b", "ddp", rest.replace("torch.compile", "compile"))
    tokens = set(re.findall(r"[a-z0-9]+", rest))
    if tokens & OTHER_AXES or re.search(r"\b[234]-?d\b", rest):
        raise RowError(f"technique = {words[:40]}: only data parallelism is simulated")
    if tokens & {"offload", "cpu"}:
        raise RowError(f"technique = {words[:40]}: offload is not mapped")
    kinds = {
        "fsdp" if token == "fsdp2" else token
        for token in tokens & {"ddp", "fsdp", "fsdp1", "fsdp2", "hsdp"}
    } or ({"fsdp"} if said_so is not None or {"fully", "full"} & tokens else set())
    if "hybrid" in tokens and "fsdp1" not in kinds:
        kinds |= {"hsdp"}
    kinds -= {"fsdp"} if kinds & {"hsdp", "fsdp1"} else set()
    unknown = sorted(tokens - FILLERS - {"ddp", "fsdp", "fsdp1", "fsdp2", "hsdp"})
    if len(kinds) > 1 or unknown or (words and not kinds and not tokens & FILLERS):
        found = f"{words[:60]!r}" + (
            f", of which {', '.join(unknown)[:40]} is not understood" if unknown else ""
        )
        known = "FSDP, FSDP1, HSDP or DDP, perhaps with reshard_after_forward, compile or float8"
        raise RowError(f"technique: expected {known}, found {found}")
    return Technique(
        kind=next(iter(kinds), ""),
        degrees=degrees,
        hybrid=bool(tokens & {"hsdp", "hybrid"}),
        reshards=resharding(record, words),
        compiled="compile" in tokens or "compiled" in tokens,
        narrow=bool(tokens & {"float8", "fp8"}),
    )


def _strategy(
    record: Record, place: Machine, asked: Technique, assumed: Assumed
) -> dict[str, object]:
    """FSDP2, HSDP where it shards over fewer GPUs than there are, FSDP1, or ddp, as `technique` and
    `dp_shard` say together."""
    words, ranks = record.text("technique", "FSDP"), place.ranks
    given = _degrees(record, asked, ranks)
    if asked.kind == "ddp":
        if given.get("dp_shard", 1) != 1:
            raise RowError(f"dp_shard: {given['dp_shard']} contradicts technique = {words[:40]}")
        if asked.reshards is not None:
            raise RowError(f"reshard_after_forward: {asked.reshards} contradicts technique = "
                           f"{words[:40]}")
        return {"name": "ddp", "dp_replicate": ranks}
    if not asked.kind:
        assumed.add("FSDP2, which is torchtitan's own", widens=UNSAID)
    shard = given.get("dp_shard", min(NODE, ranks) if asked.hybrid else ranks)
    if not given:
        assumed.add(f"shards over {shard} GPUs")
    if ranks % shard:
        raise RowError(f"dp_shard: {shard} does not divide n_gpus = {ranks}")
    if shard < ranks and given and not asked.hybrid:
        axis = (
            "dp_shard"
            if record.text("dp_shard", "") or "dp_shard" in asked.degrees
            else "dp_replicate"
        )
        assumed.add(f"{ranks // shard} replicas of {shard} shards, which {axis} makes")
    if shard == ranks and asked.hybrid:
        one_replica(shard, assumed)
    replicas = {"dp_replicate": ranks // shard} if shard < ranks else {}
    if asked.kind == "fsdp1":
        if not isinstance(asked.reshards, bool | None):
            raise RowError(f"reshard_after_forward: expected True or False of FSDP1, found "
                           f"{asked.reshards}")
        return {
            "name": "fsdp1", **replicas, "dp_shard": shard,
            "sharding": "grad_op" if asked.reshards is False else "full",
        }
    kept = {} if asked.reshards is None else {"reshard_after_forward": asked.reshards}
    return {"name": "hsdp" if replicas else "fsdp2", **replicas, "dp_shard": shard, **kept}


def _degrees(record: Record, asked: Technique, ranks: int) -> dict[str, int]:
    """The sizes of `AXES` by the row's columns and its technique, each from the other; empty where
    neither says one.

    RowError where they contradict each other or the number of ranks. A -1 is what is left.
    """
    said: dict[str, int] = {}
    for name in AXES:
        found = {asked.degrees[name]} if name in asked.degrees else set[int]()
        found |= (
            {-1 if words == "-1" else record.size(name)}
            if (words := record.text(name, "").removesuffix(".0"))
            else set()
        )
        sizes = found - {-1}
        if len(sizes) > 1:
            raise RowError(f"{name}: {' contradicts '.join(map(str, sorted(sizes)))}")
        if sizes:
            said[name] = sizes.pop()
    for name, other in (AXES, AXES[::-1]):
        if name not in said and other in said:
            if said[other] == 0 or ranks % said[other]:
                raise RowError(f"{other}: {said[other]} does not divide n_gpus = {ranks}")
            said[name] = ranks // said[other]
    if said and said["dp_shard"] * said["dp_replicate"] != ranks:
        raise RowError(f"dp_shard × dp_replicate: {said['dp_shard']} × {said['dp_replicate']} are "
                       f"not n_gpus = {ranks}")
    return said


def _selective(words: str, assumed: Assumed) -> str:
    """The words with "selective" in front where they are torchtitan's `selective_ac_option` by
    itself: "op", or "layer 2"."""
    if re.fullmatch(
        r"(?:selective|sac|selective (?:ac|activation checkpointing))?", words.strip().lower()
    ):
        assumed.add("selective activation checkpointing of ops, as the source's rows have it")
        return "selective op"
    alone = re.fullmatch(
        r"\s*(?:(?:per[- ])?ops?(?:[- ]level)?|(?:every[- ])?layers?[- =:]*\d{1,3})\s*",
        words.lower(),
    )
    return f"selective {words}" if alone else words


def _execution(
    record: Record, place: Machine, assumed: Assumed, *, narrow: bool, asked: Technique
) -> dict[str, object]:
    """Compiled, and in 8 bits, as `narrow`, float8 or the technique says, where the device has such
    products."""
    recipe = record.text("float8", "").lower()
    said_so = is_narrow(recipe)
    for name in ("technique",) * asked.narrow + ("precision",) * narrow:
        if said_so is False:
            raise RowError(f"float8: {recipe} contradicts {name} = {record.text(name)[:40]}")
    narrow = narrow or asked.narrow or bool(said_so)
    recipe = (
        " ".join((recipe, record.text("precision", ""), record.text("technique", ""))).lower()
        if narrow
        else recipe
    )
    scaled = re.search(r"\bmx\w*|\w*(?:nvfp|fp4)\w*", recipe)
    if narrow and scaled and place.part.model not in MX:
        raise RowError(f"float8: {place.part.words} has no products of scaled blocks, which "
                       f"{scaled[0][:20]} is")
    if narrow and not place.part.float8:
        raise RowError(f"float8: {place.part.words} has no products of 8 bits")
    if narrow:
        assumed.add("linears in float8, everything else in bf16")
    if narrow and gathers_narrow(recipe):
        assumed.add(
            "parameters gathered in bf16, which float8 all-gathers move half of",
            widens=NARROW_GATHERS,
        )
    if scaled and re.search(r"nvfp|fp4", recipe):
        raise RowError(f"float8: expected products of 8 bits, found {scaled[0][:20]}")
    if narrow and (scales := re.search(r"\w*(?:row|axis|block|group|mx)\w*", recipe)):
        assumed.add(f"float8 {scales[0][:20]} takes the time of tensorwise", widens=ANOTHER_RECIPE)
    compiled = asked.compiled or is_compiled(record, assumed)
    if asked.compiled and compiling(record) is False:
        raise RowError(f"torch_compile: False contradicts technique = "
                       f"{record.text('technique')[:40]}")
    if narrow and not compiled:
        assumed.add("casts to float8 in kernels of their own, as torchao's are without "
                    "torch.compile", widens=EAGER_CASTS)
    casts = {"float8_casts": "eager"} if narrow and not compiled else {}
    own = {} if compiled else norms(record, assumed)
    return {
        **own, **({"compile": True} if compiled else {}), **({"float8": True} if narrow else {}),
        **casts,
    }
