"""Faults of scenarios against what a backend, or an analysis, can do with them: the rest is refused
by name."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.cluster.testbed import Layout, with_slow_hosts
from zsim.engine.faults.fault import SlowLink
from zsim.errors import ArgumentError, BackendUnavailableError, listed
from zsim.scenario.scenario import Scenario

REASONS = {
    "jitter": "real steps have a jitter of their own",
    "reordered_collective": "torch issues a strategy's collectives in an order of its own",
    "slow_link": "`zsim validate --testbed` shapes links of real ranks",
    "lost_link": "no link of real ranks is cut",
}
"""The reason why real ranks cannot have a fault of a kind that the simulator knows."""


def require(scenario: Scenario, kinds: Sequence[str], *, backend: str) -> None:
    """BackendUnavailableError for the first fault that is of none of the `kinds` that ranks of the
    backend can have."""
    for number, fault in enumerate(scenario.faults):
        if fault.kind not in kinds:
            reason = REASONS.get(fault.kind, "ranks over gloo have it, started by zsim itself")
            raise BackendUnavailableError(
                where=f"{scenario.name}: faults[{number}].kind",
                expected=f"a fault that ranks of {backend} can have ({listed(kinds)})",
                found=fault.kind, remedy=f"{reason}; the backend sim has all of them",
            )


def on_testbed(scenario: Scenario, testbed: Layout) -> Layout:
    """The testbed with the scenario's slow links, each on the host of the one rank that its NIC
    serves; BackendUnavailableError for a link that no host alone has."""
    cluster, rates = scenario.cluster, dict[int, int]()
    if testbed.hosts != scenario.world_size:
        return testbed  # which is refused where its links are measured
    for number, fault in enumerate(scenario.faults):
        if isinstance(fault, SlowLink):
            ranks = [*cluster.ranks_at(fault.node, fault.nic)]
            bits = 8 * fault.bandwidth
            if len(ranks) != 1 or testbed.uplink is not None:
                raise BackendUnavailableError(
                    where=f"{scenario.name}: faults[{number}]",
                    expected="a link of one rank alone, as hosts on one bridge have",
                    found=f"one of ranks {ranks}, on {testbed.text}",
                )
            if bits >= testbed.rates[ranks[0]]:
                raise BackendUnavailableError(
                    where=f"{scenario.name}: faults[{number}].bandwidth",
                    expected=f"a slower link than on {testbed.text}", found=str(fault),
                )
            rates[ranks[0]] = bits
    return with_slow_hosts(testbed, rates)


def require_none(scenario: Scenario, *, purpose: str) -> None:
    """ArgumentError for a scenario with faults but slow links, where `purpose` is about clean
    steps."""
    for fault in scenario.faults:
        if not isinstance(fault, SlowLink):
            raise ArgumentError(
                where=f"{scenario.name}: faults", expected=f"none for {purpose}, or slow links",
                found=fault.kind,
                remedy="leave it out: scenario.with_(faults=None), or a file without it",
            )
