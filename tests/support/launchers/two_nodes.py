"""A launcher for tests, `python two_nodes.py RANKS_PER_NODE COMMAND…`: torchrun on two nodes, each
a host of a testbed. When one node fails the other is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial

from zreal.testbed.namespaces import INTERFACE, enter_host
from zreal.testbed.network import network
from zsim.cluster.testbed import layout

LAYOUT = "2x1gbit"
PORT = 29_500


def main() -> int:
    """Start torchrun on both nodes and wait for them; returns the first exit code that is not 0."""
    ranks_per_node, command = sys.argv[1], sys.argv[2:]
    with network(layout(LAYOUT)) as hosts:
        nodes = [
            subprocess.Popen(
                [
                    sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
                    "--nproc-per-node", ranks_per_node, "--rdzv-backend", "c10d", "--rdzv-endpoint",
                    f"10.42.0.1:{PORT}", "--local-addr", f"10.42.0.{node + 1}", "--rdzv-conf",
                    f"is_host={'false' if node else 'true'}", "--no-python", *command,
                ],
                preexec_fn=partial(enter_host, *host),
                env={**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"},
            )
            for node, host in enumerate(hosts.places)
        ]
        signal.signal(signal.SIGTERM, lambda number, frame: _end(nodes))
        while any(node.poll() is None for node in nodes):
            if any(node.poll() for node in nodes):
                _end(nodes)
            time.sleep(0.05)
    return next((node.returncode for node in nodes if node.returncode), 0)


def _end(nodes: list[subprocess.Popen[bytes]]) -> None:
    for node in nodes:
        if node.poll() is None:
            node.terminate()


if __name__ == "__main__":
    sys.exit(main())
