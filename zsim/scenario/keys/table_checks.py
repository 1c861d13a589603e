"""The tables of a scenario file held to its schema, key by key, and what is wrong with them in the
scenario's words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel, ValidationError, create_model

from zsim.errors import ZsimError, key_of, listed, shown
from zsim.io import pydantic_words
from zsim.ir.mesh import AXES, RESERVED_AXES
from zsim.scenario.keys.foreign_keys import FOREIGN_KEYS, SHARED_MODELS
from zsim.scenario.keys.options import strategy_table
from zsim.scenario.keys.table import Table
from zsim.scenario.keys.tables import ScenarioTable
from zsim.strategies import STRATEGIES

OTHER_TOOLS = {
    "param_dtype": "parameters", "reduce_dtype": "reduce", "lr": "learning_rate",
    "batch_size": "micro_batch", "seq_len": "sequence_length", "max_grad_norm": "clip_norm",
    "gradient_accumulation_steps": "accumulation", "fully_shard": "fsdp2",
    "FullyShardedDataParallel": "fsdp1", "DistributedDataParallel": "ddp",
    "hybrid_shard": "hsdp", "HYBRID_SHARD": "hsdp", "NO_SHARD": "ddp", "none": "single",
}
"""Keys and strategies of scenarios by the names that other tools have for them."""
EXAMPLES = {
    "model": '{ preset = "llama-3-8b" }', "cluster": '{ preset = "dgx-h100" }',
    "batch": "{ micro_batch = 1 }",
    "strategy": '{ name = "fsdp2" }', "activation_checkpointing": '{ mode = "full" }',
}
"""A table in place of the text or the flag that people write there first."""
FILES = ("model.huggingface", "model.traced", "cluster.file")
"""The keys that name files, which have keys of their own."""


def validated(schema: type[BaseModel], table: object, *, prefix: str, problems: list[str]) -> Any:
    """`table` as `schema`, or None after adding one line per bad key to `problems`."""
    try:
        return schema.model_validate(_frozen(table))
    except ValidationError as error:
        items: dict[str, list[Any]] = {}
        for item in error.errors(include_url=False):
            key = _written([*([prefix] if prefix else []), *_path(table, item)])
            items.setdefault(key, []).append(item)
        for key, alike in items.items():
            if not any(other.startswith((f"{key}.", f"{key}[")) for other in items):
                complaints = [
                    _complaint(schema, item, _path(table, item), alone=len(alike) == 1)
                    for item in alike
                ]
                problems.append(f"{key}: {FOREIGN_KEYS.get(key) or _joined(complaints)}")
    return None


@cache
def _one_key(name: str) -> type[BaseModel]:
    """The schema of a scenario that has the key `name` only."""
    field = ScenarioTable.model_fields[name]
    own: dict[str, Any] = {name: (field.annotation, field)}
    return create_model(f"scenario's {name}", __base__=Table, **own)


def parts(table: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Each top-level key of a scenario by itself, None where it is missing or wrong; `problems`
    gets one line per bad key.

    One key's mistake hides no other's.
    """
    known = ScenarioTable.model_fields
    with suppress(ValidationError):  # a table without a mistake is held to the schema at once
        whole = ScenarioTable.model_validate(_frozen(table))
        return {name: getattr(whole, name) for name in known}
    problems += [
        f"{str(key)[:100]}: "
        + FOREIGN_KEYS.get(str(key), f"unknown key{did_you_mean(str(key), known)}")
        for key in table
        if key not in known
    ]
    tables: dict[str, Any] = {}
    for name in known:
        entry = {name: table[name]} if name in table else {}
        checked = validated(_one_key(name), entry, prefix="", problems=problems)
        tables[name] = None if checked is None else getattr(checked, name)
    return tables


def _frozen(value: object) -> object:
    """Lists as tuples, so that the frozen schema can take them."""
    if isinstance(value, dict):
        return {key: _frozen(inner) for key, inner in value.items()}
    return tuple(_frozen(inner) for inner in value) if isinstance(value, list) else value


def _joined(complaints: list[str]) -> str:
    """One complaint of the several that a value of no allowed type gives."""
    heads = dict.fromkeys(
        head for complaint in complaints
        for head in complaint.split(", found ")[0].removeprefix("expected ").split(" or ")
    )
    if len(complaints) == 1:
        return complaints[0]
    return f"expected {listed(heads)}, found {complaints[0].partition(', found ')[2]}"


def _complaint(
    schema: type[BaseModel], item: Any, path: Sequence[str | int], *, alone: bool
) -> str:
    """The complaint about the value at `path`; not `alone`: other types are allowed as well."""
    if item["type"] == "extra_forbidden":
        return f"unknown key{did_you_mean(str(path[-1]), _names_at(schema, path[:-1]))}"
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, ZsimError):
        return cause.complaint
    expected = pydantic_words.expected_text(
        item, table="a table, { key = value }", alone=alone
    )
    remedy = pydantic_words.remedy_text(item)
    if item["type"] in ("model_type", "dict_type") and path and path[-1] in EXAMPLES:
        remedy = f"write {path[-1]} = {EXAMPLES[str(path[-1])]}"
    if item["type"] == "missing" and len(path) == 1 and path[0] in EXAMPLES:
        expected = f"a table, as {path[0]} = {EXAMPLES[str(path[0])]}"
    complaint = f"expected {expected}, found {pydantic_words.found_text(item)}"
    return f"{complaint}; {remedy}" if remedy else complaint


def _path(table: object, item: Any) -> list[str | int]:
    """The keys and indices that lead to the value. Parts of the location that name the variant of
    a union are in no table, and left out."""
    path: list[str | int] = []
    value, missing = table, item["type"] == "missing"
    for at, part in enumerate(item["loc"], start=1):
        is_key = isinstance(value, dict) and part in value
        if is_key or (isinstance(value, list | tuple) and isinstance(part, int)):
            value = value[part]  # type: ignore[index]
            path.append(part)
        elif missing and at == len(item["loc"]):
            path.append(part)
    return path


def _written(path: Sequence[str | int]) -> str:
    """A path as people write it: faults[0].node."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:100]}" for part in path)
    return text.removeprefix(".")


def _names_at(schema: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """The keys that the table at `path` may have."""
    for name in (part for part in path if isinstance(part, str)):
        field = schema.model_fields.get(name)
        inner = None if field is None else _table_in(field.annotation)
        if inner is None:
            return []
        schema = inner
    return list(schema.model_fields)


def _table_in(annotation: Any) -> type[BaseModel] | None:
    """The schema of the table that a key may be, or each entry of its list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    tables = (_table_in(inner) for inner in get_args(annotation))
    return next((table for table in tables if table is not None), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a complaint about `word`: the nearest of the `known` words, or all of them."""
    alike = {str(name).lower(): name for name in known}
    near = difflib.get_close_matches(OTHER_TOOLS.get(word, word).lower(), alike, n=1)
    if near:
        return f", did you mean {alike[near[0]]}?"
    return f"; known are {listed(known, 'and')}" if known else ""


def each_key_once(problems: Iterable[str]) -> tuple[str, ...]:
    """The first complaint about each key; of a key that names a file, all about that file's own
    keys."""
    first: dict[str, str] = {}
    for problem in problems:
        key = key_of(problem)
        first.setdefault(problem if key in FILES else key, problem)
    return tuple(first.values())


def strategy_of(table: object, problems: list[str]) -> Any:
    """The `strategy` table as its own schema, or None after adding what is wrong to `problems`."""
    if not isinstance(table, dict):
        return None
    reserved = [axis for axis in RESERVED_AXES if axis in table]
    problems += [
        f"strategy.{axis}: {SHARED_MODELS}"
        for axis in reserved
    ]
    name = table.get("name")
    if not isinstance(name, str) or name not in STRATEGIES:
        actual = "nothing" if name is None else shown(name)
        hint = did_you_mean(name, list(STRATEGIES)) if isinstance(name, str) else ""
        near = hint.partition("; known are")[0]
        problems.append(f"strategy.name: expected {listed(STRATEGIES)}, found "
                        f"{actual}{near}")
        return None
    schema = strategy_table(name)
    used = {key: value for key, value in table.items() if not _idle(name, key, value)}
    others = [key for key in used if key not in schema.model_fields]
    elsewhere = {**_of_other_strategies(others), **STRATEGIES[name].elsewhere}
    problems += [f"strategy.{key}: {elsewhere[key]}" for key in table if key in elsewhere]
    rest = {key: value for key, value in used.items() if key not in (*reserved, *elsewhere)}
    return validated(schema, rest, prefix="strategy", problems=problems)


def _of_other_strategies(keys: Iterable[str]) -> dict[str, str]:
    """Refusals of the `keys` that other strategies have as options, which name these."""
    owners = {
        key: [name for name in STRATEGIES if key in strategy_table(name).model_fields]
        for key in keys
        if f"strategy.{key}" not in FOREIGN_KEYS
    }
    return {
        key: f"an option of {listed(names, 'and')} alone" for key, names in owners.items() if names
    }


def faults_of(entries: Sequence[Any] | None, problems: list[str]) -> list[Any] | None:
    """Each entry of `faults` as the schema of its kind; None after adding what is wrong to
    `problems`."""
    tables = [
        _fault_of(entry, f"faults[{index}]", problems) for index, entry in enumerate(entries or ())
    ]
    return None if entries is None or None in tables else tables


def _fault_of(entry: Any, key: str, problems: list[str]) -> Any:
    from zsim.scenario.keys.fault_tables import FAULT_TABLES  # start-up: few scenarios have faults

    kind = entry.get("kind")
    if isinstance(kind, str) and kind in FAULT_TABLES:
        return validated(FAULT_TABLES[kind], entry, prefix=key, problems=problems)
    actual = "nothing" if kind is None else shown(kind)
    near = difflib.get_close_matches(kind, FAULT_TABLES, n=1) if isinstance(kind, str) else []
    hint = f", did you mean {near[0]}?" if near else ""
    problems.append(
        f"{key}.kind: expected {listed(FAULT_TABLES)}, found {actual}{hint}"
    )
    return None


def _idle(name: str, key: str, value: object) -> bool:
    """True where `key` is a mesh axis of size 1 that the strategy does not use."""
    return (
        key in AXES and key not in STRATEGIES[name].axes and value == 1 and isinstance(value, int)
    )
