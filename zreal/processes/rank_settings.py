"""The settings of a process that is one rank: a thread, and the memory that it frees."""

from __future__ import annotations

import ctypes

import torch

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt (malloc.h)."""
NEVER = 2**31 - 1


def settle() -> None:
    """One thread for torch, since ranks share the machine's cores; and a heap that keeps what is
    freed, as CUDA's caching allocator does.

    By default glibc gives large free blocks back. A step's temporaries and gradients then fault
    in page by page, anew in each step. On a virtual machine 4 KiB take 2 µs: half of the step of
    an MLP of 12 million parameters. Other C libraries have no mallopt, and are left as they are.
    """
    torch.set_num_threads(1)
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, NEVER)
