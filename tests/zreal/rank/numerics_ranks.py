"""Bodies of ranks in the tests of numerics, with the arguments that zreal.processes.launch
gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from zreal.observer.observer import observe
from zreal.processes.reference_cost import num_steps
from zreal.processes.rendezvous import rendezvous
from zreal.rank.numerics import rank_numerics
from zsim.scenario.scenario import parse


def one_bit_off(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int,
    progress: Callable[[str], None], keep: Callable[[dict[str, Any]], None],
) -> list[str]:
    """Rank 1 changes the last bit of an element; returns the differences that a rank tells."""
    scenario = parse(arguments["text"].encode(), where="numerics.toml")
    store = rendezvous(rank=rank, world_size=world_size, port=port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    trained = observe(scenario, rank=rank, steps=num_steps(scenario), parity=True)
    if rank == 1:
        flat = next(iter(getattr(trained, arguments["what"]).values())).view(-1)
        flat[0] = torch.nextafter(flat[0], flat[0] + 1)
    numbers = rank_numerics(scenario, trained, rank=rank, mode="sampled", device="cpu")
    assert numbers is not None
    dist.barrier()
    dist.destroy_process_group()
    return [
        str(numbers.largest_relative_difference), str(numbers.largest_gradient_difference)
    ]
