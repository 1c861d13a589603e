"""The device of a rank, and the process group that is bound to it."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from zsim.models.training_options import Device

HOST_ID = "NCCL_HOSTID"
"""Variable by which NCCL tells hosts apart; it refuses two ranks of one host on one GPU."""


def take_device(device: Device, *, local_rank: int) -> torch.device:
    """The device of the rank with this number on its node, which becomes the current one.

    Launchers may show each rank a single GPU. More ranks than GPUs take turns.
    """
    if device == "cpu":
        return torch.device("cpu")
    own = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(own)
    torch.cuda.init()  # a device mesh would else take the GPU of its own choice
    return own


def present_nbytes(device: torch.device) -> int:
    """Bytes of a GPU's memory, whoever uses them."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def tell_hosts_apart(rank: int) -> None:
    """Make each further rank on a GPU one of another host, where the user has set NCCL_HOSTID."""
    if HOST_ID in os.environ:
        os.environ[HOST_ID] += f"-{rank // torch.cuda.device_count()}"


def start_group(
    backend: str, *, store: dist.Store, rank: int, world_size: int, device: torch.device,
    timeout: timedelta | None = None,
) -> None:
    """The default process group. NCCL is bound to the rank's GPU, so that it connects at once and
    takes no other GPU for a barrier."""
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )
