"""Requirements of a test on ranks: a body that ranks can call, torch, and devices."""

from __future__ import annotations

import fcntl
import importlib.util
import inspect
import os
import tempfile
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

HOST_ID = "NCCL_HOSTID"
"""Variable by which users let several NCCL ranks share a GPU."""


def unfit(item: pytest.Item) -> str:
    """The reason for which ranks cannot call the body of a test; "" for none."""
    if item.get_closest_marker("zero") is not None:
        return "marker ranks: expected no marker zero beside it, found both; make two tests: " \
               "zero runs a body once, ranks on every rank"
    owner = getattr(item, "cls", None)
    if owner is not None and issubclass(owner, unittest.TestCase):
        return "marker ranks: expected a function or a method of a plain class, found one of a " \
               "unittest.TestCase; derive the class from nothing, and use fixtures"
    if inspect.iscoroutinefunction(getattr(item, "obj", None)):
        return "marker ranks: expected a plain function, found a coroutine; call asyncio.run in it"
    return ""


def missing(backend: str, world_size: int) -> str:
    """The reason for which a backend is not there for so many ranks; "" where it is."""
    if importlib.util.find_spec("torch") is None:
        return "marker ranks: expected torch, found none; pip install 'zsim[real]'"
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return "marker ranks: expected torch.distributed, found a torch without it"
    if backend != "nccl":
        return ""
    needed = 1 if HOST_ID in os.environ else world_size
    if torch.cuda.device_count() >= needed and dist.is_nccl_available():
        return ""
    return _too_few("ranks: nccl", needed)


def missing_gpus(mark: pytest.Mark) -> str:
    """The reason for which the GPUs of a marker `needs_gpus` are not there; "" where they are."""
    number = mark.args[0] if len(mark.args) == 1 and not mark.kwargs else None
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        pytest.fail("marker needs_gpus: expected a number of GPUs, as needs_gpus(2)", pytrace=False)
    if importlib.util.find_spec("torch") is None:
        return "marker needs_gpus: expected torch, found none; pip install 'zsim[real]'"
    return _too_few("needs_gpus", number)


def _too_few(marker: str, needed: int) -> str:
    import torch

    devices = torch.cuda.device_count()
    few = f"marker {marker}: expected {needed} CUDA devices, found {devices}"
    return few if devices < needed else ""


def skip(reason: str) -> NoReturn:
    """Skip a test; the report names the line of the test, and none of this package."""
    skipped: Any = pytest.skip.Exception(reason)
    skipped._use_item_location = True
    raise skipped


@contextmanager
def devices_alone(backend: str) -> Iterator[None]:
    """Context manager in which no other test of this user has the GPUs of this machine."""
    if backend != "nccl":
        yield
        return
    path = Path(tempfile.gettempdir()) / f"zreal-gpus-{os.getuid()}.lock"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
