"""The store at which ranks meet."""

from __future__ import annotations

import socket

import pytest

from zreal.processes.rendezvous import store_for_ranks


def test_no_other_process_can_take_the_port_of_the_store() -> None:
    store = store_for_ranks()
    for reuse in (0, 1):
        for host in ("127.0.0.1", ""):
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse)
                with pytest.raises(OSError, match="Address already in use"):
                    other.bind((host, store.port))
