"""Layouts of a shaped network, read from text, and the cluster that predicts steps on one.

`4x1gbit` is four hosts on a bridge. In `4x1gbit,3=200mbit` the last of them has a slow link.
`2x2x1gbit/200mbit` is two nodes of two hosts, with a slower link between the nodes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.cluster_presets import load_cluster
from zsim.cluster.links import Link, Links, SlowRail
from zsim.cluster.measured_times import MeasuredTimes
from zsim.errors import ArgumentError

MOST_HOSTS = 64
RATES = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
LEAST_RATE, MOST_RATE = 10**6, 10**11
"""Bits/s of a link: below, a step takes minutes, and above no kernel shapes."""
PAYLOAD = 1448 / 1514
"""Share of a full Ethernet frame that TCP leaves for data, with its timestamps. A shaped link
counts all of the frame."""
_RATE = r"\d{1,9}(?:\.\d{1,9})?(?:kbit|mbit|gbit)"
_LAYOUT = re.compile(
    rf"(?:(?P<nodes>\d{{1,4}})x)?(?P<hosts>\d{{1,4}})x(?P<rate>{_RATE})"
    rf"(?:/(?P<uplink>{_RATE}))?(?P<slow>(?:,\d{{1,4}}={_RATE})*)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Hosts by node, bits/s of each host's link, and those between nodes; `uplink` is None where
    all hosts share a bridge."""

    text: str
    nodes: int
    hosts_per_node: int
    rates: tuple[int, ...]
    uplink: int | None = None

    @property
    def hosts(self) -> int:
        """The number of hosts, each of which runs one rank."""
        return self.nodes * self.hosts_per_node


def layout(text: str) -> Layout:
    """The layout that `text` describes; ArgumentError for anything else.

    >>> layout("4x1gbit,3=200mbit").rates
    (1000000000, 1000000000, 1000000000, 200000000)
    """
    match = _LAYOUT.fullmatch(text.strip()) if len(text) < 1000 else None
    if match is None or bool(match["nodes"]) != bool(match["uplink"]):
        raise _unfit("4x1gbit, 2x2x1gbit/200mbit or 4x1gbit,3=200mbit", text[:60])
    nodes, hosts = int(match["nodes"] or 1), int(match["hosts"])
    if nodes < 1 or hosts < 1 or not 2 <= nodes * hosts <= MOST_HOSTS:
        raise _unfit(f"2 to {MOST_HOSTS} hosts", f"{nodes * hosts}")
    rates = [_rate(match["rate"])] * (nodes * hosts)
    for part in match["slow"].split(",")[1:]:
        host, _, rate = part.partition("=")
        if int(host) >= len(rates):
            raise _unfit(f"hosts 0 to {len(rates) - 1}", f"host {int(host)}")
        rates[int(host)] = _rate(rate)
    uplink = _rate(match["uplink"]) if match["uplink"] else None
    return Layout(
        text=text.strip(), nodes=nodes, hosts_per_node=hosts, rates=tuple(rates), uplink=uplink
    )


def with_slow_hosts(plan: Layout, rates: Mapping[int, int]) -> Layout:
    """The layout with other bits/s on the links of some hosts.

    >>> with_slow_hosts(layout("4x1gbit"), {3: 200_000_000}).text
    '4x1gbit,3=200mbit'
    """
    slow = (f",{host}={f'{rate / 10**6:f}'.rstrip('0').rstrip('.')}mbit"
            for host, rate in rates.items())
    return layout("".join((plan.text, *slow)))


def _rate(text: str) -> int:
    bits = round(float(text[:-4]) * RATES[text[-4:]])
    if not LEAST_RATE <= bits <= MOST_RATE:
        raise _unfit("rates of 1mbit to 100gbit", text)
    return bits


def _unfit(expected: str, text: str) -> ArgumentError:
    return ArgumentError(where="testbed", expected=expected, found=text)


def cluster_on(
    plan: Layout, *, base: ClusterSpec | None = None, times: tuple[MeasuredTimes, ...] = ()
) -> ClusterSpec:
    """The cluster of ranks on the layout's hosts, one each; `times` of collectives over all of them
    replace closed forms.

    `base` has the constants of the host's own work, those of the preset by default.
    """
    base = base or load_cluster("cpu-gloo", nodes=1, ranks=plan.hosts)
    fastest = max(plan.rates)
    if plan.uplink is None:  # every host is a node of its own: its link is a rail
        nodes, per_node, rail, slow = plan.hosts, 1, fastest, enumerate(plan.rates)
    else:
        nodes, per_node, rail, slow = plan.nodes, plan.hosts_per_node, plan.uplink, enumerate(())
    links = Links(
        fabric=Link(bandwidth=_payload(fastest), latency=base.links.fabric.latency),
        pcie=base.links.pcie, host=base.links.host,
        rail=Link(bandwidth=_payload(rail), latency=base.links.rail.latency),
    )
    return replace(
        base, name=f"testbed {plan.text}", num_nodes=nodes, num_ranks=plan.hosts,
        devices_per_node=per_node, nics_per_node=1, links=links, times=times,
        slow_rails=tuple(
            SlowRail(node=host, nic=0, bandwidth=_payload(rate))
            for host, rate in slow if rate < fastest
        ),
    )


def _payload(bits_per_s: int) -> int:
    """Bytes/s of data on a link of `bits_per_s`."""
    return round(bits_per_s / 8 * PAYLOAD)
