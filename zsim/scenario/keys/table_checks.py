"""The tables of a scenario file held to its schema, key by key, and what is wrong with them in the
scenario's words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from zsim.errors import shown
from zsim.ir.mesh import AXES, RESERVED_AXES
from zsim.scenario.keys.did_you_mean import did_you_mean
from zsim.scenario.keys.schema import SCENARIO, strategy_table
from zsim.scenario.keys.table import Table, UnsureError
from zsim.strategies import STRATEGIES

FILES = ("model.huggingface", "model.traced", "cluster.file")
"""The keys that name files, which have keys of their own."""


def validated(table: Table, given: object, *, prefix: str, problems: list[str]) -> Any:
    """The `table` that is `given`, or None after adding one line per bad key to `problems`."""
    with suppress(UnsureError):
        return table.taken(given)
    from zsim.scenario.keys import complaints  # start-up: tables without mistakes need no pydantic

    return complaints.validated(table, given, prefix=prefix, problems=problems)


def parts(table: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Each top-level key of a scenario by itself, None where it is missing or wrong; `problems`
    gets one line per bad key.

    One key's mistake hides no other's.
    """
    known = SCENARIO.keys
    with suppress(UnsureError):  # a table without a mistake is held to the schema at once
        whole = SCENARIO.taken(table)
        return {name: getattr(whole, name) for name in known}
    problems += [
        f"{str(key)[:100]}: unknown key{did_you_mean(str(key), known)}"
        for key in table
        if key not in known
    ]
    tables: dict[str, Any] = {}
    for name, key in known.items():
        entry = {name: table[name]} if name in table else {}
        alone = Table(f"scenario's {name}", None, {name: key})
        checked = validated(alone, entry, prefix="", problems=problems)
        tables[name] = None if checked is None else getattr(checked, name)
    return tables


def each_key_once(problems: Iterable[str]) -> tuple[str, ...]:
    """The first complaint about each key; of a key that names a file, all about that file's own
    keys."""
    first: dict[str, str] = {}
    for problem in problems:
        key = problem.partition(": ")[0]
        first.setdefault(problem if key in FILES else key, problem)
    return tuple(first.values())


def strategy_of(table: object, problems: list[str]) -> Any:
    """The `strategy` table as its own schema, or None after adding what is wrong to `problems`."""
    if not isinstance(table, dict):
        return None
    reserved = [axis for axis in RESERVED_AXES if axis in table]
    problems += [
        f"strategy.{axis}: tensor and pipeline parallelism are not modelled yet"
        for axis in reserved
    ]
    name = table.get("name")
    if not isinstance(name, str) or name not in STRATEGIES:
        actual = "nothing" if name is None else shown(name)
        hint = did_you_mean(name, list(STRATEGIES)) if isinstance(name, str) else ""
        problems.append(f"strategy.name: expected one of {', '.join(STRATEGIES)}, found "
                        f"{actual}{hint}")
        return None
    elsewhere = STRATEGIES[name].elsewhere
    problems += [f"strategy.{key}: {elsewhere[key]}" for key in table if key in elsewhere]
    rest = {
        key: value
        for key, value in table.items()
        if key not in (*reserved, *elsewhere) and not _idle(name, key, value)
    }
    return validated(strategy_table(name), rest, prefix="strategy", problems=problems)


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
        f"{key}.kind: expected one of {', '.join(FAULT_TABLES)}, found {actual}{hint}"
    )
    return None


def _idle(name: str, key: str, value: object) -> bool:
    """True where `key` is a mesh axis of size 1 that the strategy does not use."""
    return (
        key in AXES and key not in STRATEGIES[name].axes and value == 1 and isinstance(value, int)
    )
