"""The store at which ranks meet: the controller's, or one in the first host of a testbed."""

from __future__ import annotations

import os

import torch.distributed as dist

from zreal.namespaces import IN_TESTBED

FIRST_HOST, PORT = "10.42.0.1", 29_500
"""Address of rank 0 in a testbed, and a port at which nothing else listens there."""


def rendezvous(*, rank: int, world_size: int, port: int) -> dist.TCPStore:
    """The store of this launch; hosts of a testbed cannot reach the controller's at 127.0.0.1."""
    if IN_TESTBED in os.environ:
        return dist.TCPStore(
            FIRST_HOST, PORT, world_size, is_master=rank == 0, wait_for_workers=False
        )
    return dist.TCPStore("127.0.0.1", port, world_size, is_master=False)
