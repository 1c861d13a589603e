"""A testbed as its controller sees it: set up, where its ranks go, and removed at the end."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from zsim.cluster.testbed import Layout
from zsim.errors import BackendUnavailableError

PROGRAMS = ("ip", "tc")


@dataclass(frozen=True, slots=True)
class Network:
    """The hosts of a running testbed, by rank: descriptors of namespaces in process `pid`."""

    pid: int
    hosts: tuple[int, ...]

    @property
    def places(self) -> list[tuple[int, int]]:
        """The host of each rank, as `launch` takes it."""
        return [(self.pid, descriptor) for descriptor in self.hosts]


@contextmanager
def network(layout: Layout) -> Iterator[Network]:
    """Set up the hosts of `layout`; BackendUnavailableError where this machine does not allow it.
    """
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if sys.platform != "linux" or missing:
        raise _unavailable(
            f"Linux with {' and '.join(PROGRAMS)}",
            f"no {' and no '.join(missing)}" if missing else sys.platform, "install iproute2",
        )
    holder = subprocess.Popen(
        [sys.executable, "-m", "zreal.testbed.holder"], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        per_node = layout.hosts_per_node if layout.uplink is not None else layout.hosts
        plan = {"rates": layout.rates, "hosts_per_node": per_node, "uplink": layout.uplink}
        holder.stdin.write(json.dumps(plan) + "\n")
        holder.stdin.flush()
        answer = json.loads(holder.stdout.readline() or '{"error": "the holder ended"}')
        if "error" in answer:
            raise _unavailable(
                "namespaces of users and networks, veth, bridge and tbf", answer["error"],
                "allow user namespaces (sysctl user.max_user_namespaces), or run as root",
            )
        yield Network(answer["pid"], tuple(answer["hosts"]))
    finally:
        holder.stdin.close()
        holder.stdout.close()
        holder.kill()
        holder.wait()


def _unavailable(expected: str, cause: str, remedy: str) -> BackendUnavailableError:
    return BackendUnavailableError(where="testbed", expected=expected, found=cause, remedy=remedy)
