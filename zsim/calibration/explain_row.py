"""What a row of measurements was taken for: a step's scenario, a collective's communicator, a
product's device; and what was assumed."""

from __future__ import annotations

import json
from typing import Any

from zsim.calibration.accuracy import cautions
from zsim.calibration.nccl_tests.rows import mapped, predict, question
from zsim.calibration.tables import NcclRow, Product, Row, Skipped, Step
from zsim.cluster.collectives.nccl.channel_search import RINGS_IN_NODE, nvls_graph
from zsim.cluster.collectives.nccl.estimate import Communicator
from zsim.cluster.collectives.nccl.tuner import Graph, System, bus_factor, choices
from zsim.io.units import format_time


def text(row: Row | Skipped, *, as_json: bool) -> str:
    """The row in words, or one JSON object, ending with a newline."""
    if isinstance(row, Skipped):
        return (
            json.dumps({"skipped": row.reason}) + "\n" if as_json else f"# skipped: {row.reason}\n"
        )
    found = of_row(row)
    if as_json:
        return json.dumps(found) + "\n"
    assumed = "".join(f"# assumed: {words}\n" for words in found["assumed"])
    said = (
        found["scenario"]
        if "scenario" in found
        else "".join(f"{key}: {value}\n" for key, value in found["taken_for"].items())
    )
    return f"# {row.source} line {row.line}, measured {found['measured']:.6g} s\n{assumed}{said}"


def of_row(row: Row) -> dict[str, Any]:
    """`measured` in seconds, `assumed`, and either the `scenario` or, in words, what it was
    `taken_for`."""
    if isinstance(row, Step):
        return {
            "scenario": row.scenario, "measured": row.seconds,
            "assumed": [*row.assumed, *cautions(row), *_wider(row)],
        }
    if isinstance(row, Product):
        return {"taken_for": _product(row), "measured": row.seconds, "assumed": list(row.assumed)}
    return {
        "taken_for": _collective(row), "measured": (row.microseconds or 0) / 1e6,
        "assumed": [*mapped(row).assumed, *row.cautions],
    }


def _wider(row: Step) -> tuple[str, ...]:
    return (f"so the band is {100 * row.widened:.0f} % wider on both sides",) if row.widened else ()


def _product(row: Product) -> dict[str, str]:
    m, n, k = row.shape
    return {
        "product": f"{m} x {k} times {k} x {n} in {row.dtype}",
        "device": f"preset {row.device}",
        "predicted": f"{row.predicted_s * 1e6:.4g} us",
        "band": " to ".join(f"{row.predicted_s * factor * 1e6:.4g} us" for factor in row.band),
    }


def _collective(row: NcclRow) -> dict[str, str]:
    found, apart = predict(question(row)), mapped(row)
    group = apart.communicator
    protocol, channels = _tuned(row, group, found.algorithm)
    nodes = "1 node" if group.num_nodes == 1 else f"{group.num_nodes} nodes"
    steps = 1.0 if row.collective == "broadcast" else bus_factor(row.collective, group.num_ranks)
    reached = steps * row.size_bytes / (1000 * found.microseconds)
    return {
        "collective": f"{row.collective} of {row.size_bytes:,} B over {group.num_ranks} ranks on "
                      f"{nodes}",
        "machine": f"{group.generation}, {group.links}, network {group.fabric}",
        "algorithm": found.algorithm,
        "protocol": protocol,
        "channels": str(channels),
        "links": f"{group.bus_gb_s:.6g} GB/s, what a ring has at its narrowest place",
        "bus bandwidth": f"{reached:.4g} GB/s reached, as nccl-tests counts: {steps:.6g} of the "
                         f"message in the predicted time",
        "provenance": found.provenance,
        "predicted": format_time(round(found.microseconds * 1000)),
        "band": " to ".join(format_time(round(end * 1000)) for end in (found.low, found.high)),
    }


def _tuned(row: NcclRow, group: Communicator, algorithm: str) -> tuple[str, int]:
    """The protocol that NCCL's tuner takes for this algorithm and size, and the channels of its
    search: one per NIC between nodes."""
    inside, between = RINGS_IN_NODE[group.generation][0], group.num_nodes > 1
    channels = group.per_node if between else inside
    rate = group.bus_gb_s / channels
    system = System(
        generation=group.generation, num_ranks=group.num_ranks, num_nodes=group.num_nodes,
        ring=Graph(channels=channels, intra=rate, inter=rate),
        nvls=nvls_graph(
            group.generation, per_node=group.per_node, inter_gb_s=group.bus_gb_s if between else 0.0
        ),
        processor=group.processor, links=group.links,
    )
    op = "all_gather" if row.collective == "broadcast" else row.collective
    tried = [one for one in choices(op, row.size_bytes, system) if one.algorithm == algorithm]
    best = min(tried, key=lambda one: one.time_us, default=None)
    if algorithm.startswith("nvls") and system.nvls:
        channels = system.nvls.channels
    return (best.protocol if best else "Simple"), channels
