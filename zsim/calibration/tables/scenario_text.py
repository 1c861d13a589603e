"""A row's words as those of a scenario file, and the step that it measured: what all sources share.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from zsim.calibration.rows.checks import (
    UNREAD,
    Assumed,
    said,
    some_memory,
    unread,
    unsaid,
    whole_field,
)
from zsim.calibration.rows.records import Record, RowError, Step
from zsim.calibration.vocabulary.cluster import Machine
from zsim.cluster.devices import load_device
from zsim.errors import ZsimError
from zsim.models.families import FAMILIES, build, load_preset

SAID_ELSEWHERE = (
    *(
        "interconnect", "inter_node_gbps_per_node", "n_gpus", "micro_batch", "local_batch",
        "grad_accum", "n_microbatches",
    ),
    *("learned_pos_emb", "optimizer", "technique", "reshard_after_forward"),
)
"""Fields that may be open: what they say is used for several nodes alone, follows from other
fields, or never differs within the source."""
MAX_LAYERS = 1000
"""No model has as many; one with a million would be built for minutes before its parameters
contradict the row's."""
SLOWEST = 0.001
"""The least share of a device's peak that a training step is taken to reach: a thousandth of the
best is another unit."""

@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioText:
    """The tables of a scenario file; those that are empty are left out."""

    description: str
    model: Mapping[str, Any]
    batch: Mapping[str, Any]
    cluster: Mapping[str, Any]
    strategy: Mapping[str, Any]
    precision: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    activation_checkpointing: Mapping[str, Any] = field(default_factory=dict)
    execution: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        tables = (
            ("model", self.model),
            ("batch", self.batch),
            ("cluster", self.cluster),
            ("strategy", self.strategy),
            ("precision", self.precision),
            ("optimizer", self.optimizer),
            ("activation_checkpointing", self.activation_checkpointing),
            ("execution", self.execution),
        )
        lines = [f"{name} = {_toml(table)}" for name, table in tables if table]
        return "\n".join([f"description = {_toml(self.description)}", *lines]) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return '"' + "".join(c if c.isprintable() and c not in '"\\' else " " for c in value) + '"'
    return repr(value)


def num_parameters(model: Mapping[str, Any], length: int) -> int:
    """Those of a scenario's model table at sequences of `length`; RowError for sizes that make no
    model."""
    layers = model.get("sizes", {}).get("num_layers", 1)
    if layers > MAX_LAYERS:
        raise RowError(f"layers: expected at most {MAX_LAYERS:,}, found {layers:,}")
    try:
        if "preset" in model:
            return load_preset(model["preset"], sequence_length=length).num_parameters
        sizes = FAMILIES[model["family"]].sizes(**model["sizes"])
        return build(model["family"], sizes, name="row", sequence_length=length).num_parameters
    except (ZsimError, ValueError, ArithmeticError) as error:
        raise RowError(str(error)) from None


def step_of(
    record: Record,
    text: ScenarioText,
    *,
    source: str,
    machine: Machine,
    seconds: float,
    assumed: Assumed,
    names: Iterable[str],
    also: Mapping[str, str] = MappingProxyType({}),
    or_models: Iterable[Mapping[str, Any]] = (),
) -> Step:
    """The measured step; RowError for a time that no such device can have taken.

    `names` are the fields that tell rows apart, and `also` what is read out of several of them.
    `or_models` are model tables that the row's words may mean as well.
    """
    length = text.batch["sequence_length"]
    tokens = text.batch["micro_batch"] * text.batch.get("accumulation", 1) * length
    _possible(
        num_parameters(text.model, length), tokens / seconds, machine,
        eight_bits=bool(text.execution.get("float8")),
    )
    some_memory(record)
    unsaid(record, (name for name in names if name not in SAID_ELSEWHERE), assumed)
    unread(record, assumed)
    for words in whole_field(record):
        assumed.add(words)
    return Step(
        source=source,
        line=record.line,
        scenario=str(text),
        seconds=seconds,
        tokens=tokens,
        gpu=record.text("gpu"),
        nodes=machine.nodes,
        fields={**{name: record.text(name, "") for name in names}, **also},
        assumed=tuple(assumed.words),
        widened=assumed.widened,
        shared=assumed.shared,
        otherwise=(
            *(str(replace(text, cluster=other.table)) for other in machine.otherwise),
            *(str(replace(text, model=other)) for other in or_models),
        ),
    )


def sizes(record: Record, *names: str) -> dict[str, str]:
    """The model's sizes as parts of its field: another model is one change, also where it goes by
    the same name."""
    return {f"model.{name}": record.text(name, "") for name in names}


def feed_forward(record: Record, usual: int, *, is_said: bool) -> int:
    """The width of a gpt's feed-forward layers: the row's `d_ff`, else `usual`; RowError where that
    `is_said` otherwise and is another."""
    found = record.size("d_ff", usual)
    if is_said:
        said(record, "d_ff", usual, within=0.001)
    return found


def of_all_heads(record: Record, heads: int, assumed: Assumed) -> None:
    """Names `n_kv_heads` that are fewer than the heads of a gpt, which has keys and values for
    each."""
    if record.size("n_kv_heads", heads) != heads:
        count = record.size("n_kv_heads")
        if count > heads or heads % count:
            raise RowError(f"n_kv_heads: {count} does not divide n_heads = {heads}")
        assumed.add(f"keys and values of {heads} heads, where the row has {count}", widens=UNREAD)


def _possible(parameters: int, tokens_per_s: float, machine: Machine, *, eight_bits: bool) -> None:
    """RowError for more products than the device can do, or hardly any: a rate in another unit, or
    of all GPUs together."""
    device = load_device(machine.part.device)
    share = 6 * parameters * tokens_per_s / (device.float8 if eight_bits else device.bfloat16)
    if not SLOWEST <= share <= 1:
        found = f"{tokens_per_s:.4g} tokens a second of one GPU are {100 * share:.3g} % of its peak"
        raise RowError(f"{found}: another unit, or another number of GPUs")


def checkpointing(words: str, assumed: Assumed) -> dict[str, object]:
    """The table of a scenario for a source's words; RowError for others. A share or a number of
    blocks becomes every k-th."""
    lower = words.lower()
    tokens = re.findall(r"[a-z]+|\d+(?:\.\d+)?(?:\s*/\s*\d+)?", lower)
    if "sac" in tokens and tokens[0] not in FULL | NONE:
        tokens = ["selective", *(token for token in tokens if token != "sac")]
        if set(tokens[1:]) <= OF_BLOCKS:
            tokens.append(
                "op"
            )  # what torch calls selective activation checkpointing is a policy of ops
    first = tokens[0] if tokens else ""
    _one_answer(first, lower, words)
    if re.search(
        r"(?<!\w)[-\u2212\u2013]\s*\d", lower
    ):  # which the tokens would have as the number without its sign
        raise RowError(f"activation_checkpointing: expected no number below 0, found "
                       f"{words[:60]!r}")
    if first == "selective":
        return _selective(tokens[1:], words, assumed)
    if first in FULL or (first in ("every", "each", "all") and set(tokens) <= OF_BLOCKS):
        return {"mode": "full"}
    if first in NONE or tokens == ["0"]:
        return {}
    if first in ("p", "every") or first[:1].isdigit():
        return _selective(tokens, words, assumed)
    raise RowError(f"activation_checkpointing: not known: {words[:60]!r}")


OF_BLOCKS = frozenset(
    (
        *(
            "ac", "activation", "activations", "checkpointing", "checkpoint", "recompute",
            "recomputation",
        ),
        *("every", "each", "all", "of", "the", "layer", "layers", "block", "blocks", "default"),
    )
)
"""Words that say nothing more beside the first one."""
OF_OPS = frozenset(
    ("selective", "sac", "op", "ops", "per", "level", "policy", "based", "option", "mode")
)
"""And beside what torch's policy of ops is called."""
FULL, NONE = (
    frozenset(("full", "true", "yes", "on")), frozenset(("none", "false", "no", "off", "disabled")),
)
PARTLY = frozenset(
    (
        *(
            "selective", "sac", "partial", "partly", "except", "only", "some", "not", "without",
            "disabled", "half", "dynamic", "budget",
        ),
        *("second", "third", "other", "alternate", "nd", "rd", "th"),
    )
)
EVERY = {"other": "2", "alternate": "2", "second": "2", "third": "3", "fourth": "4"}
"""Words for every k-th block."""


def _one_answer(first: str, lower: str, words: str) -> None:
    """RowError where words for all blocks, or for none, go on to say something else; a remark in
    brackets may say what does not oppose."""
    if first not in FULL | NONE:
        return
    outside = (
        set(re.findall(r"[a-z]+|\d+", re.sub(r"\([^()]*\)", " ", lower)))
        - OF_BLOCKS
        - (FULL if first in FULL else NONE)
    )
    opposed = (PARTLY | (NONE if first in FULL else FULL)) & set(re.findall(r"[a-z]+", lower)) - {
        first
    }
    if outside or opposed or re.search(r"\bevery[^a-z0-9]*\d", lower):
        raise RowError(f"activation_checkpointing: expected one answer, found {words[:60]!r}")


def _selective(tokens: list[str], words: str, assumed: Assumed) -> dict[str, object]:
    if {"op", "ops"} & set(tokens):
        unknown = (
            set(re.findall(r"[a-z0-9]+", re.sub(r"\([^()]*\)", " ", words.lower())))
            - OF_BLOCKS
            - OF_OPS
        )
        if unknown:
            raise RowError(f"activation_checkpointing: expected selective op, found {words[:60]!r}")
        return {"mode": "selective", "save": ["linear", "attention"], "save_every": 2}
    numbers = [EVERY.get(token, token) for token in tokens if token in EVERY or token[0].isdigit()]
    if not numbers and not set(tokens) - {
        "ac", "activation", "checkpointing", "layer", "layers", "block", "blocks", "default"
    }:
        assumed.add("selective activation checkpointing recomputes every second block")
        return {"mode": "full", "every": 2}
    every = _every(numbers[0]) if len(numbers) == 1 else 0
    if not every:
        raise RowError(f"activation_checkpointing: expected selective op, a number of blocks or "
                       f"the share of them, found {words[:60]!r}")
    return {"mode": "full"} if every == 1 else {"mode": "full", "every": every}


def _every(number: str) -> int:
    """k for 1/k, k, or the share that is 1/k; 0 for a share that is not one block of several."""
    above, _, below = number.partition("/")
    share = (
        float(above) / float(below)
        if below and float(below)
        else float(above)
        if not below
        else 0.0
    )
    blocks = 1 / share if 0 < share < 1 else share
    return (
        round(blocks)
        if 1 <= blocks <= MAX_LAYERS and abs(blocks - round(blocks)) <= 0.02 * blocks
        else 0
    )
