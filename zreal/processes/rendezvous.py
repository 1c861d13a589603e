"""The store at which ranks meet: the controller's, or one in the first host of a testbed."""

from __future__ import annotations

import os
import socket

import torch.distributed as dist

from zreal.testbed.namespaces import IN_TESTBED

HERE = "127.0.0.1"
FIRST_HOST, PORT = "10.42.0.1", 29_500
"""Address of rank 0 in a testbed, and a port at which nothing else listens there."""


def store_for_ranks() -> dist.TCPStore:
    """The controller's store, for ranks of this machine alone, at a port that the system chooses.

    The store takes over a socket that listens. No other process can have the port at any moment:
    the system chooses it as it binds the socket, which does not allow reuse (SO_REUSEADDR).
    """
    listening = socket.socket()
    listening.bind((HERE, 0))
    listening.listen()
    port = listening.getsockname()[1]
    return dist.TCPStore(
        HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def rendezvous(*, rank: int, world_size: int, port: int) -> dist.TCPStore:
    """The store of this launch; hosts of a testbed cannot reach the controller's."""
    if IN_TESTBED in os.environ:
        return dist.TCPStore(
            FIRST_HOST, PORT, world_size, is_master=rank == 0, wait_for_workers=False
        )
    return dist.TCPStore(HERE, port, world_size, is_master=False)
