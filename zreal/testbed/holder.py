"""The process that holds a testbed: all hosts are network namespaces of which it has descriptors.

Nothing is named outside of it, so that all of it vanishes when this process ends, however it ends.
It ends with its standard input, which its controller holds, and by a signal with that controller.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

from zreal.testbed.namespaces import (
    CLONE_NEWNET,
    CLONE_NEWUSER,
    INTERFACE,
    LIBC,
    PR_SET_PDEATHSIG,
    enter,
    unshare,
)

PR_SET_DUMPABLE = 4
"""prctl option without which ranks of the same user may not open this process's descriptors."""
IN_FLIGHT = "50ms"
"""Data that a link queues before it drops, in time."""
BURST_S = 0.0005
LEAST_BURST = 40_000
"""Burst of a link's bucket: half a millisecond of its rate, and no less than two super-packets."""
SUPER_PACKET = "16384"
"""Most bytes that the kernel hands over as one packet. One larger than a burst would be cut into
frames, which costs two cores more time than their links take."""


def main() -> None:
    """Read the plan from the first line of standard input, build it, answer with descriptors, and
    wait for the end of the input."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    plan = json.loads(sys.stdin.readline())
    try:
        answer: dict[str, object] = {"hosts": _build(**plan)}
    except (OSError, subprocess.CalledProcessError) as error:
        stderr = getattr(error, "stderr", None)
        answer = {"error": (stderr.strip() if stderr else str(error))[:300]}
    sys.stdout.write(json.dumps(answer | {"pid": os.getpid()}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


def _build(rates: list[int], hosts_per_node: int, uplink: int | None) -> list[int]:
    """Make the hosts; returns their namespaces' descriptors in this process."""
    _isolate()
    outside, hosts = _namespace(), []
    num_nodes = -(-len(rates) // hosts_per_node)
    for node in range(num_nodes):
        _run("ip", "link", "add", f"node{node}", "type", "bridge", "forward_delay", "0")
        _run("ip", "link", "set", f"node{node}", "up")
    for node in range(1, num_nodes if uplink is not None else 0):
        ends = f"up{node}", f"down{node}"
        _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for end, bridge in zip(ends, ("node0", f"node{node}"), strict=True):
            _run("ip", "link", "set", end, "master", bridge, "up")
            _shape(end, uplink or 0)
    for host, rate in enumerate(rates):
        port = f"port{host}"
        unshare(CLONE_NEWNET)
        hosts.append(_namespace())
        enter(outside)
        _run("ip", "link", "add", port, "type", "veth", "peer", "name", f"host{host}")
        _run("ip", "link", "set", f"host{host}", "netns", f"/proc/{os.getpid()}/fd/{hosts[-1]}")
        _run("ip", "link", "set", port, "master", f"node{host // hosts_per_node}", "up")
        _shape(port, rate)
        enter(hosts[-1])
        _run("ip", "link", "set", f"host{host}", "name", INTERFACE)
        _run("ip", "address", "add", f"10.42.0.{host + 1}/24", "dev", INTERFACE)
        for device in ("lo", INTERFACE):
            _run("ip", "link", "set", device, "up")
        _shape(INTERFACE, rate)
        enter(outside)
    return hosts


def _isolate() -> None:
    """Leave the machine's network: through a user namespace of one's own, else as root."""
    user, group = os.geteuid(), os.getegid()
    try:
        unshare(CLONE_NEWUSER)
    except OSError:
        if user != 0:
            raise
    else:
        for name, text in (
            ("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")
        ):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    unshare(CLONE_NEWNET)
    LIBC.prctl(PR_SET_DUMPABLE, 1)


def _shape(device: str, bits_per_s: int) -> None:
    burst = max(LEAST_BURST, round(bits_per_s / 8 * BURST_S))
    _run(
        "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{bits_per_s}bit",
        "burst", str(burst), "latency", IN_FLIGHT,
    )
    _run("ip", "link", "set", device, "gso_max_size", SUPER_PACKET)


def _run(*arguments: str) -> None:
    subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=20)


def _namespace() -> int:
    return os.open("/proc/self/ns/net", os.O_RDONLY)


if __name__ == "__main__":
    main()
