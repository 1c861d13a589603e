"""The `faults` of a scenario as data, and the cluster with those of its links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, TypeGuard

from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.links import SlowRail
from zsim.engine.faults.fault import (
    AT_OPS,
    FAULT_KINDS,
    OF_RANKS,
    AtOp,
    Fault,
    LostLink,
    SlowLink,
)
from zsim.errors import ScenarioError, ZsimError
from zsim.io.units import format_rate, parse_rate, parse_time
from zsim.ir.mesh import Mesh
from zsim.scenario.checks.work_limits import SLOWEST


def made_faults(tables: Sequence[Any]) -> tuple[Fault, ...]:
    """The faults of tables that are held to their schemas; ScenarioError for a rate that is none.
    """
    return tuple(_fault(table, f"faults[{index}]") for index, table in enumerate(tables))


def _fault(table: Any, key: str) -> Fault:
    kind: Any = FAULT_KINDS[table.kind]
    values = {
        field.name: parse_time(getattr(table, field.name.removesuffix("_ns")))
        if field.name.endswith("_ns") else getattr(table, field.name)
        for field in fields(kind)
    }
    if kind is SlowLink:
        try:
            values["bandwidth"] = parse_rate(table.bandwidth)
        except ZsimError as error:
            raise ScenarioError((f"{key}.bandwidth: {error.complaint}",)) from None
    made: Fault = kind(**values)
    return made


def with_links(cluster: ClusterSpec, faults: Sequence[Fault]) -> ClusterSpec:
    """`cluster` with links that are slow or lost; ScenarioError for those that it does not have, or
    for faster ones."""
    slow, lost, problems = list[SlowRail](), list[tuple[int, int]](), list[str]()
    for index, fault in enumerate(faults):
        if isinstance(fault, SlowLink | LostLink):
            own = tuple(_link_problems(f"faults[{index}]", fault, cluster))
            problems += own
            if isinstance(fault, LostLink):
                lost.append((fault.node, fault.nic))
            else:
                slow.append(SlowRail(node=fault.node, nic=fault.nic, bandwidth=fault.bandwidth))
    places = [*lost, *((rail.node, rail.nic) for rail in slow)]
    if len(set(places)) < len(places):
        problems.append("faults: expected each link once, found one twice")
    if problems:
        raise ScenarioError(tuple(problems))
    return replace(cluster, slow_rails=tuple(slow), lost_rails=tuple(lost)) if places else cluster


def _link_problems(key: str, link: SlowLink | LostLink, cluster: ClusterSpec) -> Iterator[str]:
    limits = {"node": cluster.num_nodes, "nic": cluster.nics_per_node}
    for name, count in limits.items():
        if getattr(link, name) >= count:
            yield f"{key}.{name}: expected 0 to {count - 1}, found {getattr(link, name)}"
    most = cluster.links.rail.bandwidth
    if isinstance(link, SlowLink) and not parse_rate(SLOWEST) <= link.bandwidth < most:
        yield (
            f"{key}.bandwidth: expected {SLOWEST} to less than the others' {format_rate(most)}, "
            f"found {format_rate(link.bandwidth)}"
        )


def rank_problems(faults: Sequence[Fault], mesh: Mesh) -> Iterator[str]:
    """Faults of ranks that are not there, faults twice, and more than one jitter."""
    for index, fault in enumerate(faults):
        if isinstance(fault, OF_RANKS) and fault.rank >= mesh.world_size:
            yield (
                f"faults[{index}].rank: expected 0 to {mesh.world_size - 1}, found {fault.rank}"
            )
        if any(_is_alike(fault, earlier) for earlier in faults[:index]):
            yield f"faults[{index}]: expected each fault once, found {fault.kind} again"
            continue
        for earlier in faults[:index]:
            if _is_at(fault, earlier):
                yield (
                    f"faults[{index}]: expected a single fault at {fault.at} of rank {fault.rank}, "
                    f"found {fault.kind} after {earlier.kind}"
                )


def _is_alike(fault: Fault, other: Fault) -> bool:
    """True for two of a kind on the same rank, or at the same op of it."""
    if fault.kind != other.kind or isinstance(fault, SlowLink | LostLink):
        return False
    return all(
        getattr(fault, name, None) == getattr(other, name, None) for name in ("rank", "at")
    )


def _is_at(fault: Fault, other: Fault) -> TypeGuard[AtOp]:
    """True for faults of two kinds at one op, which is not there to be skipped and reordered."""
    return (
        isinstance(fault, AT_OPS) and isinstance(other, AT_OPS)
        and (fault.rank, fault.at) == (other.rank, other.at)
    )
