"""Reference of scenario keys in Markdown, generated from the schema.

`python -m zsim.scenario.keys.reference > scenarios/README.md` writes it; a test holds the file to
it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from textwrap import fill
from typing import Any

from zsim.errors import listed
from zsim.models.families import FAMILIES
from zsim.scenario.expect import FIGURES
from zsim.scenario.keys.json_schema import json_schema, sizes_schema, strategy_schema
from zsim.strategies import STRATEGIES

PREFACE = '''\
# Scenarios

One TOML file is one whole experiment: nothing is inherited, and every default is below. A file's
name tells strategy, model, ranks, and what is special: `fsdp2-gpt-4-accumulate-last`.

```toml
description = "FSDP2, one group per block, four ranks: order, bytes, memory, numerics"
model     = { preset = "gpt-tiny" }
batch     = { micro_batch = 2, sequence_length = 64, accumulation = 1 }
cluster   = { preset = "cpu-gloo", ranks = 4 }
strategy  = { name = "fsdp2", dp_shard = 4, reshard_after_forward = "auto" }
precision = { parameters = "fp32", reduce = "fp32" }
optimizer = { name = "adamw", implementation = "foreach" }

[expect]
all_gathers = 9
peak_memory = "<= 40 MiB"
```

Quantities carry units: "80 GiB", "400 Gbit/s", "5 us", "10 %". Unknown keys are errors. An error
names file, key, what was expected, what was found, and what mends it. [schema.json](schema.json) is
the JSON Schema, for editors. From Python the same tables are dicts: `zsim.Scenario(model={…}, …)`.

`[expect]` is what a scenario asserts of its steady step. Each figure is compared with `<=`, `>=`,
`==`, `<` or `>`, and `zsim run` judges it. A whole number alone, of a count or of bytes, is an
equality. What a backend cannot see is unsupported, and fails nothing.

This page is generated: `python -m zsim.scenario.keys.reference > scenarios/README.md`.
'''

FAULTS = '''\
Each entry is one fault of the steady step, with its `kind` and that kind's keys:

```toml
[[faults]]
kind = "slow_rank"
rank = 2
factor = 1.5
```

A step with faults is simulated, and its Run says so: no comparison with it ever says "agrees". A
step that cannot end, after a `failure`, a skipped or reordered collective or over a lost link, is
an error that names who waits for whom. Where that is meant, `[expect]` says so with `ends = false`,
and `at_fault = 2` is the rank that must be named; `zsim run`, `zsim validate` and `pytest
scenarios/` judge both. `--save` then keeps the phases before that step, marked incomplete.

A link over which no collective goes is told in the Run's warnings, and an op that is not there is
refused. `zsim run --backend gloo` applies slow and late ranks, failures and skipped collectives to
real ranks, and `zsim validate --testbed` slow links too; the others are refused by name.

`zsim run --seeds 200`, and `zsim.jitter(scenario, seeds=200)`, tell mean and quantiles of a step
under jitter.
'''


def reference() -> str:
    """The page of all scenario keys."""
    return "\n".join([PREFACE, *_sections()]) + "\n"


def _sections() -> Iterator[str]:
    schema = json_schema()
    kinds, top = schema["$defs"], schema["properties"]
    scalars = {name: entry for name, entry in top.items() if "$ref" not in entry}
    del scalars["strategy"], scalars["expect"], scalars["faults"]
    yield from _table("Top level", "", scalars, kinds)
    for name, entry in top.items():
        if "$ref" in entry:
            kind = kinds[entry["$ref"].rpartition("/")[2]]
            yield from _table(name, kind.get("description", ""), kind["properties"], kinds, kind)
            if name == "model":
                yield from _family_sections()
        elif name == "strategy":
            yield from _strategy_sections()
        elif name == "faults":
            yield from _fault_sections(entry)
    rows = [f"| `{name}` | {figure.meaning} |" for name, figure in FIGURES.items()]
    yield "\n".join(["## expect\n", "| figure | meaning |", "|---|---|", *rows, ""])


def _family_sections() -> Iterator[str]:
    for family in FAMILIES:
        kind = sizes_schema(family)
        title = f'model.sizes of family "{family}"'
        yield from _table(title, "", kind["properties"], {}, kind)


def _strategy_sections() -> Iterator[str]:
    for name in STRATEGIES:
        kind = strategy_schema(name)
        own = {key: entry for key, entry in kind["properties"].items() if key != "name"}
        yield from _table(f'strategy, name = "{name}"', "", own, {}, kind)


def _fault_sections(faults: dict[str, Any]) -> Iterator[str]:
    yield f"## faults\n\n{FAULTS}"
    for kind in faults["items"]["oneOf"]:
        own = {key: entry for key, entry in kind["properties"].items() if key != "kind"}
        title = f'faults, kind = "{kind["properties"]["kind"]["const"]}"'
        yield from _table(title, kind["description"], own, {}, kind)


def _table(
    title: str, meaning: str, entries: dict[str, Any], kinds: dict[str, Any],
    kind: dict[str, Any] | None = None,
) -> Iterator[str]:
    required = (kind or {}).get("required", ())
    lines = [f"## {title}\n", *([fill(meaning, 100) + "\n"] if meaning else [])]
    header = ["| key | values | default | meaning |", "|---|---|---|---|"]
    lines += header if entries else ["No keys."]
    for key, entry in entries.items():
        default = "required" if key in required else _toml(entry.get("default"))
        about = entry.get("description", "")
        lines.append(f"| `{key}` | {_values(entry, kinds)} | {default} | {about} |")
    yield "\n".join([*lines, ""])


def _values(entry: dict[str, Any], kinds: dict[str, Any]) -> str:
    """The values that a key may have."""
    if "$ref" in entry:
        kind = kinds[entry["$ref"].rpartition("/")[2]]
        return f"table of {', '.join(kind['properties'])}"
    if "anyOf" in entry:
        return listed(
            dict.fromkeys(
                _values(kind, kinds) for kind in entry["anyOf"] if kind.get("type") != "null"
            )
        )
    if "enum" in entry or "const" in entry:
        return ", ".join(_toml(value) for value in entry.get("enum") or [entry["const"]])
    if entry.get("type") == "array":
        return f"list of {_values(entry['items'], kinds)}"
    text = {
        "string": "text", "integer": "whole number", "number": "number", "boolean": "true, false",
        "object": "table",
    }[entry["type"]]
    low, high = entry.get("minimum"), entry.get("maximum")
    if low is None:
        return text
    return f"{text}, {low:,} to {high:,}" if high is not None else f"{text}, at least {low:,}"


def _toml(value: object) -> str:
    if value is None or value in ("", [], {}):
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


if __name__ == "__main__":
    sys.stdout.write(reference())
