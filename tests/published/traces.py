"""The traced models of this folder: `python -m tests.published.traces` writes them anew.

A file has four layers. `whole` gives the model with as many as were trained: layers behind the
second are alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zsim.autograd.traced import traced_file
from zsim.autograd.traced.model import TracedModel

HERE = Path(__file__).parent
FEW = 4
FILES = {"torchtitan-micro-batch-2": 2, "nanotron-micro-batch-1": 1, "nanotron-micro-batch-2": 2}
"""Sequences per micro-batch, by name."""


def whole(name: str, *, num_layers: int) -> TracedModel:
    """The traced model in `name`.json with `num_layers` layers."""
    return traced_file.parse(
        more_layers(
            (HERE / f"{name}.json").read_text(encoding="utf-8"), num_layers=num_layers
        ).encode()
    )


def more_layers(text: str, *, num_layers: int) -> str:
    """A traced model of four layers as one of `num_layers`: the third stands for all but the first
    two and the last."""
    more = num_layers - FEW
    table = json.loads(re.sub(rf'"root\.{FEW}(?=[":])', f'"root.{num_layers}', text))
    for part in ("units", "modules"):
        before, first, second, middle, last, *after = table[part]
        middles = [_shifted(middle, by) for by in range(more + 1)]
        table[part] = [
            before, first, second, *middles, *(_shifted(row, more) for row in (last, *after))
        ]
    table["registered"] = list(_registered(table["registered"], more))
    return json.dumps(table)


def _registered(names: list[str], more: int) -> Iterator[str]:
    """The parameters as the module registers them: those of the third layer once for each that it
    stands for, in their turn."""
    layers = [re.match(r"layers\.(\d+)\.", name) for name in names]
    middle = [
        name
        for name, layer in zip(names, layers, strict=True)
        if layer and layer[1] == str(FEW - 2)
    ]
    for name, layer in zip(names, layers, strict=True):
        if layer is None or int(layer[1]) < FEW - 2:
            yield name
        elif layer[1] == str(FEW - 1):
            yield _shifted(name, more)
        elif name == middle[0]:
            yield from (_shifted(each, by) for by in range(more + 1) for each in middle)


def _shifted(row: Any, by: int) -> Any:
    """`row` with the layers' numbers higher by `by`."""
    return json.loads(
        re.sub(r"\blayers\.(\d+)", lambda found: f"layers.{int(found[1]) + by}", json.dumps(row))
    )


def trace(name: str, *, num_layers: int) -> TracedModel:
    """`name` traced, which needs torch."""
    import torch

    from tests.published.models import Nanotron, Sizes, Titan
    from zreal.tracing import trace as tracing

    rows, titan = FILES[name], name.startswith("torchtitan")
    length = 8192 if titan else 4096
    sizes = (
        Sizes(
            num_layers=num_layers, width=4096, heads=32, kv_heads=8, feed_forward=14336,
            vocabulary=128256,
        )
        if titan
        else Sizes(
            num_layers=num_layers, width=2048, heads=32, kv_heads=32, feed_forward=8192,
            vocabulary=131072,
        )
    )
    with torch.device("meta"):
        module = Titan(sizes, length) if titan else Nanotron(sizes)
    inputs = {"tokens": ((rows, length), "int64"), "labels": ((rows, length), "int64")}
    return tracing.trace(
        module, inputs, dtype="bfloat16", casts_input=titan, device="cuda", name=name
    )


if __name__ == "__main__":
    for file in FILES:
        traced_file.save(trace(file, num_layers=FEW), HERE / f"{file}.json")
