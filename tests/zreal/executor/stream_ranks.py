"""Bodies of ranks that train by a Program on streams of their device, and on one stream alone."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from zreal.executor.executor import execute
from zreal.processes.rank_device import start_group, take_device, tell_hosts_apart
from zreal.processes.rank_settings import settle
from zreal.processes.rendezvous import rendezvous
from zsim.scenario.plan import plan
from zsim.scenario.scenario import parse

STEPS = 4


def both_forms(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int, **_: Any
) -> list[Any]:
    """Losses with the device's streams and with the current one in place of each.

    Fqns of the parameters and of the gradients that differ follow.
    """
    settle()
    kind = arguments["device"]
    if kind == "cuda":
        tell_hosts_apart(rank)
    device = take_device(kind, local_rank=rank)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    case = parse(arguments["text"].encode(), where="test.toml")
    start_group(
        "nccl" if kind == "cuda" else "gloo", rank=rank, world_size=world_size, device=device,
        store=rendezvous(rank=rank, world_size=world_size, port=port),
    )
    module = torch.get_device_module(kind)
    one_stream = SimpleNamespace(
        Stream=lambda priority: module.current_stream(), Event=module.Event,
        current_stream=module.current_stream, stream=module.stream,
    )
    told = []
    for form in (module, one_stream):
        torch.get_device_module = lambda _, form=form: form
        told.append(execute(
            case, plan(case, device=kind), rank=rank, steps=STEPS, device=kind, parity=True
        ))
    dist.destroy_process_group()
    streams, single = told
    return [streams.losses, single.losses, *(
        [fqn for fqn in left if not torch.equal(left[fqn], right[fqn])]
        for left, right in (
            (streams.parameters, single.parameters), (streams.gradients, single.gradients)
        )
    )]
