"""The command list: names of scenarios, presets, strategies and backends."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from importlib.resources import files as files_of
from pathlib import Path

from zsim.cli import terminal
from zsim.cli.options.setup import LISTS
from zsim.errors import ScenarioError, shown
from zsim.scenario.keys.json_schema import json_schema
from zsim.scenario.keys.options import strategy_table
from zsim.scenario.scenario import load


def run(options: argparse.Namespace) -> int:
    """`zsim list`: names, one per line, with a word on each; without a name of a list, all."""
    if options.what == "schema":
        terminal.write_json(json_schema())
        return 0
    chosen = [options.what] if options.what else list(LISTINGS)
    lists = {kind: list(LISTINGS[kind]()) for kind in chosen}
    if not options.json and "scenarios" in lists:
        head = f"{_shipped()}{os.sep}"
        if any(name.startswith(head) for name, _ in lists["scenarios"]):
            rows = [(name.removeprefix(head), about) for name, about in lists.pop("scenarios")]
            lists = {f"scenarios, in {head.rstrip(os.sep)}": rows, **lists}
    terminal.print_lists(lists, as_json=options.json)
    return 0


Row = tuple[str, str]


def _shipped() -> Path:
    """The folder of the scenarios that come with zsim."""
    return Path(str(files_of("zsim") / "presets" / "scenarios")).resolve()


def _scenarios() -> Iterator[Row]:
    """Files of the folder scenarios where there is one, else those that come with zsim."""
    folder = Path("scenarios") if any(Path("scenarios").rglob("*.toml")) else _shipped()
    for path in sorted(folder.rglob("*.toml")):
        try:
            yield str(path), load(path).description
        except ScenarioError as error:
            yield str(path), f"not usable: {error.problems[0]}"


def _models() -> Iterator[Row]:
    from zsim.models import families  # only `zsim list models` needs the sources

    for name in families.presets():
        preset, spec = families.preset(name), families.load_preset(name)
        at = (
            f" at a sequence length of {families.LISTED_LENGTH:,}, whose positions are learned"
            if preset.has_open_positions
            else ""
        )
        yield name, f"{spec.num_parameters:,} parameters{at}; {preset.source}"


def _clusters() -> Iterator[Row]:
    from zsim.cluster import cluster_presets

    for name in cluster_presets.clusters():
        yield name, cluster_presets.load_cluster(name).description


def _devices() -> Iterator[Row]:
    from zsim.cluster.devices import devices, load_device

    for name in devices():
        device = load_device(name)
        node = f", in {device.node}" if device.node else ""
        if device.runtime is not None:  # a core of a CPU is no device to choose
            yield name, f"{device.name}, {device.bfloat16 / 1e12:,.0f} TFLOP/s in bf16{node}"


def _strategies() -> Iterator[Row]:
    from zsim.strategies import STRATEGIES

    for name in STRATEGIES:
        keys = [
            key if field.default is None else f"{key} = {shown(field.default)}"
            for key, field in strategy_table(name).model_fields.items() if key != "name"
        ]
        yield name, ", ".join(keys) or "no keys, for one rank alone"


def _backends() -> Iterator[Row]:
    from zsim.runs import registry

    yield from registry.names().items()


LISTINGS: dict[str, Callable[[], Iterator[Row]]] = dict(zip(
    LISTS, (_scenarios, _models, _clusters, _devices, _strategies, _backends), strict=True
))
