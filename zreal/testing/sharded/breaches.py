"""Breaches of laws on ranks: all ranks learn of all, and raise the same error of the smallest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zreal.testing.names import named
from zsim.io.units import counted
from zsim.testing.sharding import ShardLawError

__tracebackhide__ = True  # reports of pytest end at the user's own line
Group = dist.ProcessGroup | None


@dataclass(frozen=True, slots=True, order=True)
class Breach:
    """A tensor that breaks a law on this rank: its elements, its name, and how it differs."""

    numel: int
    label: str
    how: str


def require(law: str, breaches: Iterable[Breach], *, group: Group) -> None:
    """ShardLawError on all ranks where `law` is broken on any: the smallest tensor and its ranks.
    """
    world = dist.get_world_size(group)
    gathered: list[Breach | None] = [None] * world
    dist.all_gather_object(gathered, min(breaches, default=None), group=group)
    broken = [(breach, rank) for rank, breach in enumerate(gathered) if breach is not None]
    if not broken:
        return
    smallest = min(breach for breach, _ in broken)
    ranks: dict[str, list[int]] = {}
    for breach, rank in broken:
        if breach.label == smallest.label:
            ranks.setdefault(breach.how, []).append(rank)
    texts = "; ".join(f"{named(those)}: {how}" for how, those in ranks.items())
    where = f"{smallest.label} over {counted(world, 'rank')}"
    raise ShardLawError(where=law, expected="it to hold", found=f"{where}: {texts}")


def shape_text(tensor: Tensor) -> str:
    """The shape as a reader writes it: "2 × 3", "scalar"."""
    return " × ".join(map(str, tensor.shape)) or "scalar"


def differs(actual: Tensor, expected: Tensor, *, name: str) -> str:
    """The first difference of a tensor from the expected one, number for number; "" for none.

    A nan is equal to a nan.
    """
    if actual.shape != expected.shape:
        return f"{name} is of shape {shape_text(actual)}, expected {shape_text(expected)}"
    if actual.dtype != expected.dtype:
        return f"{name} is of {actual.dtype}, expected {expected.dtype}"
    other = _unequal(actual, expected)
    if not other.any():
        return ""
    index = int(other.reshape(-1).nonzero()[0])
    values = (value.reshape(-1)[index].item() for value in (actual, expected))
    return f"{name} has {next(values)} at index {index}, expected {next(values)}"


def apart(actual: Tensor, expected: Tensor, *, start: Tensor) -> float:
    """The largest difference, as a share of the largest way from `start` to what is expected.

    Infinite where one is finite and the other not, as a masked logit is, or both are not alike.
    """
    other = _unequal(actual, expected)
    if not other.any():
        return 0.0
    finite = torch.isfinite(actual) & torch.isfinite(expected)
    if (other & ~finite).any():
        return float("inf")
    way = (expected - start)[finite].abs().max().item()
    difference = (actual - expected)[finite].abs().max().item()
    return difference / way if way else float("inf")


def _unequal(actual: Tensor, expected: Tensor) -> Tensor:
    return (actual != expected) & ~((actual != actual) & (expected != expected))
