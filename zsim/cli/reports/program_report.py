"""The head of a scenario's plan for people: model, cluster, mesh, strategy, and the routes of its
groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from zsim.io.units import counted, format_rate, format_time
from zsim.ir.program import Program
from zsim.scenario.scenario import Scenario

if TYPE_CHECKING:
    from zsim.cluster.routes import GroupRoutes


def show_head(scenario: Scenario, program: Program) -> dict[str, str]:
    """The head of `zsim show`: name, model, cluster, mesh, strategy and rank programs."""
    model = scenario.model
    allocator = {"allocator": "expandable_segments:True"} if scenario.expandable_segments else {}
    return {
        "scenario": scenario.name,
        "description": scenario.description,
        "model": f"{model.name}, {model.num_parameters:,} parameters, {len(model.units)} units",
        "cluster": f"{scenario.cluster.name}, {counted(scenario.cluster.num_ranks, 'rank')}",
        "mesh": str(program.mesh).removeprefix("mesh "),
        "strategy": f"{scenario.strategy}{_options(scenario)}",
        "rank programs": f"{len(program.ranks)} distinct, {len(program.ranks[0].steady):,} ops in "
                         f"rank 0's steady step",
        **allocator,
    }


def route_rows(ways: Sequence[GroupRoutes]) -> list[tuple[str, str]]:
    """Rows with the hops of each group that communicates: the links, the narrowest, and its time.
    """
    rows: list[tuple[str, str]] = []
    for way in ways:
        for hop in way.hops:
            ring = (
                f" (ring {format_rate(way.ring_bytes_per_s)})"
                if hop is way.hops[-1] and way.ring_bytes_per_s != hop.bytes_per_s
                else ""
            )
            link = f"{hop.narrowest} {format_rate(hop.bytes_per_s)}{ring}"
            text = f"{_parts(hop.parts)}, {link}, {format_time(hop.latency_ns)}"
            rows.append((f"  {way.group}" if hop is way.hops[0] else "", text))
    return rows


def _parts(parts: Sequence[str]) -> str:
    """The parts of a route, a node by name only where it is another than that before."""
    names, node = [], "node0"
    for part in parts:
        own, _, name = part.rpartition(".")
        names.append(name if own in ("", node) else part)
        node = own or node
    return " → ".join(names)


def _options(scenario: Scenario) -> str:
    return "".join(
        f", {option.name} = {getattr(scenario.options, option.name)}"
        for option in fields(scenario.options)
    )
