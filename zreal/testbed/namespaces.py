"""Namespaces of users and networks, as Linux makes them and as a rank enters them."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
PR_SET_PDEATHSIG = 1
"""prctl option of Linux's <sys/prctl.h>: the signal sent to a process when its parent ends."""
INTERFACE = "eth0"
"""A host's own end of its link."""
IN_TESTBED = "ZREAL_IN_TESTBED"
"""Environment variable that is set in ranks which run in a host of a testbed."""
LIBC = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Move this process to new namespaces; OSError where that is not allowed."""
    _checked(LIBC.unshare(flags), "unshare")


def enter(descriptor: int) -> None:
    """Move this thread to the network namespace of `descriptor`; OSError where not allowed."""
    _checked(LIBC.setns(descriptor, CLONE_NEWNET), "setns")


def enter_host(pid: int, descriptor: int) -> None:
    """Move this process, which must have no other threads yet, to a host of the holder `pid`."""
    net = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY)
    if LIBC.setns(net, CLONE_NEWNET):  # who is not root joins the holder's users first
        user = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
        _checked(LIBC.setns(user, CLONE_NEWUSER), "setns")
        os.close(user)
        enter(net)
    os.close(net)


def _checked(status: int, call: str) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
