"""Topology for the page: devices, switches and NICs with their places, the mesh laid over them, and
the traffic of a step on each link.

Traffic is that of rings (`zsim.cluster.ring_hops`), which carry what `Costs.bytes_sent` says. Trees
and NVLS send less over some links; the page says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.ring_hops import hops
from zsim.cluster.routes import device_name, graph
from zsim.engine.costs.op_costs import Costs
from zsim.io.units import counted
from zsim.ir.mesh import AXES, Mesh
from zsim.ir.ops import COLLECTIVES
from zsim.ir.program import Program
from zsim.report.sides import SimulatedStep
from zsim.report.timeline_tables import Table
from zsim.scenario.scenario import Scenario

MOST_NODES, MOST_DEVICES = 4, 32
"""Nodes and devices of a node that are drawn; rings go over these, with the bytes of the whole."""
WIDTH = 100.0
"""Width of a node in the drawing's own unit."""
HEIGHTS = {"switch": 0.0, "device": 26.0, "pcie": 52.0, "host": 66.0, "nic": 78.0, "rail": 108.0}
"""Rows of the drawing by kind of part, from the top."""

Traffic = dict[tuple[str, str], Counter[str]]
"""Bytes by directed link and group."""


def topology(step: SimulatedStep) -> Table:
    """Parts with places, links with traffic, and the coordinates of each device in the mesh."""
    scenario = step.scenario
    cluster = scenario.cluster
    shown = [
        rank for rank in range(scenario.world_size)
        if cluster.node_of(rank) < MOST_NODES and rank % cluster.devices_per_node < MOST_DEVICES
    ]
    parts = graph(cluster, devices=shown)
    carried = traffic(step.program, scenario, shown)
    links = []
    for source, target, about in parts.edges(data=True):
        ways = [carried.get(pair, Counter()) for pair in ((source, target), (target, source))]
        busiest = max(ways, key=lambda way: sum(way.values()))
        nbytes = round(sum(busiest.values()))
        links.append({
            "ends": [source, target], "kind": about["link"], "bandwidth": about["bandwidth"],
            "bytes": nbytes, "by_group": {name: round(size) for name, size in busiest.items()},
            "busy": nbytes / about["bandwidth"] * 1e9 / max(1, step.timeline.step_time_ns),
        })
    left = scenario.world_size - len(shown)
    return {
        "parts": list(_parts(cluster, scenario.mesh, list(parts), shown)), "links": links,
        "axes": [[axis, getattr(scenario.mesh, axis)] for axis in AXES],
        "left_out": f"{counted(left, 'more rank')} not drawn" if left else "",
        "algorithms": _algorithms(step),
    }


def traffic(program: Program, scenario: Scenario, shown: list[int]) -> Traffic:
    """Bytes of the steady step on each link between the ranks `shown`, in each direction."""
    costs = Costs(cluster=scenario.cluster, execution=scenario.executed)
    carried: Traffic = {}
    for group, members in _rings(program, shown):
        size = program.mesh.size(group)
        for hop in hops(scenario.cluster, members):
            position = program.mesh.position(group, hop.source)
            sent = sum(
                costs.bytes_sent(op.kind, op.nbytes, group_size=size, rank=position, root=op.root)
                for op in program.of_rank(hop.source).steady
                if op.kind in COLLECTIVES and op.group == group
            )
            for use in hop.uses:
                carried.setdefault(use.link, Counter())[group] += sent * use.part  # type: ignore[assignment]
    return carried


def _rings(program: Program, shown: list[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Groups by name with their members among `shown`, where these are several."""
    names = dict.fromkeys(
        op.group for rank in program.ranks for op in rank.steady if op.kind in COLLECTIVES
    )
    drawn = set(shown)
    for name in names:
        known: set[int] = set()
        for rank in shown:
            if rank not in known:
                members = program.mesh.group(name, rank)
                known.update(members)
                ring = tuple(member for member in members if member in drawn)
                if len(ring) > 1:
                    yield name, ring


def _algorithms(step: SimulatedStep) -> list[list[str]]:
    """Each group's collectives with the algorithm that times them, and their number."""
    scenario, program = step.scenario, step.program
    costs = Costs(cluster=scenario.cluster, execution=scenario.executed)
    counts: Counter[tuple[str, str, str]] = Counter()
    rank = min(step.timeline.ranks)
    for op in program.of_rank(rank).steady:
        if op.kind in COLLECTIVES and program.mesh.size(op.group) > 1:
            members = program.mesh.group(op.group, rank)
            counts[op.group, op.kind, costs.algorithm(op.kind, op.nbytes, members)] += 1
    return [[group, kind, name, f"{number:,}"] for (group, kind, name), number in counts.items()]


def _parts(
    cluster: ClusterSpec, mesh: Mesh, names: list[str], shown: list[int]
) -> Iterator[Table]:
    """Each part with its kind and place; a device also has its rank and coordinates."""
    ranks = {device_name(cluster, rank): rank for rank in shown}
    rows: dict[tuple[int, str], list[str]] = {}
    for name in names:
        rows.setdefault((_node(name), _kind(name)), []).append(name)
    nodes = 1 + max(_node(name) for name in names)
    for (node, kind), row in rows.items():
        row.sort(key=_number)
        left, width = (node * WIDTH, WIDTH) if node >= 0 else (0.0, nodes * WIDTH)
        for index, name in enumerate(row):
            part: Table = {
                "name": name, "kind": kind, "y": HEIGHTS[kind],
                "x": round(left + width * (index + 0.5) / len(row), 2),
            }
            if name in ranks:
                rank = ranks[name]
                part |= {"rank": rank, "coordinate": list(mesh.coordinate(rank))}
            yield part


def _node(name: str) -> int:
    """The node of a part; -1 for a rail's switch, which belongs to none."""
    first, dot, _ = name.partition(".")
    return int(first.removeprefix("node")) if dot else -1


def _kind(name: str) -> str:
    kind = name.partition(".")[2].rstrip("0123456789") or "rail"
    return "device" if kind in ("gpu", "cpu") else kind


def _number(name: str) -> int:
    digits = name[len(name.rstrip("0123456789")):]
    return int(digits or 0)
